"""Entry of an actor that hosts a prefill or decode worker. The worker's class is imported here, inside the actor."""

import importlib
from pathlib import Path
from typing import Any

from common.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig


class HostedWorker:
    """A PrefillWorker or DecodeWorker as a hosted service."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker  # Any: the data plane's classes are not importable from here by design

    def addresses(self) -> dict[str, str]:
        """Return where it listens."""
        return {"grpc": str(self._worker.address)}

    async def wait_failed(self) -> None:
        """Return or raise when its loop has died."""
        await self._worker.wait_failed()

    async def stop(self, drain_timeout_s: float) -> None:
        """Drain and close it."""
        await self._worker.stop(drain_timeout_s)


async def open_worker(
    host: str,
    worker_class: str,
    worker_id: str,
    model_dir: Path,
    model_id: str,
    engine: EngineConfig,
    role: PrefillConfig | DecodeConfig,
    transfer: TransferConfig,
    heartbeat_s: float,
    **more: object,
) -> HostedWorker:
    """Load the model and serve.

    Args:
        host: address to listen on.
        worker_class: `module:Class` of the worker.
        worker_id: its name in the cluster, kept across restarts.
        model_dir: the model's folder, on this node.
        model_id: name that clients ask for.
        engine: the model's execution.
        role: limits of its queue and steps.
        transfer: how KV moves.
        heartbeat_s: longest silence on a Watch stream.
        more: what only this class of worker takes.

    Raises:
        BatonError: from the worker.
    """
    module, _, name = worker_class.partition(":")
    cls = getattr(importlib.import_module(module), name)
    return HostedWorker(
        await cls.start(
            worker_id=worker_id,
            host=host,
            model_dir=model_dir,
            model_id=model_id,
            engine=engine,
            role=role,
            transfer=transfer,
            heartbeat_s=heartbeat_s,
            **more,
        )
    )
