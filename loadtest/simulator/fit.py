"""From observations of a running cluster to a cost model: least squares of relative errors, nothing negative. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from loadtest.simulator.profile import LinkCost, StepCost

_SMALLEST_S = 1e-7
_FASTEST_BYTES_PER_S = 1e12
"""Where the time of a transfer does not grow with its size, as when all of it is hidden."""


class PrefillSeen(NamedTuple):
    """One prompt, prefilled while nothing else ran."""

    num_tokens: int
    num_steps: int
    seconds: float


class DecodeSeen(NamedTuple):
    """Steps of one batch, while nothing else ran."""

    num_sequences: int
    num_context: float
    """Sum of the sequences' contexts."""
    seconds: float
    """Of one step."""


class PushSeen(NamedTuple):
    """The time from a first token to the moment when all KV had landed."""

    num_bytes: int
    """Of the prompt's last chunk: all before it travelled behind compute."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A step's cost, and how well it describes what it was made from."""

    step: StepCost
    error: float
    """Median relative error of the observations."""


def fit_step(prefills: Sequence[PrefillSeen], decodes: Sequence[DecodeSeen]) -> Fit:
    """Return the step cost that describes the observations best.

    Raises:
        ConfigError: too few observations to tell its parts apart.
    """
    rows: list[tuple[float, ...]] = [
        (seen.num_steps, seen.num_tokens, seen.num_tokens**2 / 2, 0.0, 0.0) for seen in prefills
    ]
    rows += [(1, 0.0, 0.0, seen.num_sequences, seen.num_context) for seen in decodes]
    amounts = np.array(rows, dtype=np.float64).reshape(-1, 5)
    seconds = np.array([*(seen.seconds for seen in prefills), *(seen.seconds for seen in decodes)], dtype=np.float64)
    if len(prefills) < 2 or len(decodes) < 2 or np.linalg.matrix_rank(amounts) < amounts.shape[1]:
        raise ConfigError(
            f"{len(prefills)} prompts and {len(decodes)} batches do not tell a step's parts apart: "
            "lengths, batch sizes and contexts must differ"
        )
    # Divided by the time itself, the residuals are relative errors: short steps count as much as long ones.
    parts = _least_squares(amounts / seconds[:, None], np.ones_like(seconds))
    errors = np.abs(amounts @ parts / seconds - 1)
    base, token, attention, sequence, context = (float(part) for part in parts)
    cost = StepCost(
        base_s=max(base, _SMALLEST_S), token_s=token, attention_s=attention, sequence_s=sequence, context_s=context
    )
    return Fit(cost, float(np.median(errors)))


def fit_link(pushes: Sequence[PushSeen]) -> LinkCost:
    """Return the link that describes what was left to wait for after first tokens; there must be an observation."""
    amounts = np.array([(1.0, seen.num_bytes) for seen in pushes])
    latency, byte_s = _least_squares(amounts, np.array([seen.seconds for seen in pushes]))
    if byte_s * _FASTEST_BYTES_PER_S < 1:
        return LinkCost(bytes_per_s=_FASTEST_BYTES_PER_S, latency_s=statistics.median(seen.seconds for seen in pushes))
    return LinkCost(bytes_per_s=1 / byte_s, latency_s=latency)


def _least_squares(amounts: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients, none below 0, that come closest.

    Those that would be negative are left out, the most negative one first.
    """
    kept = list(range(amounts.shape[1]))
    found = np.zeros(amounts.shape[1])
    while kept:
        # Columns of one size, since they are as far apart as 1 and a million tokens squared.
        scale = np.linalg.norm(amounts[:, kept], axis=0)
        scale[scale == 0] = 1.0
        solved = np.linalg.lstsq(amounts[:, kept] / scale, values, rcond=None)[0] / scale
        if solved.min() >= 0:
            found[kept] = solved
            break
        del kept[int(np.argmin(solved * scale))]
    return found
