"""All transfers of one worker: what the prefill and decode services hold. See `kvtransfer.interface` for the contract.

    receiver                                        sender
    grant ──────── Ticket (with the request) ─────► open_push
                 ◄── connect, Hello, Open ────────
                 ◄── Ready (piece is final) ────── announce, as each chunk or layer group is computed
    place, verify ─ Ack ──────────────────────────►
                 ◄── Complete (source was held) ── finish; over wires it does not wait for the last Ack
    landed ──────── Complete ─────────────────────► finished

One connection for each pair and direction carries the control frames; the transports bring the bytes across.
"""

import asyncio
import contextlib
import importlib
import logging
import math
import time
from collections.abc import Sequence

from baton_pb.v1 import transfer_pb2, worker_pb2
from common.config import TransferConfig
from common.errors import ConfigError
from common.logs import log
from kvtransfer import native
from kvtransfer.codecs.registry import prepare
from kvtransfer.counters import UNKNOWN, TransferCounters
from kvtransfer.dialer import Dialer
from kvtransfer.landing import BlockLanding
from kvtransfer.memory import copy_threads, own_pool
from kvtransfer.outbound import Greeter
from kvtransfer.pieces import are_blocks, block_array
from kvtransfer.probe import Expectation
from kvtransfer.push import BlockPush
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.store import BlockStore
from kvtransfer.transports import nccl, nccl_link, shm, tcp, tcp_link
from kvtransfer.wire import PROTOCOL

logger = logging.getLogger(__name__)

PING_S = 1.0
DEAD_S = 3.0
"""Three missed pings: the peer hangs, or the network is cut."""


