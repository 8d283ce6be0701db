"""Pieces as tagged UCX messages over one endpoint. What a message is, and why every receive ends: see `ucx`."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, checksum_of
from kvtransfer.packing import unpack
from kvtransfer.pieces import IntArray, Runs
from kvtransfer.probe import scratch
from kvtransfer.ticket import run_tag
from kvtransfer.transports.base import LinkOwner
from kvtransfer.transports.ucx_driver import UcxDriver

NAME = "ucx"


class UcxLink:
    """What both directions share: one UCX endpoint, and posting on it."""

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, driver: UcxDriver) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self._driver = driver
        self._endpoint: Any = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def attach(self, endpoint: Any) -> None:
        """Use `endpoint` from now on."""
        self._endpoint = endpoint
        loop = self._loop
        # Called by UCX during progress, where nothing may be closed: hence from a fresh call of the loop.
        is_alive = endpoint.alive
        try:
            endpoint.set_close_callback(lambda: loop.call_soon(self._broken))
        except RuntimeError:  # it is closed already
            is_alive = False
        if self._is_closed:
            self._close_endpoint()
        elif not is_alive:
            loop.call_soon(self._broken)

    def close(self) -> None:
        """Break the endpoint; see `OutboundLink.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._close_endpoint()
            self.on_closed()

    def _broken(self) -> None:
        """Note that the peer's endpoint is gone."""
        self.close()

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._driver.close_endpoint(endpoint)

    def _post(self, buffers: Sequence[memoryview], tag: int, is_send: bool) -> asyncio.Future[None]:
        """Submit messages under tags from `tag` on; the future fails if there is no endpoint any more."""
        if self._endpoint is None:
            return self._driver.watch([], None, TransferError("the ucx endpoint is closed"))
        submit = self._endpoint.tag_send if is_send else self._endpoint.tag_recv
        requests: list[Any] = []
        try:
            for i, buffer in enumerate(buffers):
                assert buffer.c_contiguous  # UCX takes a strided view for contiguous, and says nothing
                requests.append(submit(Array(buffer), ucx.UCXXTag(run_tag(tag, i))))
        except ucx.UCXError as error:
            return self._driver.watch(requests, buffers, TransferError(f"ucx: {error}"))
        return self._driver.watch(requests, buffers)


class UcxOutbound(UcxLink):
    """Implements `OutboundLink`."""

    def __init__(self, driver: UcxDriver, memory: Memory) -> None:
        super().__init__(driver)
        self._memory = memory
        self.on_broken: Callable[[BatonError], object] = lambda _: None
        """Called when the receiver's endpoint is gone; set by whoever owns the control connection."""

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        """Send each run; see `OutboundLink.send`."""
        assert not runs.are_packed
        return self._post(_parts(self._memory, runs.sources, runs.sizes), tag, is_send=True)

    @property
    def byte_sender(self) -> "UcxOutbound":
        """Itself."""
        return self

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        """Send one message; see `ByteSender.send_bytes`."""
        return self._post([data], tag, is_send=True)

    def _broken(self) -> None:
        super()._broken()
        self.on_broken(WorkerLostError("the receiver's ucx endpoint is gone"))


class UcxInbound(UcxLink):
    """Implements `InboundLink`."""

    def __init__(self, driver: UcxDriver, target: Memory, threads: Executor, owner: LinkOwner) -> None:
        super().__init__(driver)
        self._target = target
        self._threads = threads
        self._owner = owner
        self._nothing = memoryview(bytearray(1))

    def attach(self, endpoint: Any) -> None:
        """Use the endpoint that showed this link's token."""
        super().attach(endpoint)
        if not self._is_closed:
            self._owner.link_is_up()

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        """Receive each run in its place, or all of them packed; see `InboundLink.receive`."""
        if runs.are_packed:
            message = self._target.spare.take(runs.num_bytes)
            packed = self._post([message], tag, is_send=False)
            return self._driver.start(self._unpack(packed, message, runs, checksum, stop))
        receiving = self._post(_parts(self._target, runs.targets, runs.sizes), tag, is_send=False)
        return self._driver.start(self._verify(receiving, runs, checksum, stop))

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        """Receive; see `InboundLink.probe`."""
        return self.receive_bytes(scratch(num_bytes), tag)

    def discard(self, runs: Runs, tag: int) -> None:
        """Receive into a single byte: UCX ends the message as truncated, at both ends."""
        self._post([self._nothing] * (1 if runs.are_packed else len(runs)), tag, is_send=False)

    @property
    def byte_receiver(self) -> "UcxInbound":
        """Itself."""
        return self

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        """Receive one message; see `ByteReceiver.receive_bytes`."""
        return self._post([buffer], tag, is_send=False)

    def discard_bytes(self, num_bytes: int, tag: int) -> None:  # noqa: ARG002  # a tag is enough to find a message
        """Receive into a single byte, as `discard` does."""
        self._post([self._nothing], tag, is_send=False)

    async def _unpack(
        self, packed: asyncio.Future[None], message: memoryview, runs: Runs, checksum: bool, stop: Stop
    ) -> int | None:
        try:
            await packed
            return await self._loop.run_in_executor(self._threads, unpack, message, self._target, runs, checksum, stop)
        finally:
            self._target.spare.give(message)

    async def _verify(self, receiving: asyncio.Future[None], runs: Runs, checksum: bool, stop: Stop) -> int | None:
        await receiving
        if not checksum:
            return None
        return await self._loop.run_in_executor(
            self._threads, checksum_of, self._target, runs.targets, runs.sizes, stop
        )

    def _broken(self) -> None:
        super()._broken()
        self._owner.lose(TransferError("the sender's ucx endpoint is gone"))


def _parts(memory: Memory, offsets: IntArray, sizes: IntArray) -> list[memoryview]:
    view = memory.view
    return [view[begin : begin + size] for begin, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
