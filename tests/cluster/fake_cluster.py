"""A router and a gateway over fake workers, in one process, over real gRPC. Leaving it asserts that nothing is left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton_pb.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    router_pb2,
    worker_pb2,
)
from cluster.fake_worker import FakeModel, FakeWorker
from cluster.gateway.server import GatewayServer
from cluster.router.server import RouterServer
from common.config import RouterConfig
from common.config_doors import GatewayConfig
from common.status import typed_rpc_errors

HOST = "127.0.0.1"
LIMIT_S = 10.0
HEARTBEAT_S = 0.5
_PATIENT_S = LIMIT_S
"""Heartbeat here: no test of the gateway is about silence, and a slow machine must not look like a lost worker."""
PREFILL, DECODE, BOTH = (
    worker_pb2.WORKER_ROLE_PREFILL,
    worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_BOTH,
)


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition on state that announces no change; only tests look at such state from outside."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert condition(), what


async def within_a_second(condition: Callable[[], bool], what: str) -> None:
    """Wait a second of an idle machine: so many turns of 5 ms, however long they take on a busy one."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(what)


def run(scenario: Coroutine[Any, Any, None], limit_s: float = 3 * LIMIT_S) -> None:
    """Run a test's scenario with a limit; no task may be left."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario
        await until(lambda: len(asyncio.all_tasks()) == 1, "tasks are left")

    asyncio.run(limited())


@dataclass(slots=True)
class Answer:
    """What a client saw of a request."""

    responses: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for response in self.responses for token_id in response.token_ids]

    @property
    def finished(self) -> inference_pb2.Finished:
        assert [r.HasField("finished") for r in self.responses].index(True) == len(self.responses) - 1
        return self.responses[-1].finished


def request(prompt: str | list[int] = "hello world", **sampling: Any) -> inference_pb2.GenerateRequest:
    """Return a request."""
    made = inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling))
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    return made


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key."""
    return (("authorization", f"Bearer {key}"),)


@dataclass(slots=True)
class FakeCluster:
    """The parts. `router` may be replaced by the test, with `restart_router`."""

    router: RouterServer
    gateway: GatewayServer
    workers: dict[str, FakeWorker]
    channel: grpc.aio.Channel
    stub: Any
    admin: Any
    metadata: tuple[tuple[str, str], ...] = ()
    """Shown with each call."""

    def worker(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    def call(
        self, asked: inference_pb2.GenerateRequest, timeout_s: float | None = LIMIT_S, key: str | None = None
    ) -> Any:
        metadata = self.metadata if key is None else bearer(key)
        return self.stub.Generate(asked, timeout=timeout_s, metadata=metadata)

    async def ask(
        self, asked: inference_pb2.GenerateRequest, timeout_s: float | None = LIMIT_S, key: str | None = None
    ) -> Answer:
        """Send a request and return all of its answer. Raises our own errors."""
        answer = Answer()
        with typed_rpc_errors():
            async for response in self.call(asked, timeout_s, key):
                answer.responses.append(response)
        return answer

    async def status(self) -> admin_pb2.ClusterStatus:
        status: admin_pb2.ClusterStatus = await self.admin.GetStatus(
            admin_pb2.GetStatusRequest(), timeout=LIMIT_S, metadata=self.metadata
        )
        return status

    def states(self) -> dict[str, str]:
        return {worker.worker_id: worker.state for worker in self.router.status().workers}

    async def all_ready(self) -> None:
        await until(lambda: set(self.states().values()) == {"ready"}, "workers are not ready")

    async def reconnect(self) -> None:
        """Talk to the gateway that is there now."""
        await self.channel.close(None)
        self.channel = grpc.aio.insecure_channel(self.gateway.grpc_address)
        self.stub, self.admin = inference_pb2_grpc.InferenceStub(self.channel), admin_pb2_grpc.AdminStub(self.channel)

    async def set_workers(self) -> None:
        await self.router.set_workers([address_of(worker) for worker in self.workers.values()])

    async def restart_router(self) -> None:
        """Stop the router and start another one at its address, which must hear of the workers anew."""
        address = self.router.address
        await self.router.stop()
        self.router = await RouterServer.start(HOST, int(address.rpartition(":")[2]), RouterConfig(), _PATIENT_S)
        await self.set_workers()

    async def restart_worker(self, worker_id: str, generation: int = 2) -> FakeWorker:
        """Start a worker again at the address that it had."""
        old = self.workers[worker_id]
        model = FakeModel(generation=generation)
        self.workers[worker_id] = await FakeWorker.start(worker_id, old.role, model, old.address)
        return self.workers[worker_id]


def address_of(worker: FakeWorker) -> router_pb2.WorkerAddress:
    return router_pb2.WorkerAddress(worker_id=worker.worker_id, address=worker.address, role=worker.role, node="here")


@asynccontextmanager
async def fake_cluster(
    model_dir: Path,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_both: int = 0,
    policy: str = "prefix",
    model: FakeModel | None = None,
    admin_key: str | None = None,
    queue_max: int = 1024,
    **gateway: Any,
) -> AsyncIterator[FakeCluster]:
    """Start everything; at the end no request, reservation or sequence may be left."""
    workers = {}
    for role, name, count in ((PREFILL, "p", num_prefill), (DECODE, "d", num_decode), (BOTH, "b", num_both)):
        for number in range(count):
            worker = await FakeWorker.start(f"{name}{number}", role, model)
            workers[worker.worker_id] = worker
    routing = RouterConfig.model_validate({"policy": policy, "queue_max": queue_max})
    router = await RouterServer.start(HOST, 0, routing, _PATIENT_S)
    config = GatewayConfig(host=HOST, grpc_port=0, http_port=0, **gateway)
    server = await GatewayServer.start(config, model_dir, "fake", router.address)
    channel = grpc.aio.insecure_channel(server.grpc_address)
    cluster = FakeCluster(
        router,
        server,
        workers,
        channel,
        inference_pb2_grpc.InferenceStub(channel),
        admin_pb2_grpc.AdminStub(channel),
        () if admin_key is None else bearer(admin_key),
    )
    try:
        await cluster.set_workers()
        await cluster.all_ready()
        yield cluster
        await until(lambda: cluster.router.status().reservations == 0, "reservations are left")
        await until(lambda: not any(w.num_running for w in cluster.workers.values()), "sequences are left")
        gateway_status = (await cluster.status()).gateway
        assert (gateway_status.running_requests, gateway_status.queued_requests) == (0, 0)
    finally:
        await cluster.channel.close(None)
        await cluster.gateway.stop()
        await cluster.router.stop()
        for worker in cluster.workers.values():
            await worker.stop()


async def start_again(cluster: FakeCluster, model_dir: Path) -> None:
    """Give the cluster a gateway: its end asks it for its figures."""
    config = GatewayConfig(host=HOST, grpc_port=0, http_port=0)
    cluster.gateway = await GatewayServer.start(config, model_dir, "fake", cluster.router.address)
    await cluster.reconnect()
