"""The reference backend: Hugging Face modules, with their attention replaced by the paged one."""

from pathlib import Path
from typing import Any, Self

import torch
from transformers import AttentionInterface

from common.config import EngineConfig
from common.errors import ConfigError
from engine.attention.paged import AttentionPlan, PagedPool, paged_attention
from engine.backend import BackendFacts, Outcome, require_device, require_format
from engine.batch import Batch
from engine.kv_cache import KVMemory
from engine.self_check import require_own_logits
from engine.step import LayerWatch
from engine.weights import FAMILIES, load_model

ATTENTION_NAME = "baton_paged"
CPU = torch.device("cpu")
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Weights that Hugging Face modules compute with here and in backend `cuda`."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # always None: causality follows from the plan
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    baton_plan: AttentionPlan,
    baton_watch: LayerWatch | None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Fit transformers' attention interface: [1, heads, T, D] in, [1, T, heads, D] out."""
    output = paged_attention(
        baton_plan,
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
        softcap,
    )
    if baton_watch is not None and module.layer_idx + 1 in baton_watch.marks:
        baton_watch.reached(module.layer_idx + 1)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


def facts_of(model: Any, weights: str, device: str = "cpu") -> BackendFacts:
    """Return what is true of a Hugging Face model that a backend runs; its KV is preferred to be as its weights are."""
    dtypes = dict.fromkeys(str(each).removeprefix("torch.") for each in (FORMATS[weights], *FORMATS.values()))
    config = model.config
    heads = config.num_attention_heads
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = config.eos_token_id
    return BackendFacts(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_tokens=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        eos_token_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        kv_dtypes=tuple(dtypes),
        weights=weights,
        device=device,
    )


def load_checked(path: Path, weights: str) -> Any:
    """Load a model on the CPU with our attention, and make sure that it computes by it what it does by its own.

    Raises:
        ConfigError: see `load_model`; or it does not.
    """
    model = load_model(path, ATTENTION_NAME, FORMATS[weights])
    if model.config.model_type not in FAMILIES:
        require_own_logits(path, model, lambda: ReferenceBackend(model, weights))
    return model


def first_gpu() -> torch.device:
    """Return the first GPU that this process sees.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU here, or is a build without CUDA")
    return torch.device("cuda", 0)


def moved(model: Any, device: torch.device) -> Any:
    """Move a model's weights to where it computes.

    Raises:
        ConfigError: there is no room.
    """
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"no room on {device} for the model's weights: {error}") from error


class ReferenceBackend:
    """Implements engine.backend.Backend for any architecture that passes the check at load. Slow to decode.

    Computes on a CPU or a GPU; has not been run on a GPU yet.
    """

    def __init__(self, model: Any, weights: str, device: torch.device = CPU) -> None:
        self._model: Any = model
        self._device = device
        self._pool: PagedPool | None = None
        self.facts = facts_of(model, weights, str(device))

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig) -> Self:
        """Load weights; see engine.backend.Backend.

        Args:
            model_dir: folder or `.gguf` file.
            config: `weights` auto is fp32: CPUs without bf16 units only emulate it. `device` auto is the CPU.
        """
        require_device(config.device, ["cpu", "cuda"])
        name = "fp32" if config.weights == "auto" else config.weights
        require_format(name, FORMATS)
        device = first_gpu() if config.device == "cuda" else CPU
        return cls(moved(load_checked(model_dir, name), device), name, device)

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool."""
        self._pool = PagedPool(kv)

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Run one step; see engine.backend.Backend. What it returns is on the device."""
        assert self._pool is not None, "attach comes first"
        events = None if watch is None or self._device.type != "cuda" else _LayerEvents(watch)
        output = self._model(
            input_ids=batch.token_ids[None].to(self._device),
            position_ids=batch.positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=batch.asked_rows.to(self._device),
            baton_plan=AttentionPlan.of(batch, self._pool),
            baton_watch=watch if events is None else LayerWatch(events.marks, events.asked_for),
        )
        if events is not None:
            events.wait()
        return self._finished(output.logits[0], batch)

    def close(self) -> None:
        """Drop weights and the view of the pool."""
        self._model = None
        self._pool = None

    def _finished(self, logits: torch.Tensor, batch: Batch) -> Outcome:
        """Return what `batch` asks for of [R + G, V] logits when the device is done.

        Transfers and tiers may read the step's KV from then on, on streams of their own.
        """
        outcome = Outcome.of(logits, batch.logit_rows.shape[0])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return outcome


class _LayerEvents:
    """Tells a watch of layers when the GPU has computed them, which is later than when they were asked of it.

    Layers are waited for when the next group of them has been asked for, so that the GPU always has something to do.
    """

    def __init__(self, watch: LayerWatch) -> None:
        self.marks = watch.marks
        self._reached = watch.reached
        self._asked: tuple[int, torch.cuda.Event] | None = None

    def asked_for(self, num_layers: int) -> None:
        """Note that the first `num_layers` layers are in the GPU's queue."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.wait()
        self._asked = (num_layers, event)

    def wait(self) -> None:
        """Wait for the layers that were asked for last, and tell."""
        if self._asked is not None:
            num_layers, event = self._asked
            self._asked = None
            event.synchronize()
            self._reached(num_layers)
