"""What the supervisor needs from whoever creates processes: Ray in a cluster, a stand-in in tests."""

from typing import Protocol

from cluster.supervisor.fleet import Launch, Place


class Process(Protocol):
    """One life of one member."""

    async def started(self) -> Place:
        """Wait until it serves; BatonError when it does not come up."""
        ...

    async def failed(self) -> str:
        """Wait for its end and return the reason."""
        ...

    async def stop(self, drain_timeout_s: float) -> None:
        """Stop it in order, then end it. When this is cancelled, it may be called again, with less patience."""
        ...

    def kill(self) -> None:
        """End it at once; idempotent."""
        ...


class Launcher(Protocol):
    """Creates processes."""

    async def launch(self, launch: Launch) -> Process:
        """Begin one life; BatonError when it cannot even be created."""
        ...
