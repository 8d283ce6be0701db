"""The backend for NVIDIA GPUs: Hugging Face modules in bf16 or fp16, our paged attention, CUDA graphs for decode."""

from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from common.config import EngineConfig
from engine.attention.paged import AttentionPlan, PagedPool
from engine.backend import Outcome, require_device, require_format
from engine.batch import Batch
from engine.cuda.decode import DecodeSteps, is_decode_step
from engine.kv_cache import KVMemory
from engine.reference import FORMATS, ReferenceBackend, first_gpu, load_checked, moved
from engine.step import LayerWatch


class CudaBackend(ReferenceBackend):
    """The reference with half the bytes and with graphs. Has not been run on a GPU yet: tests run it on the CPU.

    Attention is torch's SDPA over gathered blocks, one call for each chunk of a prompt and one for all decodes.
    """

    def __init__(self, model: Any, weights: str, device: torch.device) -> None:
        super().__init__(model, weights, device)
        self._steps: DecodeSteps | None = None

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig, device: torch.device | None = None) -> Self:
        """Load weights; see engine.backend.Backend.

        Args:
            model_dir: folder or `.gguf` file.
            config: `weights` auto is bf16, or fp16 on a GPU that has no bf16.
            device: where to compute; None: the first GPU that this process sees.
        """
        require_device(config.device, ["cuda"])
        if device is None:
            device = first_gpu()
        name = config.weights
        if name == "auto":
            name = (
                "bf16" if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
            )
        require_format(name, FORMATS)
        return cls(moved(load_checked(model_dir, name), device), name, device)

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool."""
        super().attach(kv)
        pool = PagedPool(kv)
        self._steps = DecodeSteps(pool, partial(row_logits, self._model), is_graph=self._device.type == "cuda")

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Run one step; see engine.backend.Backend. What it returns is on the device."""
        assert self._steps is not None, "attach comes first"
        if watch is not None or not is_decode_step(batch):
            return super().forward(batch, watch)
        return self._finished(self._steps.run(batch), batch)

    def close(self) -> None:
        """Drop weights, graphs and the view of the pool."""
        super().close()
        self._steps = None


def row_logits(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Return [T, V] logits of every row; nothing in here waits for the device or copies from the host."""
    output = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, baton_plan=plan, baton_watch=None
    )
    return output.logits[0]  # type: ignore[no-any-return]  # transformers is untyped here
