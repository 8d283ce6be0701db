"""Commands on their way into a gRPC stream."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """An async iterator over what `put` was given, with a bound, and an end.

    The end matters: gRPC reads it in a task of its own, which outlives a call that the other side ended.
    """

    def __init__(self, size_max: int, *first: T) -> None:
        self._size_max = size_max
        self._items = deque(first)
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
        self._items.clear()
        self._changed.set()

    def __aiter__(self) -> "Outbox[T]":
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()
