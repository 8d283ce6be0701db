"""Commands on their way into a gRPC stream."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_BATCH_MAX = 16
"""Items in one message: few enough for 16 prompts of a million tokens to stay below the largest message."""


class Outbox(Generic[T]):
    """An async iterator over what `put` was given, with a bound, and an end.

    A write costs the loop ten times what a command does, so what has come while the last one was under way goes out
    together. The end matters: gRPC reads the outbox in a task of its own, which outlives a call that the other side
    ended.
    """

    def __init__(self, size_max: int, first: T, pack: Callable[[Sequence[T]], T]) -> None:
        """Begin.

        Args:
            size_max: most items that wait.
            first: goes out at once, and alone.
            pack: makes one item of two or more.
        """
        self._size_max = size_max
        self._first: T | None = first
        self._pack = pack
        self._items = deque[T]()
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, item: T) -> bool:
        """Add an item; False if there is no room, which means that the other side does not read."""
        if self._is_closed:
            return True  # whoever closed it has told everybody that the stream is over
        if len(self._items) >= self._size_max:
            return False
        self._items.append(item)
        self._changed.set()
        return True

    def close(self) -> None:
        """End the iteration at once; what is left is dropped. Idempotent."""
        self._is_closed = True
        self._first = None
        self._items.clear()
        self._changed.set()

    def __aiter__(self) -> "Outbox[T]":
        return self

    async def __anext__(self) -> T:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while not self._items:
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        taken = [self._items.popleft() for _ in range(min(len(self._items), _BATCH_MAX))]
        return taken[0] if len(taken) == 1 else self._pack(taken)