class TransferEndpoint:
    """Implements `Endpoint`. Owned by the worker's asyncio loop."""

    def __init__(
        self, worker_id: str, host: str, store: BlockStore, config: TransferConfig, generation: int | None = None
    ) -> None:
        self.address = transfer_pb2.TransferAddress(
            worker_id=worker_id, host_id=shm.host_id(), generation=generation or time.time_ns(), host=host
        )
        self._config = config
        self._store = store
        self._counters = TransferCounters()
        self._threads = copy_threads(worker_id)
        self._pool = own_pool(store, self._threads)
        hello = transfer_pb2.Hello(
            protocol=PROTOCOL,
            worker_id=worker_id,
            generation=self.address.generation,
            layout=store.layout.to_pb(),
            host_id=self.address.host_id,
            num_blocks=store.num_blocks,
            in_device=store.device is not None,
        )
        self._receiver = Receiver(hello, self._pool, config, self._counters)
        greeter = Greeter(self._pool, hello, self._counters, config.inflight_bytes_max)
        expectation = Expectation(config.expected_mb_s * 1e6, config.on_slow == "refuse")
        self._dialer = Dialer(config.transport, expectation, self.address, store.memfd)
        self._sender = Sender(greeter, self._dialer, config.connect_timeout_s)
        self._closing = asyncio.Event()
        self._pinging = asyncio.create_task(self._ping())

    @classmethod
    async def start(cls, worker_id: str, host: str, store: BlockStore, config: TransferConfig) -> "TransferEndpoint":
        """Open the doors that `config.transport` asks for.

        Args:
            worker_id: of the worker that owns `store`.
            host: address that peers on other hosts reach this one by.
            store: the worker's pool; stays alive until `close` has returned.
            config: transport, checksum, leases, limits.

        Raises:
            ConfigError: the transport that was asked for cannot be offered here.
        """
        endpoint = cls(worker_id, host, store, config)
        try:
            await asyncio.to_thread(native.library)
            await asyncio.to_thread(prepare, config.codec)
            await endpoint._open_doors()
        except BaseException:
            await endpoint.close()
            raise
        return endpoint

    @property
    def slow_paths(self) -> list[str]:
        """Say why blocks are copied slowly, if they are."""
        return [] if (reason := native.refusal()) is None else [f"blocks are copied by memmove, run by run: {reason}"]

    @property
    def num_active(self) -> int:
        """Landings and pushes alive; 0 at rest."""
        return self._receiver.num_active + self._sender.num_active

    def grant(self, block_ids: Sequence[int], first_block: int) -> BlockLanding:
        """Make a ticket for reserved blocks; see `Endpoint.grant`."""
        blocks = block_array(block_ids)
        assert are_blocks(blocks, self._store.num_blocks)
        return self._receiver.grant(self.address, blocks, first_block)

    async def open_push(self, ticket: transfer_pb2.Ticket, ready: Sequence[int] = ()) -> BlockPush:
        """Connect to the ticket's receiver and begin; see `Endpoint.open_push`."""
        return await self._sender.open_push(ticket, ready)

    def stats(self) -> list[worker_pb2.TransferStats]:
        """Return what was moved since the start, one entry for each peer and transport."""
        return self._counters.snapshot()

    async def close(self) -> None:
        """End every transfer and connection. Returns when nothing touches the pool any more."""
        self._closing.set()
        await self._pinging
        await self._sender.close()
        await self._receiver.close()
        for station in self._dialer.stations.values():
            await station.close()
        self._threads.shutdown()

    async def _open_doors(self) -> None:
        transport = self._config.transport
        if transport == "shm" and self._store.memfd is None:
            raise ConfigError("transport is shm, but the pool has no memfd to share")
        if transport in ("auto", "shm") and self._store.device is None:
            door = shm.ShmDoor(
                self._pool.host, self._threads, self._store.layout.block_bytes, self._config.checksum_shm
            )
            self._receiver.listen(door)
            self.address.shm_path = door.path
        if transport in ("auto", "nccl"):
            await self._open_nccl_door()
        if transport in ("auto", "ucx"):
            try:
                await self._open_ucx_door()
            except (ImportError, OSError) as error:
                if transport == "ucx":
                    raise ConfigError(f"transport is ucx, which cannot be used here: {error}") from error
                log(logger, logging.WARNING, f"SLOW PATH: plain tcp between hosts: ucx cannot be used: {error}")
        if transport in ("auto", "tcp"):
            try:
                self._open_tcp_door()
            except OSError as error:
                raise ConfigError(f"cannot listen for transfers on {self.address.host}: {error}") from error
        log(
            logger,
            logging.INFO,
            "transfer endpoint is open",
            worker_id=self.address.worker_id,
            shm=self.address.shm_path or None,
            ucx_port=self.address.ucx_port or None,
            tcp_port=self.address.tcp_port or None,
            nccl_port=self.address.nccl_port or None,
        )

    async def _open_ucx_door(self) -> None:
        ucx = await asyncio.to_thread(importlib.import_module, "kvtransfer.transports.ucx")
        station = ucx.UcxStation(
            self.address.host, self._config.connect_timeout_s, lambda: self._counters.refused(UNKNOWN, "ucx")
        )
        self._dialer.stations["ucx"] = station
        door = ucx.UcxDoor(station, self.address.host, self._pool.host, self._threads)
        self._receiver.listen(door)
        self.address.ucx_port = door.port

    async def _open_nccl_door(self) -> None:
        device = self._store.device
        if device is None or device.communicators is None:
            if self._config.transport == nccl_link.NAME:
                where = "in host memory" if device is None else "in a device without NCCL"
                raise ConfigError(f"transport is nccl, but the pool lies {where}")
            return
        await asyncio.to_thread(device.communicators.new_id)  # the first one takes a while
        station = nccl.NcclStation(device, device.communicators)
        self._dialer.stations[nccl_link.NAME] = station
        door = nccl.NcclDoor(station, self.address.host)
        self._receiver.listen(door)
        self.address.nccl_port, self.address.device_id = door.port, device.identity

    def _open_tcp_door(self) -> None:
        station = tcp.TcpStation(
            self.address.host, self._config.connect_timeout_s, lambda: self._counters.refused(UNKNOWN, tcp_link.NAME)
        )
        self._dialer.stations[tcp_link.NAME] = station
        door = tcp.TcpDoor(station, self.address.host, self._pool.host, self._threads)
        self._receiver.listen(door)
        self.address.tcp_port = door.port

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        ping_s = min(PING_S, self._config.lease_s / 4)  # pings renew the leases of transfers that wait for a chunk
        while not self._closing.is_set():
            due = loop.time() + ping_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._closing.wait()
            # A loop that was itself held up has not read what came meanwhile: it must not blame its peers.
            dead_s = DEAD_S if loop.time() < due + DEAD_S / 3 else math.inf
            self._receiver.ping(loop.time(), ping_s / 2, dead_s)
            self._sender.ping(loop.time(), ping_s / 2, dead_s)
