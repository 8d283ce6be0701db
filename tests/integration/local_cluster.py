"""A whole cluster in one process, without Ray: real gRPC, real transfers, real engines. Starts in a second."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_pb.v1 import router_pb2, worker_pb2
from cluster.gateway.server import GatewayServer
from cluster.router.server import RouterServer
from common.config import DecodeConfig, EngineConfig, PrefillConfig, RouterConfig, TransferConfig
from common.config_doors import GatewayConfig
from decode.worker import DecodeWorker
from prefill.worker import PrefillWorker

HOST = "127.0.0.1"
MODEL_ID = "tiny"
HEARTBEAT_S = 3.0
READY_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster's parts."""

    address: str
    http_address: str
    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]


@asynccontextmanager
async def local_cluster(
    model_dir: Path,
    num_prefill: int,
    num_decode: int,
    block_tokens: int = 8,
    chunk_tokens: int = 256,
    pool_blocks: int = 256,
    transport: str = "auto",
    policy: str = "prefix",
    tiers: Mapping[str, Any] | None = None,
    **gateway_settings: Any,
) -> AsyncIterator[LocalCluster]:
    """Start workers, router and gateway; stop them in the reverse order. `tiers` are settings of the engine's."""
    engine = EngineConfig(
        backend="reference",
        weights="fp32",
        block_tokens=block_tokens,
        pool_blocks=pool_blocks,
        threads=1,
        **(tiers or {}),
    )
    transfer = TransferConfig.model_validate({"transport": transport})
    async with AsyncExitStack() as stack:
        prefill: list[PrefillWorker] = []
        decode: list[DecodeWorker] = []
        for number in range(num_prefill):
            prefill.append(
                await PrefillWorker.start(
                    f"prefill-{number}",
                    HOST,
                    model_dir,
                    MODEL_ID,
                    engine,
                    PrefillConfig(token_budget=chunk_tokens),
                    transfer,
                    HEARTBEAT_S,
                )
            )
            stack.push_async_callback(prefill[-1].stop, 5.0)
        for number in range(num_decode):
            decode.append(
                await DecodeWorker.start(
                    f"decode-{number}",
                    HOST,
                    model_dir,
                    MODEL_ID,
                    engine,
                    DecodeConfig(token_budget=chunk_tokens),
                    transfer,
                    HEARTBEAT_S,
                    is_colocated=num_prefill == 0,
                )
            )
            stack.push_async_callback(decode[-1].stop, 5.0)
        router = await RouterServer.start(HOST, 0, RouterConfig.model_validate({"policy": policy}), HEARTBEAT_S)
        stack.push_async_callback(router.stop)
        await router.set_workers(
            [
                router_pb2.WorkerAddress(worker_id=worker.worker_id, address=worker.address, role=role, node="here")
                for workers, role in (
                    (prefill, worker_pb2.WORKER_ROLE_PREFILL),
                    (decode, worker_pb2.WORKER_ROLE_DECODE if num_prefill else worker_pb2.WORKER_ROLE_BOTH),
                )
                for worker in workers
            ]
        )
        async with asyncio.timeout(READY_WITHIN_S):
            while any(worker.state != "ready" for worker in router.status().workers):
                await asyncio.sleep(0.01)
        gateway = await GatewayServer.start(
            GatewayConfig(host=HOST, grpc_port=0, http_port=0, **gateway_settings), model_dir, MODEL_ID, router.address
        )
        stack.push_async_callback(gateway.stop)
        yield LocalCluster(gateway.grpc_address, gateway.http_address, prefill, decode)
