"""The reference backend: Hugging Face modules on the CPU, with their attention replaced by the paged one."""

from pathlib import Path
from typing import Any, Self

import torch
from transformers import AttentionInterface

from common.config import EngineConfig
from engine.attention.paged import AttentionPlan, PagedPool, paged_attention
from engine.backend import BackendFacts, Outcome, require_format
from engine.batch import Batch
from engine.kv_cache import KVMemory
from engine.step import LayerWatch
from engine.weights import load_model

ATTENTION_NAME = "baton_paged"
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


class ReferenceBackend:
    """Implements engine.backend.Backend for every supported family. Slow to decode, right by construction."""

    def __init__(self, model: Any, weights: str) -> None:
        self._model: Any = model
        self._pool: PagedPool | None = None
        self.facts = facts_of(model, weights)

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig) -> Self:
        """Load weights; see engine.backend.Backend. `auto` is fp32: CPUs without bf16 units only emulate it."""
        name = "fp32" if config.weights == "auto" else config.weights
        require_format(name, FORMATS)
        return cls(load_model(model_dir, ATTENTION_NAME, FORMATS[name]), name)

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool."""
        self._pool = PagedPool(kv)

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Run one step; see engine.backend.Backend."""
        assert self._pool is not None, "attach comes first"
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.asked_rows,
            baton_plan=AttentionPlan.of(batch, self._pool),
            baton_watch=watch,
        )
        return Outcome.of(output.logits[0], batch.logit_rows.shape[0])

    def close(self) -> None:
        """Drop weights and the view of the pool."""
        self._model = None
        self._pool = None
