"""Places that run out, and who may have how many of them: nobody keeps others out."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import OverloadedError

_NEARLY_FULL = 0.75
"""Share of the places beyond which each holder is held to its own share."""
_RETRY_AFTER_S = 1.0


def share(places_max: int, num_taken: int, num_holders: int) -> int | None:
    """Return the most places that one holder may have now; None: any number.

    When three quarters are taken, it is an equal share, with one share more than there are holders, for whoever comes
    next.
    """
    if num_taken <= _NEARLY_FULL * places_max:
        return None
    return max(1, places_max // (num_holders + 1))


class Shares:
    """Places for something that lasts. Owned by the gateway's loop; plain functions."""

    def __init__(self, what: str, places_max: int) -> None:
        """Begin empty.

        Args:
            what: the places are for, as messages call it.
            places_max: how many there are.
        """
        self._what = what
        self._places_max = places_max
        self._held: dict[str, int] = {}
        """By holder; those that hold something."""
        self._num_taken = 0

    @property
    def num_taken(self) -> int:
        """Places that are taken."""
        return self._num_taken

    def take(self, holder: str) -> None:
        """Take a place; `give_back` ends it.

        Args:
            holder: a tenant, or an address where no tenant is known.

        Raises:
            OverloadedError: there is none, or the holder has its share.
        """
        if self._num_taken >= self._places_max:
            raise OverloadedError(f"{self._num_taken} {self._what} are open here, the most that may", _RETRY_AFTER_S)
        held = self._held.get(holder, 0) + 1
        most = share(self._places_max, self._num_taken + 1, len(self._held) + (held == 1))
        if most is not None and held > most:
            raise OverloadedError(
                f"{holder} may have {most} of {self._places_max} {self._what} while this gateway is nearly full",
                _RETRY_AFTER_S,
            )
        self._held[holder] = held
        self._num_taken += 1

    @contextmanager
    def place(self, holder: str) -> Iterator[None]:
        """Hold a place; see `take`."""
        self.take(holder)
        try:
            yield
        finally:
            self.give_back(holder)

    def give_back(self, holder: str) -> None:
        """Give a place back."""
        self._num_taken -= 1
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
