"""Which workers are worth weighing for a request, and what each pair of them would cost. Pure.

The policy `cost` takes the least of them; admission predicts by them, whatever the policy.
"""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from cluster.router.pairs import DecodeHalf, Pairs, PrefillHalf
from cluster.router.question import Candidate, Group, Question

_IDLE = 4
"""Least busy prefill workers that are weighed: tokens in queue do not tell exactly who is the cheapest."""
_FEW = 4
"""Holders of equally much of a prompt that are weighed one by one; of more, only the least busy."""
_LEVELS = 4
"""Deepest levels of holders that are weighed."""
_MANY, _HOLDERS = 32, 16
"""Candidates, holders of equally much: looked at one by one; of more, so many from a random place on are as good."""
NEARLY, NEARLY_S = 0.02, 1e-4
"""Within this share and these seconds of the least, loads and costs are equal, and chance decides."""


def weigh(question: Question, rng: Random) -> Pairs:
    """Return the pairs worth considering."""
    prefill = _worth_considering(question, question.prefill, _prefill_loads, _IDLE, rng)
    decode = _worth_considering(question, question.decode, _decode_loads, 1, rng)
    return Pairs(
        [PrefillHalf.of(question, worker) for worker in prefill],
        [DecodeHalf.of(question, worker) for worker in decode],
    )


class _Loads(Protocol):
    def __call__(self, question: Question, candidates: Sequence[Candidate]) -> list[float]: ...


def _worth_considering(
    question: Question, group: Group, loads: _Loads, num_idle: int, rng: Random
) -> Sequence[Candidate]:
    """Return the `num_idle` least busy, and those of the holders of the prompt's beginning that may be better.

    Of workers that hold equally much, hardly any but the least busy can be the cheapest; so the number of those weighed
    does not grow with the cluster.
    """
    if not group.members:
        return ()
    seen = _drawn(group.members, rng)
    idle = _idlest(seen, loads(question, seen), num_idle)
    found = {candidate.worker_id: candidate for candidate in idle}
    hits = question.hits
    for level in hits.levels[: -_LEVELS - 1 : -1]:  # the deepest first
        holders = level.holders & group.bits(hits.bits)
        count = holders.bit_count()
        if count > _FEW and holders & hits.bits.get(idle[0].worker_id, 0):
            continue  # the least busy of all is the least busy of these
        first = rng.choice(seen).worker_id if count > _HOLDERS else ""
        members = hits.those_of(holders, group.by_id, _HOLDERS, first)
        if len(members) > _FEW:
            members = [_least(members, loads(question, members), rng)]
        found.update((candidate.worker_id, candidate) for candidate in members)
    return list(found.values())


def _drawn(members: Sequence[Candidate], rng: Random) -> Sequence[Candidate]:
    """Return _MANY of the members, or all of so few: neighbours from a place drawn at random, which takes one draw.

    Each is as likely as any other to be among them, and to come first of equals; neighbours have nothing in common but
    their numbers.
    """
    start, count = rng.randrange(len(members)), min(_MANY, len(members))
    return [*members[start : start + count], *members[: max(0, start + count - len(members))]]


def _idlest(candidates: Sequence[Candidate], loads: Sequence[float], count: int) -> Sequence[Candidate]:
    """Return the least busy, the least first; of equals those that come first."""
    if count == 1:
        return [candidates[loads.index(min(loads))]]
    places = sorted(range(len(loads)), key=loads.__getitem__)
    return [candidates[place] for place in places[:count]]


def _least(candidates: Sequence[Candidate], loads: Sequence[float], rng: Random) -> Candidate:
    most = (1 + NEARLY) * min(loads) + NEARLY_S
    return rng.choice([candidate for candidate, load in zip(candidates, loads, strict=True) if load <= most])


def _prefill_loads(question: Question, candidates: Sequence[Candidate]) -> list[float]:
    tokens = question.num_tokens
    return [(candidate.queued_tokens + tokens) * candidate.token_s for candidate in candidates]


def _decode_loads(question: Question, candidates: Sequence[Candidate]) -> list[float]:  # noqa: ARG001 - see _Loads
    return [candidate.step_s for candidate in candidates]
