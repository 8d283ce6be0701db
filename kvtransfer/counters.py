"""What was moved, refused and fallen back to, by peer. Owned by the endpoint's loop."""

from baton_pb.v1 import worker_pb2

ENTRIES_MAX = 4096
UNKNOWN = "?"


class TransferCounters:
    """Statistics of one endpoint since its start."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], worker_pb2.TransferStats] = {}

    def moved(self, peer: str, transport: str, num_bytes: int) -> None:
        """Count a verified piece."""
        entry = self._entry(peer, transport)
        entry.bytes += num_bytes
        entry.pieces += 1

    def took(self, peer: str, transport: str, seconds: float) -> None:
        """Add the duration of a complete transfer."""
        self._entry(peer, transport).seconds += seconds

    def refused(self, peer: str, transport: str) -> None:
        """Count something that a peer sent and that was not believed."""
        self._entry(peer, transport).refusals += 1

    def fell_back(self, peer: str, transport: str) -> None:
        """Count a connection that uses `transport` although a faster one was expected."""
        self._entry(peer, transport).fallbacks += 1

    def snapshot(self) -> list[worker_pb2.TransferStats]:
        """Return copies of all entries."""
        copies = []
        for entry in self._entries.values():
            copy = worker_pb2.TransferStats()
            copy.CopyFrom(entry)
            copies.append(copy)
        return copies

    def _entry(self, peer: str, transport: str) -> worker_pb2.TransferStats:
        key = (peer, transport)
        if key not in self._entries and len(self._entries) >= ENTRIES_MAX:
            key = (UNKNOWN, transport)  # peers choose their names: the table must not grow without end
        if key not in self._entries:
            self._entries[key] = worker_pb2.TransferStats(peer_worker_id=key[0], transport=transport)
        return self._entries[key]
