"""A ragged batch gives each token the slot, position and block table that its sequence says."""

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import make_batch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

CHUNKS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 5), st.integers(1, 20), st.booleans()),
    min_size=1,
    max_size=5,
)


@given(chunks=CHUNKS, block_tokens=st.integers(1, 5))
def test_rows_lie_chunk_by_chunk_where_block_tables_say(
    chunks: list[tuple[int, int, int, int, bool]], block_tokens: int
) -> None:
    scheduled, expected = [], []
    ends: dict[bool, list[int]] = {True: [], False: []}
    for index, (computed, count, rest, num_prompt, is_plain) in enumerate(chunks):
        num_tokens = computed + count + rest
        tokens = [100 * index + position for position in range(num_tokens)]
        rules = SamplingParams(temperature=0.0 if is_plain else 1.0)
        sequence = Sequence.start(str(index), tokens, min(num_prompt, num_tokens), rules, block_tokens)
        # Blocks in falling order and more than are needed, as a growing sequence has.
        sequence.block_table = [1000 * (index + 1) - block for block in range(num_tokens // block_tokens + 2)]
        sequence.num_computed = computed
        scheduled.append(ScheduledChunk(sequence, count))
        for position in range(computed, computed + count):
            block = 1000 * (index + 1) - position // block_tokens
            expected.append((tokens[position], position, block * block_tokens + position % block_tokens))
        if rest == 0:
            ends[is_plain].append(len(expected) - 1)

    batch = make_batch(scheduled, block_tokens)

    rows = zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True)
    assert list(rows) == expected
    assert (batch.logit_rows.tolist(), batch.greedy_rows.tolist()) == (ends[False], ends[True])
    assert batch.asked_rows.tolist() == ends[False] + ends[True]
    assert batch.asking_all().asked_rows.tolist() == list(range(batch.num_tokens))
    assert batch.num_tokens == len(expected)
    owners = [chunk.sequence for chunk in scheduled for _ in range(chunk.num_tokens)]
    row = 0
    for segment, table in zip(batch.segments, batch.block_tables.tolist(), strict=True):
        sequence = owners[row]
        assert segment.first_row == row
        assert segment.num_context == expected[row][1]
        assert all(owner is sequence for owner in owners[row : row + segment.num_rows])
        assert segment.is_decode == (segment.num_context >= sequence.num_prompt_tokens)
        assert segment.num_rows == 1 if segment.is_decode else segment.num_keys <= sequence.num_prompt_tokens
        needed = -(-segment.num_keys // block_tokens)
        assert table[:needed] == sequence.block_table[:needed]
        assert set(table[needed:]) <= {sequence.block_table[0]}
        row += segment.num_rows
    assert row == len(expected)
