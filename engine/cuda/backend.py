"""The backend for NVIDIA GPUs: Hugging Face modules in bf16 or fp16, our paged attention, CUDA graphs for decode."""

from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from common.config import EngineConfig
from common.errors import ConfigError
from engine.attention.paged import AttentionPlan, PagedPool
from engine.backend import BackendFacts, Outcome, require_format
from engine.batch import Batch
from engine.cuda.decode import DecodeSteps, is_decode_step
from engine.kv_cache import KVMemory
from engine.reference import ATTENTION_NAME, FORMATS, facts_of
from engine.step import LayerWatch
from engine.weights import load_model


class CudaBackend:
    """Implements engine.backend.Backend. Has not been run on a GPU yet: tests run it on the CPU, without graphs.

    Attention is torch's SDPA over gathered blocks, one call for each chunk of a prompt and one for all decodes.
    """

    def __init__(self, model: Any, weights: str, device: torch.device) -> None:
        self.facts: BackendFacts = facts_of(model, weights, str(device))
        self._device = device
        self._model: Any = model
        self._pool: PagedPool | None = None
        self._steps: DecodeSteps | None = None

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig, device: torch.device | None = None) -> Self:
        """Load weights; see engine.backend.Backend.

        Args:
            model_dir: folder or `.gguf` file.
            config: `weights` auto is bf16, or fp16 on a GPU that has no bf16.
            device: where to compute; None: the first GPU that this process sees.
        """
        if device is None:
            if not torch.cuda.is_available():
                raise ConfigError("torch sees no GPU here, or is a build without CUDA")
            device = torch.device("cuda", 0)
        name = config.weights
        if name == "auto":
            name = (
                "bf16" if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
            )
        require_format(name, FORMATS)
        model = load_model(model_dir, ATTENTION_NAME, FORMATS[name])
        try:
            model.to(device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no room on {device} for the model's weights: {error}") from error
        return cls(model, name, device)

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool."""
        self._pool = PagedPool(kv)
        self._steps = DecodeSteps(self._pool, partial(row_logits, self._model), is_graph=self._device.type == "cuda")

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Run one step; see engine.backend.Backend. What it returns is on the device.

        Returns when the GPU is done: transfers and tiers may read the step's KV, on streams of their own.
        """
        assert self._pool is not None, "attach comes first"
        assert self._steps is not None
        if watch is None and is_decode_step(batch):
            logits = self._steps.run(batch)
        else:
            logits = self._ragged(batch, self._pool, watch)
        outcome = Outcome.of(logits, batch.logit_rows.shape[0])
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return outcome

    def close(self) -> None:
        """Drop weights, graphs and the view of the pool."""
        self._model = None
        self._pool = None
        self._steps = None

    def _ragged(self, batch: Batch, pool: PagedPool, watch: LayerWatch | None) -> torch.Tensor:
        events = None if watch is None or self._device.type != "cuda" else _LayerEvents(watch)
        output = self._model(
            input_ids=batch.token_ids[None].to(self._device),
            position_ids=batch.positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=batch.asked_rows.to(self._device),
            baton_plan=AttentionPlan.of(batch, pool),
            baton_watch=watch if events is None else LayerWatch(events.marks, events.asked_for),
        )
        if events is not None:
            events.wait()
        return output.logits[0]  # type: ignore[no-any-return]  # transformers is untyped here


def row_logits(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Return [T, V] logits of every row; nothing in here waits for the device or copies from the host."""
    output = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, baton_plan=plan, baton_watch=None
    )
    return output.logits[0]  # type: ignore[no-any-return]  # transformers is untyped here


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
