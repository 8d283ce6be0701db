"""A ragged batch gives each token the slot, position and block table that its sequence says."""

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import make_batch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

CHUNKS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5)


@given(chunks=CHUNKS, block_tokens=st.integers(1, 5))
def test_rows_lie_chunk_by_chunk_where_block_tables_say(chunks: list[tuple[int, int, int]], block_tokens: int) -> None:
    scheduled, expected, ends = [], [], []
    for index, (computed, count, rest) in enumerate(chunks):
        num_tokens = computed + count + rest
        tokens = [100 * index + position for position in range(num_tokens)]
        sequence = Sequence.start(str(index), tokens, 1, SamplingParams(), block_tokens)
        # Blocks in falling order and more than are needed, as a growing sequence has.
        sequence.block_table = [1000 * (index + 1) - block for block in range(num_tokens // block_tokens + 2)]
        sequence.num_computed = computed
        scheduled.append(ScheduledChunk(sequence, count))
        for position in range(computed, computed + count):
            block = 1000 * (index + 1) - position // block_tokens
            expected.append((tokens[position], position, block * block_tokens + position % block_tokens))
        if rest == 0:
            ends.append(len(expected) - 1)

    batch = make_batch(scheduled, block_tokens)

    rows = zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True)
    assert list(rows) == expected
    assert batch.logit_rows.tolist() == ends
    assert batch.num_tokens == len(expected)
    for segment, chunk, table in zip(batch.segments, scheduled, batch.block_tables.tolist(), strict=True):
        needed = -(-segment.num_keys // block_tokens)
        assert (segment.num_context, segment.num_rows) == (chunk.sequence.num_computed, chunk.num_tokens)
        assert table[:needed] == chunk.sequence.block_table[:needed]
        assert set(table[needed:]) <= {chunk.sequence.block_table[0]}
