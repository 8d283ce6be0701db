"""The end of a request's time, as both faces keep it."""

import asyncio
from types import TracebackType
from typing import Self

from common.errors import DeadlineError


class Deadline:
    """Limits the time of the block under it, counted from when it was made. Owned by the request's task.

    Raises:
        DeadlineError: the time is over; what was inside was cancelled.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = asyncio.get_running_loop().time()
        self._scope = asyncio.timeout_at(self._began_s + timeout_s)

    @property
    def left_s(self) -> float:
        """What is left of the time; negative when it is over."""
        return self._began_s + self._timeout_s - asyncio.get_running_loop().time()

    def shorten(self, timeout_s: float) -> None:
        """Let the time be no longer than this from its beginning on. Call it inside the block."""
        if timeout_s < self._timeout_s:
            self._timeout_s = timeout_s
            self._scope.reschedule(self._began_s + timeout_s)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:  # the scope's own; one of what is inside passes it by
            raise DeadlineError(f"the request's deadline passed, {self._timeout_s:.3f} s after it arrived") from late
