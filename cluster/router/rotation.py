"""Deficit round robin: whose turn it is when turns cost different amounts. Pure.

M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Turn(NamedTuple):
    """Who is next, and what must be granted before."""

    name: str
    grants: int
    """Rounds in which everybody from the first one to this one gets a quantum; those behind it get one less."""
    position: int
    """In the order in which they are visited."""


class Rotation:
    """Names in turn. Each visit grants a name its quantum; it is served while what it saved pays for its next cost.

    Whoever has waited for its visit longest is first, and whoever has been served what its quanta allow goes to the
    end. So between two names that always want something, what they were served, over their quanta, never differs by
    more than two quanta and two costs; and a newcomer waits for as many visits of the others as its own cost needs
    quanta. Names that want nothing are not in it, and save nothing.

    `next` looks, `serve` commits: between them names may come and go.
    """

    def __init__(self, quantum_of: Callable[[str], float]) -> None:
        """Begin without names.

        Args:
            quantum_of: what a visit grants a name, above 0, in the unit of the costs.
        """
        self._quantum_of = quantum_of
        self._saved: dict[str, float] = {}  # in the order of their turns; the first is being visited
        self._is_visited = False

    def __len__(self) -> int:
        return len(self._saved)

    def __contains__(self, name: str) -> bool:
        return name in self._saved

    def add(self, name: str) -> None:
        """Let a name take part; nothing happens if it does already."""
        self._saved.setdefault(name, 0.0)

    def remove(self, name: str) -> None:
        """Take a name out, with all that it has saved."""
        if next(iter(self._saved), None) == name:
            self._is_visited = False
        self._saved.pop(name, None)

    def next(self, cost_of: Callable[[str], float]) -> Turn:
        """Return whose turn it is; there must be a name.

        Args:
            cost_of: what a name wants to be served next.
        """
        assert self._saved
        order = list(self._saved)
        if self._is_visited:
            first = order[0]
            if cost_of(first) <= self._saved[first]:
                return Turn(first, 0, 0)
            order = [*order[1:], first]
        return min(
            (Turn(name, self._visits(name, cost_of(name)), position) for position, name in enumerate(order)),
            key=lambda turn: (turn.grants, turn.position),
        )

    def serve(self, turn: Turn, cost: float) -> None:
        """Charge the one whose turn it is. The turn must be that of the last `next`, with nothing in between."""
        if turn.grants:
            order = list(self._saved)
            if self._is_visited:
                order = [*order[1:], order[0]]
            grants = [turn.grants - (position > turn.position) for position in range(len(order))]
            granted = {
                name: self._saved[name] + count * self._quantum_of(name)
                for name, count in zip(order, grants, strict=True)
            }
            order = order[turn.position :] + order[: turn.position]
            self._saved = {name: granted[name] for name in order}
        self._is_visited = True
        self._saved[turn.name] -= cost

    def _visits(self, name: str, cost: float) -> int:
        return max(1, math.ceil((cost - self._saved[name]) / self._quantum_of(name)))
