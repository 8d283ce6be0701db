"""What was measured of one means of moving blocks in one order."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from loadtest.bench.common import Repeated


@dataclass(slots=True)
class Samples:
    """The rounds that count."""

    wanted: int
    """Rounds that were to count."""
    seconds: list[float] = field(default_factory=list)
    sender_cpu_s: list[float] = field(default_factory=list)
    receiver_cpu_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """Of ours: where the seconds went."""
    spent_s: float = 0.0
    """On all rounds, with the verification of what they moved."""
    absent: str = ""
    """Why nothing was measured."""
    cut_short: str = ""
    """Why there are fewer rounds than wanted, if it was not the time that they took."""
    _is_first_only: bool = False

    def add(self, result: dict[str, Any], spent_s: float, is_first: bool) -> None:
        """Take one round; one that moved wrong bytes ends the measuring of this means.

        Args:
            result: of the round.
            spent_s: on it.
            is_first: it warmed up: its numbers are forgotten when those of another one come.
        """
        self.spent_s += spent_s
        if not result["ok"]:
            self.absent = "it delivered wrong bytes"
            return
        if self._is_first_only:
            for numbers in (self.seconds, self.sender_cpu_s, self.receiver_cpu_s, self.parts):
                numbers.clear()
        self._is_first_only = is_first
        self.seconds.append(result["seconds"])
        self.sender_cpu_s.append(result["sender_cpu_s"])
        self.receiver_cpu_s.append(result["receiver_cpu_s"])
        if parts := result.get("parts"):
            self.parts.append(parts)

    def ended(self, reason: str) -> None:
        """Note why no further round follows."""
        if self.seconds:
            self.cut_short = self.cut_short or reason
        else:
            self.absent = reason

    @property
    def is_measured(self) -> bool:
        """Whether there are numbers, all of right transfers."""
        return bool(self.seconds) and not self.absent

    @property
    def rounds(self) -> str:
        """Return how many rounds count if that is not what was wanted; for people."""
        if len(self.seconds) == self.wanted and not self._is_first_only:
            return ""
        count = "the first round only" if self._is_first_only else f"{len(self.seconds)} of {self.wanted} rounds"
        return f"{count}: {self.cut_short}" if self.cut_short else count

    @property
    def ms(self) -> Repeated:
        """Milliseconds of a transfer."""
        return Repeated.of([seconds * 1000 for seconds in self.seconds])

    @property
    def cpu(self) -> str:
        """Return the processor time at both ends, for people."""
        both = [statistics.median(times) * 1000 for times in (self.sender_cpu_s, self.receiver_cpu_s)]
        return f"CPU {both[0]:.1f} + {both[1]:.1f} ms"

    @property
    def breakdown(self) -> str:
        """Return where the time of ours went, medians for people; empty of others."""
        names = self.parts[0] if self.parts else {}
        medians = {name: statistics.median(parts[name] for parts in self.parts) * 1000 for name in names}
        return " + ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in medians.items())
