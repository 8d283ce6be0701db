"""What a forward pass must offer, and which one a worker takes.

Each backend is one class in one file of its own, an entry in `BACKENDS`, and a parameter of the contract test,
tests/engine/test_engine.py.
"""

import importlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol, Self, cast

import torch

from common.config import EngineConfig
from common.errors import ConfigError
from common.logs import log
from engine.batch import Batch
from engine.checkpoint import ModelFileError
from engine.kv_cache import KVMemory
from engine.step import LayerWatch

logger = logging.getLogger(__name__)

BACKENDS = {
    "cuda": "engine.cuda.backend:CudaBackend",
    "cpu": "engine.cpu.backend:CpuBackend",
    "reference": "engine.reference:ReferenceBackend",
}
"""Fastest first: `auto` takes the first that can serve the model on this machine (`cuda` where torch sees a GPU)."""


class BackendFacts(NamedTuple):
    """What is true of a loaded model, and the element types its kernels can keep KV in (the preferred one first)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_tokens: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    kv_dtypes: tuple[str, ...]
    weights: str
    device: str = "cpu"
    """Where the pool has to be, in torch's words."""
    has_own_threads: bool = False
    """Its kernels do not use torch's threads. Those then stay idle: OpenMP's spin on for a while after their work."""


class Outcome(NamedTuple):
    """What a forward pass says about the rows that it was asked about.

    Attributes:
        logits: [R, vocab_tokens] fp32, of the batch's `logit_rows`, in that order.
        winners: [G] i64, of its `greedy_rows`: the token with the greatest logit, the lowest id among equals.
    """

    logits: torch.Tensor
    winners: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, num_logit_rows: int) -> Self:
        """Make it of [R + G, vocab_tokens] logits of a batch's `asked_rows`."""
        return cls(logits[:num_logit_rows].float(), logits[num_logit_rows:].argmax(-1))


class ChosenBackend(NamedTuple):
    """A loaded backend, its name, and why it is not a faster one that was tried first; empty: it is the fastest."""

    name: str
    backend: "Backend"
    refused: str


class Backend(Protocol):
    """A model's weights and its forward pass. Owned by the compute thread once loaded."""

    @property
    def facts(self) -> BackendFacts:
        """Facts of the loaded model."""
        ...

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig) -> Self:
        """Load weights. Blocks for seconds.

        Args:
            model_dir: folder with config.json and safetensors (and model.gguf, where it was converted from one), or a
                `.gguf` file.
            config: `weights` and `threads` are the backend's business.

        Raises:
            ConfigError: this backend cannot serve this model, weight format or machine; the message says why.
        """
        ...

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool that `forward` writes to. Called once, before the first forward."""
        ...

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Write K and V of the batch's tokens to their slots, attend through the block tables.

        `watch.reached(n)` is called for each of its marks when K and V of the first n layers are written, for good.

        Returns:
            What the batch asks for; R or G or both may be 0.
        """
        ...

    def close(self) -> None:
        """Drop weights and every view of the pool. Idempotent."""
        ...


def load_backend(model_dir: Path, config: EngineConfig) -> ChosenBackend:
    """Load the backend that `config.backend` asks for.

    Raises:
        ModelFileError: a file of the model is damaged; the message names it, and the tensor if there is one.
        ConfigError: the backend asked for cannot serve the model; with `auto`: none can. The message has the reasons.
    """
    fastest = [name for name in BACKENDS if name != "cuda" or torch.cuda.is_available()]
    names = fastest if config.backend == "auto" else [config.backend]
    refusals = []
    for name in names:
        try:
            backend = _find(name).load(model_dir, config)
        except ModelFileError:
            raise
        except ConfigError as error:
            refusals.append(f"backend {name}: {error.message}")
            continue
        refused = "; ".join(refusals)
        if refused:
            log(logger, logging.WARNING, "a faster backend was refused", backend=name, refused=refused)
        return ChosenBackend(name, backend, refused)
    raise ConfigError("; ".join(refusals))


def require_format(weights: str, known: Collection[str]) -> None:
    """Refuse a weight format that a backend does not have.

    Raises:
        ConfigError: it has others.
    """
    if weights not in known:
        raise ConfigError(f"engine.weights={weights} is not available here, only {', '.join(known)}")


def require_device(device: str, known: Collection[str]) -> None:
    """Refuse a device that a backend cannot compute on.

    Raises:
        ConfigError: it computes on others.
    """
    if device != "auto" and device not in known:
        raise ConfigError(f"engine.device={device} is not possible here, only {', '.join(known)}")


def _find(name: str) -> type[Backend]:
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot be imported: {error}") from error
    return cast("type[Backend]", getattr(module, class_name))
