"""Each row of a batch is sampled by its own rules alone, reproducibly, from the distribution that the rules define."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch_rules import Filters, split_mix, uniform
from engine.sampler import Sampler, draw, keep_likely
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import TokenOutput

VOCAB = 50
EOS = 2
SAMPLER = Sampler(frozenset({EOS}))

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 49, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    min_tokens=st.sampled_from([0, 3, 100]),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    logprobs=st.sampled_from([None, 0, 1, 5]),
)
ROWS = st.lists(st.tuples(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6)), min_size=1, max_size=6)


def _sequence(rules: SamplingParams, output: list[int], prompt: tuple[int, ...] = (1, 4)) -> Sequence:
    return Sequence.start("r", [*prompt, *output], len(prompt), rules, 4)


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _filters(scores: torch.Tensor, **rules: Any) -> Filters:
    return Filters.of([SamplingParams(**rules)], scores.shape[1], scores.device)


def _sample(logits: torch.Tensor, *sequences: Sequence) -> list[TokenOutput]:
    return SAMPLER.sample(logits.clone(), sequences)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    logits = _logits(seed, len(rows))
    sequences = [_sequence(rules, output) for rules, output in rows]

    together = _sample(logits, *sequences)

    for row, sequence in enumerate(sequences):
        [alone] = _sample(logits[row : row + 1], sequence)
        assert together[row].token_id == alone.token_id
        assert [i for i, _ in together[row].top] == [i for i, _ in alone.top]
        assert together[row].logprob == (None if alone.logprob is None else pytest.approx(alone.logprob, abs=1e-5))


@settings(max_examples=60, deadline=None)
@given(rules=PARAMS, output=st.lists(st.integers(0, VOCAB - 1), max_size=6), seed=st.integers(0, 1000))
def test_a_moved_sequence_draws_the_same_token(rules: SamplingParams, output: list[int], seed: int) -> None:
    logits = _logits(seed)
    here, moved = _sequence(rules, output), _sequence(rules, output)
    moved.block_table, moved.num_computed, moved.request_id = [7, 8], 3, "moved"

    assert _sample(logits, here) == _sample(logits, moved)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, steps=st.integers(1, 5), data=st.data())
def test_steps_of_the_same_rows_choose_as_if_each_were_the_first(
    rows: list[tuple[SamplingParams, list[int]]], steps: int, data: st.DataObject
) -> None:
    """What is kept from one step to the next changes no token, whoever joins, leaves or stands still meanwhile."""
    kept, sequences = Sampler(frozenset({EOS})), [_sequence(rules, output) for rules, output in rows]

    for step in range(steps):
        present = data.draw(st.just(sequences) | st.permutations(sequences))
        present = present[: data.draw(st.sampled_from([len(rows)] * 3 + list(range(1, len(rows) + 1))))]
        logits = _logits(step, len(present))
        expected = logits.clone()

        outputs = kept.sample(logits, present)

        assert outputs == Sampler(frozenset({EOS})).sample(expected, present)
        assert torch.equal(logits, expected)  # both are shifted in place
        for sequence in present:
            if data.draw(st.integers(0, 9)):  # a step may fail for a row
                sequence.append(step, 4)


@given(rules=PARAMS, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_drawn_token_is_one_that_the_filters_keep(rules: SamplingParams, seed: int) -> None:
    logits = _logits(seed)
    plain = SamplingParams(
        temperature=max(rules.temperature, 0.3),
        top_p=rules.top_p,
        top_k=rules.top_k,
        min_p=rules.min_p,
        seed=rules.seed,
    )

    [output] = _sample(logits, _sequence(plain, []))

    scores = ((logits - logits.max()) / plain.temperature).softmax(-1)[0]
    ranked = scores.argsort(descending=True).tolist()
    rank = ranked.index(output.token_id)
    assert rank < (plain.top_k or VOCAB)
    assert scores[output.token_id] >= plain.min_p * scores.max() * 0.999
    survivors = [p for p in scores[ranked].tolist() if p >= plain.min_p * float(scores.max()) * 0.999]
    survivors = survivors[: plain.top_k or VOCAB]
    assert sum(survivors[:rank]) / sum(survivors) < plain.top_p + 1e-5


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    draws = 4000
    sequences = [_sequence(SamplingParams(temperature=1.0, seed=seed), []) for seed in range(draws)]

    outputs = _sample(logits.expand(draws, -1), *sequences)

    counts = Counter(output.token_id for output in outputs)
    # Five standard deviations of a binomial: 1 in 10^6 if the draws were random; they are fixed by their seeds.
    for token_id, share in enumerate([0.5, 0.3, 0.2]):
        assert abs(counts[token_id] / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_meet_no_excluded_token(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]])

    drawn = draw(logits, _filters(logits, temperature=1.0), np.array([number]))

    assert drawn.tolist() == [1 if number == 0 else 3]


@settings(max_examples=60, deadline=None)
@given(vocab=st.sampled_from([127, 128, 129, 1000]), seed=st.integers(0, 1000), data=st.data())
def test_the_drawn_token_is_where_the_cumulative_distribution_passes_the_number(
    vocab: int, seed: int, data: st.DataObject
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, data.draw(st.integers(0, vocab - 1)) :: 7] = -torch.inf
    logits[:, 100:120] = -torch.inf
    numbers = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3))
    rules = [SamplingParams(temperature=0.7)] * 3

    drawn = draw(logits, Filters.of(rules, vocab, logits.device), np.array(numbers))

    shares = (logits.double() / 0.7).softmax(-1)
    for row, (token, number) in enumerate(zip(drawn.tolist(), numbers, strict=True)):
        assert shares[row, token] > 0
        assert float(shares[row, :token].sum()) <= number + 1e-5
        assert float(shares[row, : token + 1].sum()) >= number - 1e-5


def test_positions_of_one_seed_and_seeds_of_one_position_are_spread_evenly() -> None:
    seeds, positions = np.arange(4000, dtype=np.uint64), np.arange(4000)
    one_seed, one_position = np.full(4000, 7, np.uint64), np.full(4000, 7)
    for numbers in (uniform(split_mix(one_seed), positions), uniform(split_mix(seeds), one_position)):
        assert min(numbers) >= 0
        assert max(numbers) < 1
        buckets = Counter(int(number * 10) for number in numbers)
        assert all(abs(buckets[i] - 400) < 5 * 19 for i in range(10))


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        pytest.param({}, 6, id="all"),
        pytest.param({"top_k": 2}, 2, id="top_k"),
        pytest.param({"top_k": 4}, 6, id="a tie with the last one kept is kept"),
        pytest.param({"top_p": 0.5}, 1, id="top_p reached by the first"),
        pytest.param({"top_p": 0.51}, 2, id="top_p needs the second"),
        pytest.param({"top_p": 1e-9}, 1, id="the most likely always stays"),
        pytest.param({"min_p": 0.3}, 2, id="min_p"),
        pytest.param({"top_k": 2, "top_p": 0.7}, 2, id="top_p counts what top_k left"),
        pytest.param({"top_k": 2, "top_p": 0.6}, 1, id="top_p counts what top_k left, less"),
    ],
)
def test_filters_keep_what_they_name(rules: dict[str, Any], kept: int) -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.1, 0.05, 0.05, 0.05]])
    scores = (probabilities / probabilities.max()).log()

    left = keep_likely(scores, _filters(scores, temperature=1.0, **rules))

    assert torch.isfinite(left).sum() == kept
    assert torch.equal(left[torch.isfinite(left)], scores[0, :kept])


def test_top_p_looks_beyond_the_likely_tokens_when_the_distribution_is_flat() -> None:
    scores = torch.zeros(1, 5000) - torch.arange(5000) * 1e-6

    left = keep_likely(scores, _filters(scores, temperature=1.0, top_p=0.5))

    assert 2480 < int(torch.isfinite(left).sum()) < 2520


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    [output] = _sample(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), _sequence(SamplingParams(), []))

    assert output == TokenOutput(1, None, [])


@pytest.mark.parametrize(
    ("rules", "output", "expected"),
    [
        pytest.param({"repetition_penalty": 2.0}, [], [5.0, 2.0, 3.0, -1.0, -4.0], id="repetition counts the prompt"),
        pytest.param({"presence_penalty": 1.0}, [0, 0], [4.0, 4.0, 3.0, -1.0, -2.0], id="presence counts once"),
        pytest.param({"frequency_penalty": 1.0}, [0, 0], [3.0, 4.0, 3.0, -1.0, -2.0], id="frequency counts each"),
        pytest.param(
            {"presence_penalty": 1.0, "frequency_penalty": 1.0}, [], [5.0, 4.0, 3.0, -1.0, -2.0], id="no output"
        ),
        pytest.param({"logit_bias": {3: 7.0}}, [], [5.0, 4.0, 3.0, 6.0, -2.0], id="bias"),
    ],
)
def test_rules_shift_logits_as_documented(rules: dict[str, Any], output: list[int], expected: list[float]) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0, -2.0]])

    SAMPLER.sample(logits, [_sequence(SamplingParams(**rules), output)])

    assert logits.tolist() == [expected]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 1000), padding=st.integers(0, 3))
def test_a_whole_batch_is_shifted_as_each_row_would_be_by_itself(
    rows: list[tuple[SamplingParams, list[int]]], seed: int, padding: int
) -> None:
    """Also where rows of logits do not follow one another in memory."""
    logits = _logits(seed, len(rows))
    padded = torch.zeros(len(rows), VOCAB + padding)[:, :VOCAB]
    padded[:] = logits

    SAMPLER.sample(padded, [_sequence(rules, output) for rules, output in rows])

    for row, (rules, output) in enumerate(rows):
        expected = logits[row].tolist()
        for token, bias in rules.logit_bias.items():
            expected[token] += bias
        if len(output) < rules.min_tokens:
            for token in {EOS, *rules.stop_token_ids}:
                expected[token] = torch.finfo(torch.float32).min
        for token in {1, 4, *output}:
            penalty = rules.repetition_penalty
            expected[token] = expected[token] / penalty if expected[token] > 0 else expected[token] * penalty
        for token in set(output):
            expected[token] -= rules.presence_penalty + rules.frequency_penalty * output.count(token)
        assert torch.allclose(padded[row], torch.tensor(expected, dtype=torch.float64).float(), rtol=1e-4, atol=1e-4)


def test_stop_tokens_are_out_of_the_question_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, 9.0, 8.0, 1.0]])
    rules = SamplingParams(min_tokens=2, stop_token_ids=frozenset({3}))

    early, late = _sample(logits.expand(2, -1), _sequence(rules, [1]), _sequence(rules, [1, 1]))

    assert (early.token_id, late.token_id) == (4, EOS)


def test_an_ignored_end_of_sequence_is_not_suppressed() -> None:
    logits = torch.tensor([[0.0, 0.0, 9.0, 8.0]])

    [output] = _sample(logits, _sequence(SamplingParams(min_tokens=2, ignore_eos=True), []))

    assert output.token_id == EOS


def test_a_model_without_end_of_sequence_has_nothing_to_suppress() -> None:
    [output] = Sampler(frozenset()).sample(
        torch.tensor([[0.0, 0.0, 9.0]]), [_sequence(SamplingParams(min_tokens=2), [])]
    )

    assert output.token_id == EOS


def test_even_with_every_token_suppressed_one_is_drawn() -> None:
    rules = SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=frozenset(range(VOCAB)))

    [output] = _sample(_logits(0), _sequence(rules, []))

    assert 0 <= output.token_id < VOCAB


def test_logprobs_are_the_models_own_whatever_the_rules_do() -> None:
    logits = _logits(5)
    own = logits.log_softmax(-1)[0]
    rules = SamplingParams(temperature=0.5, logprobs=3, logit_bias={11: 900.0})

    [output] = _sample(logits, _sequence(rules, []))

    assert output.token_id == 11
    assert output.logprob == pytest.approx(float(own[11]))
    assert [token_id for token_id, _ in output.top] == own.topk(3).indices.tolist()
    assert [logprob for _, logprob in output.top] == pytest.approx(own.topk(3).values.tolist())
