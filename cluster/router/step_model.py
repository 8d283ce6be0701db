"""What a worker's step costs, as a formula whose coefficients are learned from the worker's own reports."""

import math
from operator import mul
from typing import NamedTuple

_FIELDS = 5
_SHAPE_VARIANCE, _SCALE_VARIANCE = 0.5, 4.0
"""Of the logarithms of the coefficients at the start: each for itself, and all of them together."""
_DRIFT_VARIANCE = 0.002
"""By which a coefficient may have changed between two observations."""
_NOISE_VARIANCE = 0.04
"""Of the logarithm of one observation."""
_FIRST_SURPRISE_MAX, _SURPRISE_MAX = 3.0, 0.5
_FIRST_OBSERVATIONS = 3
_FIRST_BUSY_S, _BUSY_MAX_S = 0.05, 1.0
"""Seconds of work that make an observation: short at first, to learn soon. Long ones are all alike and teach little."""
_ELDERS_EVERY = 64
_TOLD_ALL, _TOLD_EVERY = 16, 4
"""A worker's first observations all go to the elders, later every fourth."""
_OWN_SHARE = 1.0
"""Observations' worth of a component from which on a worker's own coefficient counts."""


class StepModel(NamedTuple):
    """Seconds of one step: the sum of its parts."""

    base_s: float
    """Whatever is in the batch."""
    token_s: float
    """For each prompt token."""
    pair_s: float
    """For each prompt token and each token of context before it."""
    sequence_s: float
    """For each decoding sequence."""
    context_s: float
    """For each token of context of each decoding sequence."""

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Return what prefilling takes, apart from other work.

        Args:
            num_tokens: to compute.
            num_before: tokens of the prompt that are cached.
        """
        return self.base_s + num_tokens * (self.token_s + self.pair_s * (num_before + num_tokens / 2))

    def decode_s(self, num_sequences: float, num_context: float) -> float:
        """Return a step's time; `num_context` is the sum of the sequences' contexts."""
        return self.base_s + num_sequences * self.sequence_s + num_context * self.context_s


STARTING = StepModel(base_s=0.007, token_s=1e-4, pair_s=5e-9, sequence_s=1e-4, context_s=1e-7)
"""Before anything was reported. Wrong by a factor of ten for most machines; a few reports put that right."""


class StepTotals(NamedTuple):
    """What a worker has computed since it started. Differences of two of them are observations."""

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    """Sum over prompt tokens of their position."""
    sequences: int = 0
    """Sum over steps of the sequences that decoded."""
    context_tokens: float = 0.0
    """Sum over steps and sequences of their contexts."""

    def mean_step_s(self, before: "StepTotals") -> float:
        """Return what a step has taken since then; 0: there was none."""
        return (self.seconds - before.seconds) / (self.steps - before.steps) if self.steps > before.steps else 0.0


class StepLearner:
    """Follows one model by a Kalman filter on the logarithms of its coefficients, robust to noisy observations.

    At the start the coefficients' common scale is the least certain: the first observation of whatever kind moves all
    of them. Surprises count up to a limit: one disturbed observation changes little, a lasting change is followed in
    some ten of them. A coefficient of which too little was seen is taken from `elders`: the same, learned from all
    workers.
    """

    def __init__(self, model: StepModel = STARTING, elders: "StepLearner | None" = None) -> None:
        self.model: StepModel = elders.model if elders is not None else model
        """What is known."""
        self._own = list(self.model)
        self._elders = elders
        self._seen = [0.0] * _FIELDS
        """Observations' worth of each component."""
        self._leans = elders is not None
        """Whether a coefficient is the elders'."""
        self.num_observations = 0
        """Observations taken."""
        self._elders_seen = 0
        is_fresh = elders is None or not elders.num_observations
        shape, scale = _SHAPE_VARIANCE, _SCALE_VARIANCE if is_fresh else 0.0
        self._variance = [[scale + (shape if i == j else 0.0) for j in range(_FIELDS)] for i in range(_FIELDS)]
        self._before: StepTotals | None = None
        self._wanted_s = _FIRST_BUSY_S

    def report(self, totals: StepTotals) -> bool:
        """Take a worker's totals; learn when enough was computed since the last time.

        Returns:
            Whether the model has changed.
        """
        before = self._before
        if before is None or totals.steps < before.steps or totals.seconds < before.seconds:  # it has restarted
            self._before = totals
            self._mix()
        elif totals.steps > before.steps and totals.seconds - before.seconds >= self._wanted_s:
            self._before = totals
            self._wanted_s = min(_BUSY_MAX_S, 1.5 * self._wanted_s)
            self._learn(before, totals)
        elif self._elders_know_more():
            self._mix()
        else:
            return False
        return True

    def _elders_know_more(self) -> bool:
        """Whether it is worth asking them again: at first after each observation, later after every few."""
        if not self._leans or self._elders is None:
            return False
        return self._elders.num_observations - self._elders_seen > min(_ELDERS_EVERY, self._elders_seen // 8)

    def _learn(self, before: StepTotals, now: StepTotals) -> None:
        amounts = (
            now.steps - before.steps,
            now.prompt_tokens - before.prompt_tokens,
            now.prompt_pairs - before.prompt_pairs,
            now.sequences - before.sequences,
            now.context_tokens - before.context_tokens,
        )
        # They hear of all workers: of one that has told its own, less will do.
        if self._elders is not None and (self.num_observations < _TOLD_ALL or self.num_observations % _TOLD_EVERY == 0):
            self._elders.observe(amounts, now.seconds - before.seconds)
        self.observe(amounts, now.seconds - before.seconds)

    def observe(self, amounts: tuple[float, float, float, float, float], seconds: float) -> None:
        """Learn from one stretch of work.

        Args:
            amounts: of each of the model's parts: steps, prompt tokens, pairs, sequences, context tokens.
            seconds: that it took, more than 0.
        """
        own = self._own
        parts = [coefficient * max(0.0, amount) for coefficient, amount in zip(own, amounts, strict=True)]
        expected = sum(parts)
        if expected <= 0:
            return
        shares = [part / expected for part in parts]
        limit = _FIRST_SURPRISE_MAX if self.num_observations < _FIRST_OBSERVATIONS else _SURPRISE_MAX
        surprise = max(-limit, min(limit, math.log(seconds / expected)))
        variance = self._variance
        spread = [sum(map(mul, row, shares)) for row in variance]
        certainty = 1.0 / (sum(map(mul, spread, shares)) + _NOISE_VARIANCE)
        for i, row in enumerate(variance):
            gain = spread[i] * certainty
            own[i] *= math.exp(gain * surprise)
            self._seen[i] += shares[i]
            row[:] = [its - gain * of for its, of in zip(row, spread, strict=True)]
            row[i] = min(row[i] + _DRIFT_VARIANCE, _SCALE_VARIANCE + _SHAPE_VARIANCE)
        self.num_observations += 1
        self._leans = self._elders is not None and min(self._seen) < _OWN_SHARE
        self._mix()

    def _mix(self) -> None:
        """Take the own coefficients where they are founded on something, elsewhere the elders'."""
        if self._elders is None or not self._elders.num_observations:
            self.model = StepModel(*self._own)
            return
        self._elders_seen = self._elders.num_observations
        triples = zip(self._own, self._seen, self._elders.model, strict=True)
        self.model = StepModel._make([own if seen >= _OWN_SHARE else elder for own, seen, elder in triples])
