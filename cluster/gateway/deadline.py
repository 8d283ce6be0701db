"""The end of a request's time, as both faces keep it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DeadlineError


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of what is inside.

    Raises:
        DeadlineError: the time is over; what was inside was cancelled.
    """
    try:
        async with asyncio.timeout(timeout_s) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineError(f"the request's deadline passed, {timeout_s:.3f} s after it arrived") from error
