"""The gateway's process: its parts put together, its servers opened and closed."""

import asyncio
import contextlib
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import Self

from grpc_reflection.v1alpha import reflection

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.kserve import inference_pb2_grpc as kserve_pb2_grpc
from baton_pb.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from cluster.gateway.admin import AdminService
from cluster.gateway.counts import Counts
from cluster.gateway.decode_client import DecodeClients, StreamLimits
from cluster.gateway.generate import Generator
from cluster.gateway.http.app import HttpFace, Parts
from cluster.gateway.inference import InferenceService
from cluster.gateway.kserve.service import KserveService
from cluster.gateway.metrics import Metrics
from cluster.gateway.parsing.formats import Formats
from cluster.gateway.router_client import RouterClient
from cluster.gateway.tokenizing import Tokenizing
from cluster.tenants.callers import current_tenant, holder_at
from cluster.tenants.door import Door, stopping
from cluster.tenants.key_store import Keys, KeyStore, NoKeys
from cluster.tenants.quotas import Uses
from cluster.tenants.shares import Shares
from common.clock import MonotonicClock
from common.config_doors import GatewayConfig
from common.fair_thread import FairThread
from common.logs import log
from common.model_facts import ModelFacts
from common.rpc import ClientLimits, Health, bind, bind_with, make_server
from common.rpc_guard import Entered, Guard, Sharing
from common.text import Text
from common.tls import TlsFiles
from common.turnstile import Turnstile

_LOG = logging.getLogger(__name__)
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_FLUSH_S = 1.0
"""How long calls may stay when no request runs any more: those on their way out. Streams that watch never end."""


class GatewayServer:
    """A gateway that serves. Create it with `start`; it owns the router session and the decode sessions."""

    def __init__(
        self, config: GatewayConfig, model_id: str, facts: ModelFacts, text: Text, router_address: str, keys: Keys
    ) -> None:
        """Put the parts together; nothing is opened yet."""
        self.grpc_address = ""
        """host:port"""
        self.http_address = ""
        """host:port"""
        self.probe_address: str | None = None
        """Where the processes of the cluster find the health service when `grpc_address` is encrypted."""
        self.gateway_id = f"gateway-{secrets.token_hex(4)}"
        self._config = config
        self._counts = Counts(config.running_max)
        self._clock = MonotonicClock()
        uses = Uses(self._clock)
        self._door = door = Door(keys, uses)
        self._metrics = Metrics(model_id, self._counts, uses, self._clock)
        self._router = RouterClient(router_address, self.gateway_id, config.router_wait_s, self._router_changed)
        self._workers = DecodeClients(self.gateway_id, StreamLimits(config.unread_tokens_max, config.token_wait_s))
        formats = Formats(text, config.tool_format, config.reasoning)
        self._thread = FairThread("long work", current_tenant)
        self._tokenizing = Tokenizing(text, formats, self._thread)
        generator = Generator(
            model_id,
            facts,
            text,
            formats,
            config,
            self._router,
            self._workers,
            self._tokenizing,
            self._counts,
            uses,
            self._clock,
            self._metrics,
        )
        self._arrivals = Turnstile(config.arriving_max)
        parts = Parts(
            generator, self._tokenizing, self._thread, self._arrivals, text, self._router, self._metrics, door
        )
        self._http = HttpFace(config.http, parts)
        self._inference = InferenceService(generator, self._tokenizing, text, config.http.choices_max)
        self._kserve = KserveService(generator, self._router, door)
        self._calls = Shares("calls", config.calls_max)
        self._guard = Guard(
            door.admit_rpc,
            config.http.arrival_s,
            config.message_fields_max,
            self._thread,
            config.http.unread_s,
            Sharing(self._enter, self._arrivals, Turnstile(config.streams_max)),
        )
        self._server = make_server(
            self._guard,
            config.message_bytes_max,
            config.metadata_bytes_max,
            ClientLimits(config.grpc_connections_max, config.http.arrival_s, config.idle_s),
        )
        self._health = Health(self._server)
        self._router_session: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: GatewayConfig, model_dir: Path, model_id: str, router_address: str) -> Self:
        """Load the tokenizer and serve. The router and the workers may come later.

        Args:
            config: where to listen, and limits.
            model_dir: the checkpoint's folder; only its text files are read.
            model_id: the name that clients and workers use.
            router_address: host:port of the router.

        Raises:
            ConfigError: a model file or the key file is missing or broken, or the port cannot be had.
        """
        facts = await asyncio.to_thread(ModelFacts.load, model_dir)
        text = await asyncio.to_thread(Text.load, model_dir)
        clock = MonotonicClock()
        keys = NoKeys() if config.keys_file is None else await KeyStore.load(config.keys_file.expanduser(), clock)
        gateway = cls(config, model_id, facts, text, router_address, keys)
        try:
            await gateway._open()
        except BaseException:
            await gateway.stop()
            raise
        return gateway

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, give the running ones `grace_s`, end the rest with an error and close everything.

        A further call may have less patience than one before it. Idempotent.
        """
        self._door.shut()
        await self._health.close()
        wait_s = 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._counts.idle()
                wait_s = _FLUSH_S
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(wait_s))
        await asyncio.shield(self._closing)

    async def _close(self, wait_s: float) -> None:
        await asyncio.gather(self._guard.end_calls(stopping(), wait_s), self._http.stop(wait_s))
        await self._server.stop(0)
        await self._workers.close()
        if self._router_session is not None:
            self._router_session.cancel()
            await asyncio.gather(self._router_session, return_exceptions=True)
        self._thread.close()

    async def _open(self) -> None:
        config = self._config
        files = TlsFiles.of(config.tls)
        self.grpc_address = bind_with(files, self._server, config.host, config.grpc_port)
        if files is not None:  # whoever watches this process has no certificate of a client
            self.probe_address = bind(self._server, "127.0.0.1", 0)
        admin = AdminService(
            self.gateway_id,
            self.grpc_address,
            self._counts,
            self._router,
            self._inference,
            self._clock,
            config.http.choices_max,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self._kserve, self._server)
        names = [_INFERENCE, _KSERVE, _ADMIN, "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        await self._health.set_serving(False, [_INFERENCE, _KSERVE])
        await self._server.start()
        await self._health.set_serving(True, ["", _ADMIN])
        self._router_session = asyncio.create_task(self._router.run(), name="router session")
        await self._http.open(config.host, config.http_port, files)
        self.http_address = self._http.address
        addresses = {"address": self.grpc_address, "http": self.http_address}
        log(_LOG, logging.INFO, "gateway serves", gateway_id=self.gateway_id, **addresses)

    def _enter(self, peer: str) -> Entered:
        """Count a gRPC call until it is over for the core too: what its client leaves unread keeps it open."""
        holder = holder_at(peer.partition(":")[2].rpartition(":")[0])
        self._calls.take(holder)
        return Entered(holder, partial(self._calls.give_back, holder))

    async def _router_changed(self, is_connected: bool) -> None:
        """Without a router the gateway lives, but it cannot serve requests."""
        await self._health.set_serving(is_connected, [_INFERENCE, _KSERVE])
