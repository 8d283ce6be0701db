"""What is found by halves is what a look at every pair would find."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.backlog import Prompt
from cluster.router.estimate import PairEstimate, estimate_pair
from cluster.router.hot_prefixes import NOT_HOT, Hot
from cluster.router.pairs import DecodeHalf, Margin, Pairs, PrefillHalf
from cluster.router.policies.cost import Cost
from cluster.router.prefix_index import PrefixIndex
from cluster.router.question import Candidate, Group, Outlook, Question, TrackedGroup
from cluster.router.step_model import StepModel
from cluster.router.weighing import weigh
from common.chain_hash import chain_hashes

BLOCK = 16
CHAIN = chain_hashes(range(512), BLOCK)
EQUAL = Margin(0.02, 1e-4)


def a_worker(rng: Random, worker_id: str) -> Candidate:
    model = StepModel(0.005, rng.choice([1e-4, 1e-3]), 1e-8, 1e-3, 1e-7)
    sequences = rng.choice([0, 0, 1, 5, 40])
    worker = Candidate(
        worker_id,
        prefills_itself=rng.random() < 0.2,
        num_sequences=sequences,
        pool_tokens=4096,
        used_tokens=sequences * 100,
        free_tokens=rng.randrange(2000),
        model=model,
        step_s=model.decode_s(sequences, sequences * 100),
        exposed_token_s=rng.choice([0.0, 1e-6, 1e-4]),
        token_s=model.token_s,
    )
    for number in range(rng.randrange(4)):
        uncached = rng.randrange(1, 2000)
        worker.backlog.add(number, Prompt(uncached, uncached, uncached * model.token_s), 0.0)
    worker.backlog_s = worker.backlog.total_s
    return worker


def a_question(seed: int, num_prefill: int, num_decode: int) -> Question:
    """Return a request of 512 tokens or a little more, of which any worker may hold any part."""
    rng = Random(seed)
    prefill = [a_worker(rng, f"p{number}") for number in range(num_prefill)]
    decode = [a_worker(rng, f"d{number}") for number in range(num_decode)]
    index = PrefixIndex()
    for worker in [*prefill, *decode]:
        index.replace(worker.worker_id, CHAIN[: rng.choice([0, 0, 10, 31, 32])])
    hits = index.find(CHAIN)
    return Question(
        num_tokens=rng.choice([512, 520]),
        num_blocks=len(CHAIN),
        decode=Group(decode),
        prefill=Group(prefill),
        hits=hits,
        deepest=hits.in_pool[-1] if hits.in_pool and rng.random() < 0.5 else None,
        hot=rng.choice([NOT_HOT, Hot(20, 0.5)]),
        block_tokens=BLOCK,
        ttft_target_s=rng.choice([None, 0.01, 0.5, 5.0]),
        tpot_target_s=rng.choice([None, 0.001, 0.02, 1.0]),
        outlook=Outlook(0.1, rng.choice([10.0, 300.0]), rng.choice([0.0, 0.3]), 1.5),
    )


QUESTIONS = st.builds(a_question, st.integers(0, 2**32), st.integers(0, 6), st.integers(1, 6))


def halves(question: Question) -> Pairs:
    return Pairs(
        [PrefillHalf.of(question, worker) for worker in question.prefill],
        [DecodeHalf.of(question, worker) for worker in question.decode],
    )


def the_fit(pairs: list[PairEstimate]) -> list[PairEstimate]:
    return [pair for pair in pairs if pair.meets_targets] or pairs


@given(QUESTIONS)
@settings(max_examples=150, deadline=None)
def test_all_pairs_are_weighed_each_as_if_it_were_the_only_one(question: Question) -> None:
    pairs = halves(question)

    alone = [estimate_pair(question, pair.decode, pair.prefill) for pair in pairs]

    assert list(pairs) == alone
    assert len(pairs) == len(alone) == len(question.decode) * (len(question.prefill) + 1)
    assert all(pair.total_s == pytest.approx(sum(pair.terms().values())) for pair in alone)


@given(QUESTIONS)
@settings(max_examples=150, deadline=None)
def test_the_least_and_its_equals_are_those_of_a_look_at_every_pair(question: Question) -> None:
    pairs = halves(question)
    fit = the_fit(list(pairs))
    least = min(pair.total_s for pair in fit)

    best = pairs.least()
    most = best.total_s + EQUAL.share * best.first.ttft_s + EQUAL.seconds

    assert best in fit
    assert best.total_s == least
    assert pairs.nearly_least(EQUAL) == [pair for pair in fit if pair.total_s <= most]


@given(QUESTIONS)
@settings(max_examples=150, deadline=None)
def test_harmless_pairs_stop_no_sequence_that_another_worker_could_spare(question: Question) -> None:
    pairs = list(halves(question))
    sparing = [p for p in pairs if p.prefill or p.decode.prefills_itself or not p.decode.num_sequences]

    assert list(halves(question).harmless()) == (sparing or pairs)


@given(QUESTIONS, st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_the_cost_policy_decides_as_a_look_at_every_pair_does(question: Question, seed: int) -> None:
    rng = Random(seed)
    fit = the_fit(list(weigh(question, rng)))
    best = min(fit, key=lambda pair: pair.total_s)
    most = best.total_s + EQUAL.share * best.first.ttft_s + EQUAL.seconds
    expected = rng.choice([pair for pair in fit if pair.total_s <= most])

    choice = Cost().choose(question, Random(seed))

    assert (choice.decode, choice.prefill) == (expected.decode, expected.prefill)
    assert choice.estimate == expected


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=40))
def test_a_group_that_is_told_of_changes_knows_who_has_room(full: list[bool], flips: list[int]) -> None:
    members = [Candidate(f"d{number}", is_full=is_full) for number, is_full in enumerate(full)]
    tracked, stranger = TrackedGroup(list(members)), Candidate("elsewhere", is_full=True)

    for number in flips:
        flipped = members[number % len(members)]
        flipped.is_full = not flipped.is_full
        tracked.changed(flipped)
        tracked.changed(stranger)
        plain = Group(members)

        assert tracked.has_room == plain.has_room
        assert tracked.with_room().members == plain.with_room().members
        assert tracked.with_room().by_id == plain.with_room().by_id
