"""Which workers have room: a full one gets nothing while another that could take it is not. Pure."""

from cluster.router.question import Candidate, Group, TrackedGroup

AHEAD_S = 2.0
"""Prefill that a worker is given ahead before it is full; see RouterConfig.prefill_ahead_s."""


class Fulls:
    """How many workers of a table are full (mostly none, and then nobody need be looked at), and who must know."""

    __slots__ = ("count", "groups")

    def __init__(self) -> None:
        self.count = 0
        self.groups: list[TrackedGroup] = []

    def changed(self, candidate: Candidate) -> None:
        """Take note that a worker is full now, or no longer."""
        self.count += 1 if candidate.is_full else -1
        for group in self.groups:
            group.changed(candidate)


def has_room(decode: Group, prefill: Group) -> bool:
    """Whether a request that is placed now goes to workers that are not full. True also when there are none at all."""
    if not len(decode):
        return True
    if not decode.has_room:
        return False
    return not len(prefill) or prefill.has_room or bool(_colocated(decode))


def those_with_room(decode: Group, prefill: Group) -> tuple[Group, Group]:
    """Return those of each that are not full, as far as there are any who can serve a request together."""
    decode, prefill = decode.with_room(), prefill.with_room()
    if len(prefill) and not prefill.has_room and (alone := _colocated(decode)):
        decode = Group(alone)
    return decode, prefill


def _colocated(decode: Group) -> list[Candidate]:
    """Return those that have room and prefill themselves."""
    return [candidate for candidate in decode if candidate.prefills_itself and not candidate.is_full]
