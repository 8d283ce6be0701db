"""The highest rate that a cluster serves well: 90 % of requests still meet both targets (DistServe, OSDI 2024)."""

from loadtest.records import RatePoint

ATTAINMENT = 0.9
_LOWEST = 64


class GoodputSearch:
    """Doubles the rate until the attainment falls below the goal (or halves it until it does not), then bisects.

    Pure: ask `next_rate`, measure, tell `observe`, until `next_rate` is None.

    Args of the constructor:
        first: rate to begin with, sessions per second.
        attainment: share of requests that must meet the SLO.
        precision: the bracket's width, relative to its lower end, at which the search ends.
        measurements_max: most measurements; at the limit the best rate so far stands.

    A cluster that misses the goal at a 64th of the first rate is taken to miss it at any: lower rates take too long.
    """

    def __init__(
        self, first: float, attainment: float = ATTAINMENT, precision: float = 0.05, measurements_max: int = 16
    ) -> None:
        assert first > 0
        self.points: list[RatePoint] = []
        self._first = first
        self._attainment = attainment
        self._precision = precision
        self._measurements_max = measurements_max
        self._good: float | None = None
        self._bad: float | None = None

    @property
    def next_rate(self) -> float | None:
        """Return the rate to measure, or None when the search is over."""
        if len(self.points) >= self._measurements_max:
            return None
        match self._good, self._bad:
            case None, None:
                return self._first
            case float(good), None:
                return good * 2
            case None, float(bad):
                return bad / 2 if bad > self._first / _LOWEST else None
            case float(good), float(bad):
                return None if bad - good <= good * self._precision else (good + bad) / 2
        raise AssertionError("rates are floats")

    @property
    def best_rate(self) -> float:
        """Return the highest rate seen to meet the goal; 0 when none did."""
        return self._good or 0.0

    def observe(self, point: RatePoint) -> None:
        """Take in one measurement.

        Noise may make a higher rate look good after a lower one looked bad; the bracket only ever shrinks.
        """
        self.points.append(point)
        if point.attainment >= self._attainment:
            self._good = max(self._good or 0.0, float(point.rate))
        else:
            self._bad = min(self._bad or float("inf"), float(point.rate))
