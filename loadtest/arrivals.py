"""When requests are sent: Poisson, constant, bursty, closed loop, or at a trace's own times."""

from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from common.config_node import Node, Positive

Rate = Annotated[float, Field(gt=0)]


class PoissonArrival(Node):
    """Users who know nothing of each other."""

    kind: Literal["poisson"] = "poisson"
    rate: Rate
    """Sessions per second."""

    def times(self, rng: Random) -> Iterator[float]:
        """Yield endless arrival times in seconds, from 0 on, not decreasing."""
        now = 0.0
        while True:
            now += rng.expovariate(self.rate)
            yield now


class ConstantArrival(Node):
    """A metronome."""

    kind: Literal["constant"] = "constant"
    rate: Rate
    """Sessions per second."""

    def times(self, rng: Random) -> Iterator[float]:  # noqa: ARG002 - all arrivals have one signature
        """Yield endless arrival times in seconds, from 0 on, not decreasing."""
        number = 0
        while True:
            yield number / self.rate
            number += 1


class GammaArrival(Node):
    """Gaps from a gamma distribution: the rate of a Poisson process, but bursty (or, above 1, regular)."""

    kind: Literal["gamma"] = "gamma"
    rate: Rate
    """Sessions per second."""
    burstiness: Annotated[float, Field(gt=0)] = 0.25
    """Shape of the gamma distribution; the gaps' squared coefficient of variation is its inverse. 1 is Poisson."""

    def times(self, rng: Random) -> Iterator[float]:
        """Yield endless arrival times in seconds, from 0 on, not decreasing."""
        now, scale = 0.0, 1 / (self.rate * self.burstiness)
        while True:
            now += rng.gammavariate(self.burstiness, scale)
            yield now


class TraceArrival(Node):
    """The times that the trace recorded."""

    kind: Literal["trace"] = "trace"
    speedup: Annotated[float, Field(gt=0)] = 1.0
    """2 plays the trace in half the time."""


class ClosedArrival(Node):
    """So many users, each of whom waits for an answer before the next session begins."""

    kind: Literal["closed"] = "closed"
    users: Positive
    """Sessions under way at any time."""
    think_s: Annotated[float, Field(ge=0)] = 0.0
    """Pause of a user between two sessions."""


PacedArrival = PoissonArrival | ConstantArrival | GammaArrival
Arrival = Annotated[PacedArrival | TraceArrival | ClosedArrival, Field(discriminator="kind")]


def at_rate(arrival: Arrival, rate: Rate) -> PacedArrival:
    """Return the same process at another rate; a closed loop or a trace's times become Poisson."""
    match arrival:
        case PoissonArrival() | ConstantArrival() | GammaArrival():
            return arrival.model_copy(update={"rate": rate})
        case _:
            return PoissonArrival(rate=rate)
