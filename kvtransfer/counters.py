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

    def took(self, peer: str, transport: str, seconds: float, exposed_s: float = 0.0) -> None:
        """Add the duration of a complete transfer, and the part of it that nothing hid."""
        entry = self._entry(peer, transport)
        entry.seconds += seconds
        entry.exposed_seconds += exposed_s

    def framed(self, peer: str, transport: str) -> None:
        """Count a control frame of a peer that has said who it is."""
        if peer != UNKNOWN:
            self._entry(peer, transport).frames += 1

    def probed(self, peer: str, transport: str, bytes_per_s: float) -> None:
        """Note the rate of a new connection."""
        self._entry(peer, transport).probed_bytes_per_s = bytes_per_s

    def refused(self, peer: str, transport: str) -> None:
        """Count something that a peer sent and that was not believed."""
        self._entry(peer, transport).refusals += 1

    def fell_back(self, peer: str, transport: str) -> None:
        """Count a connection that uses `transport` although a faster one was expected, or a faster rate."""
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
