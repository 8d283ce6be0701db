"""All pairs of workers that are weighed for a request: sums of halves, so that the least is found by the halves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.router.estimate import (
    DecodeEstimate,
    PairEstimate,
    PrefillEstimate,
    estimate_decode,
    estimate_local,
    estimate_prefill,
    pair_up,
)
from cluster.router.question import Candidate, Question


class PrefillHalf(NamedTuple):
    """A worker that could prefill for others."""

    worker: Candidate
    first: PrefillEstimate
    cost_s: float

    @classmethod
    def of(cls, question: Question, worker: Candidate) -> "PrefillHalf":
        """Estimate it."""
        first = estimate_prefill(question, worker)
        return cls(worker, first, first.cost_s)


class DecodeHalf(NamedTuple):
    """A worker that could decode, and what it would be if it prefilled as well."""

    worker: Candidate
    then: DecodeEstimate
    cost_s: float
    """With the transfer from another worker."""
    alone: PairEstimate | None
    """Without another worker; None: it is spared that."""

    @classmethod
    def of(cls, question: Question, worker: Candidate) -> "DecodeHalf":
        """Estimate it."""
        then = estimate_decode(question, worker)
        alone = pair_up(worker, None, estimate_local(question, worker), then)
        return cls(worker, then, then.cost_s + then.exposed_s, alone)

    @property
    def spared(self) -> "DecodeHalf":
        """The same without prefill on it, if that would stop sequences there."""
        is_harmless = self.worker.prefills_itself or not self.worker.num_sequences
        return self if is_harmless else self._replace(alone=None)


class Margin(NamedTuple):
    """By how much a pair may cost more than the least and count as equal."""

    share: float
    """Of the TTFT of the least."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Pairs:
    """Each prefill half with each decode half, and each decode half alone. Decode halves are never empty."""

    prefill: Sequence[PrefillHalf]
    decode: Sequence[DecodeHalf]

    def __len__(self) -> int:
        return len(self.prefill) * len(self.decode) + sum(half.alone is not None for half in self.decode)

    def __iter__(self) -> Iterator[PairEstimate]:
        for half in self.decode:
            for other in self.prefill:
                yield pair_up(half.worker, other.worker, other.first, half.then)
            if half.alone is not None:
                yield half.alone

    def __contains__(self, pair: object) -> bool:
        return any(pair == each for each in self)

    def least(self) -> PairEstimate:
        """Return the pair that costs least among those that meet the request's targets; among all, if none does."""
        return self._fit()._least()

    def nearly_least(self, margin: Margin) -> list[PairEstimate]:
        """Return the pairs that cost hardly more than the least; those that meet the targets, as in `least`."""
        fit = self._fit()
        best = fit._least()
        most_s = best.total_s + margin.share * best.first.ttft_s + margin.seconds
        found = []
        for half in fit.decode:
            found += [
                pair_up(half.worker, other.worker, other.first, half.then)
                for other in fit.prefill
                if other.cost_s + half.cost_s <= most_s
            ]
            if half.alone is not None and half.alone.total_s <= most_s:
                found.append(half.alone)
        return found

    def harmless(self) -> "Pairs":
        """Return those that do not stop sequences which another worker could spare.

        Prefill on a decode worker meets a TTFT target at the cost of all TPOT targets there: nobody is let in by that.
        """
        spared = Pairs(self.prefill, [half.spared for half in self.decode])
        return spared if len(spared) else self

    def _fit(self) -> "Pairs":
        """Return the pairs that meet the targets; all, if there is none."""
        prefill = [half for half in self.prefill if half.first.meets_target]
        decode = [half for half in self.decode if half.then.meets_target]
        if len(prefill) == len(self.prefill) and len(decode) == len(self.decode) and all(map(_alone_fits, decode)):
            return self
        decode = [half if _alone_fits(half) else half._replace(alone=None) for half in decode]
        fit = Pairs(prefill, decode)
        return fit if len(fit) else self

    def _least(self) -> PairEstimate:
        alone = min((half.alone for half in self.decode if half.alone is not None), key=_total, default=None)
        if not self.prefill:
            assert alone is not None
            return alone
        half, other = min(self.decode, key=_cost), min(self.prefill, key=_cost)
        if alone is not None and alone.total_s < other.cost_s + half.cost_s:
            return alone
        return pair_up(half.worker, other.worker, other.first, half.then)


def _alone_fits(half: DecodeHalf) -> bool:
    return half.alone is None or half.alone.meets_targets


def _cost(half: PrefillHalf | DecodeHalf) -> float:
    return half.cost_s


def _total(pair: PairEstimate) -> float:
    return pair.total_s
