"""The fused CPU backend: Llama-shaped models with packed weights, a whole step in one C++ call."""

import ctypes
import logging
from pathlib import Path
from typing import Self

import numpy as np
import torch

from common.config import EngineConfig
from common.control_groups import usable_cores
from common.errors import ConfigError
from common.logs import log
from engine.backend import BackendFacts, Outcome, require_device, require_format
from engine.batch import Batch
from engine.cpu.architecture import Architecture, read_architecture
from engine.cpu.build import Isa, supported_isas
from engine.cpu.native import (
    Format,
    KvFormat,
    LayerDesc,
    LayersDone,
    MatrixDesc,
    ModelDesc,
    NativeModel,
    Precision,
    StepDesc,
)
from engine.cpu.packing import padded
from engine.cpu.weights import PackedWeights, has_quantised_source
from engine.kv_cache import KVMemory
from engine.step import LayerWatch
from kvtransfer.layout import BlockLayout

logger = logging.getLogger(__name__)

KV_DTYPES = {
    "fp32": ("float32", "float16", "bfloat16", "int8"),
    "w8": ("float16", "float32", "bfloat16", "int8"),
    "q4": ("float16", "float32", "bfloat16", "int8"),
}
"""What the pool may hold; the first is the default. fp32 weights are asked for by who wants exactness."""
_FORMATS = {"fp32": Format.FP32, "w8": Format.W8, "q4": Format.Q4}


class CpuBackend:
    """Implements engine.backend.Backend. Owned by the compute thread.

    A sequence's logits do not depend on what else is in the batch, bit for bit.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: PackedWeights,
        format_name: str,
        isa: Isa,
        threads: int,
        activations: Precision,
    ) -> None:
        """Start the compute threads; `weights` is owned from here on. `activations` is for 4-bit weights."""
        self._activations = activations
        self._architecture = architecture
        self._weights = weights
        self._pool: torch.Tensor | None = None
        self._layout: BlockLayout | None = None
        self._vocab_rows = padded(architecture.vocab, 16)
        # ctypes structures hold addresses only: what they point at is kept here.
        self._frequencies = [np.ascontiguousarray(rope.inverse_frequencies) for rope in architecture.ropes]
        self._layers = (LayerDesc * len(architecture.layers))()
        self._native: NativeModel | None = NativeModel(isa, self._describe(threads))
        self.isa = isa
        self.facts = BackendFacts(
            num_layers=len(architecture.layers),
            num_kv_heads=architecture.kv_heads,
            head_dim=architecture.head_dim,
            vocab_tokens=architecture.vocab,
            context_tokens=architecture.context_tokens,
            eos_token_ids=architecture.eos_token_ids,
            kv_dtypes=KV_DTYPES[format_name],
            weights=format_name,
            has_own_threads=True,
        )

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig, isa: Isa | None = None) -> Self:
        """Load weights; see engine.backend.Backend.

        Args:
            model_dir: folder with config.json and safetensors; the blocks of a `model.gguf` in it are used as they are.
            config: `weights` auto is q4 where there is such a GGUF, else w8; `threads` is capped by the usable cores.
            isa: forces an instruction set; None: the best one here.
        """
        require_device(config.device, ["cpu"])
        isas = supported_isas()
        if not isas:
            raise ConfigError("this machine has no AVX2")
        if isa is not None and isa not in isas:
            raise ConfigError(f"this machine has no {isa}")
        if not model_dir.is_dir():
            raise ConfigError(f"{model_dir} is not a model folder")
        architecture = read_architecture(model_dir)
        name = config.weights
        if name == "auto":
            name = "q4" if has_quantised_source(model_dir) else "w8"
        require_format(name, _FORMATS)
        cores = usable_cores()
        threads = min(config.threads or cores, cores)
        weights = PackedWeights.open(model_dir, architecture, _FORMATS[name])
        try:
            activations = {"int16": Precision.INT16, "int8": Precision.INT8}[config.activations]
            backend = cls(architecture, weights, name, isa or isas[0], threads, activations)
        except BaseException:
            weights.close()
            raise
        log(logger, logging.INFO, "kernels ready", isa=backend.isa, weights=name, threads=threads)
        return backend

    def attach(self, kv: KVMemory) -> None:
        """Remember the pool; see engine.backend.Backend."""
        self._pool = kv.raw()
        self._layout = kv.layout

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> Outcome:
        """Run one step; see engine.backend.Backend.

        Raises:
            ValueError: the batch points outside the pool or the vocabulary; nothing was computed.
        """
        assert self._native is not None
        assert self._pool is not None
        assert self._layout is not None
        layout, pool, num_rows = self._layout, self._pool, batch.logit_rows.shape[0]
        logits = torch.empty(num_rows, self._vocab_rows)
        winners = torch.empty_like(batch.greedy_rows)
        segments = torch.tensor(batch.segments, dtype=torch.int32)
        tables = batch.block_tables.contiguous()
        marks = torch.tensor(() if watch is None else watch.marks, dtype=torch.int64)
        self._native.step(
            StepDesc(
                num_tokens=batch.num_tokens,
                num_segments=len(batch.segments),
                table_width=tables.shape[1],
                num_logit_rows=num_rows,
                logits_stride=self._vocab_rows,
                token_ids=batch.token_ids.data_ptr(),
                positions=batch.positions.data_ptr(),
                slots=batch.slots.data_ptr(),
                segments=segments.data_ptr(),
                block_tables=tables.data_ptr(),
                logit_rows=batch.logit_rows.data_ptr(),
                logits=logits.data_ptr(),
                num_greedy_rows=winners.shape[0],
                greedy_rows=batch.greedy_rows.data_ptr(),
                winners=winners.data_ptr(),
                pool=pool.data_ptr(),
                num_blocks=pool.shape[0],
                num_pool_layers=layout.num_layers,
                block_tokens=layout.block_tokens,
                kv_format=KvFormat[layout.dtype.upper()],
                num_marks=marks.shape[0],
                marks=marks.data_ptr(),
                layers_done=LayersDone() if watch is None else LayersDone(watch.reached),
            )
        )
        return Outcome(logits[:, : self._architecture.vocab], winners)

    def close(self) -> None:
        """Stop the threads, drop weights and pool. Idempotent."""
        if self._native is not None:
            self._native.close()
            self._native = None
        self._pool = None
        self._weights.close()

    def _describe(self, threads: int) -> ModelDesc:
        a = self._architecture
        precisions = {site: self._precision(site) for site in ("qkv", "output", "gate_up", "down")}
        for i, shape in enumerate(a.layers):
            layer = self._layers[i]
            for site, precision in precisions.items():
                setattr(layer, site, self._matrix(f"{i}.{site}", precision))
            for name in (
                "attention_norm",
                "mlp_norm",
                "post_attention_norm",
                "post_mlp_norm",
                "query_norm",
                "key_norm",
                "qkv_bias",
                "output_bias",
                "gate_up_bias",
                "down_bias",
            ):
                setattr(layer, name, self._vector(f"{i}.{name}"))
            layer.window, layer.rope = shape.window, shape.rope
        embedding = self._matrix("embedding", self._precision("embedding"))
        head = embedding if a.tied else self._matrix("head", self._precision("head"))
        ropes = list(zip(self._frequencies, a.ropes, strict=True)) * (2 if len(a.ropes) == 1 else 1)
        return ModelDesc(
            hidden=a.hidden,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            intermediate=a.intermediate,
            vocab=a.vocab,
            num_layers=len(a.layers),
            threads=threads,
            gelu=a.gelu,
            epsilon=a.epsilon,
            embed_factor=a.embed_factor,
            attention_scale=a.attention_scale,
            attention_softcap=a.attention_softcap,
            logit_softcap=a.logit_softcap,
            rope_factor=(ctypes.c_float * 2)(*(rope.factor for _, rope in ropes)),
            inverse_frequencies=(ctypes.c_void_p * 2)(*(frequencies.ctypes.data for frequencies, _ in ropes)),
            final_norm=self._vector("final_norm"),
            embedding=embedding,
            head=head,
            layers=self._layers,
        )

    def _precision(self, site: str) -> Precision:
        """The configured activations only where every matrix of the site is in 4 bits; 16 bits for the rest."""
        entries = self._weights.entries
        formats = {entries[name].format for name in entries if name == site or name.endswith(f".{site}")}
        if formats == {Format.FP32}:
            return Precision.EXACT
        return self._activations if formats == {Format.Q4} else Precision.INT16

    def _matrix(self, name: str, precision: Precision) -> MatrixDesc:
        entry = self._weights.entries[name]
        return MatrixDesc(self._weights.address(name), entry.rows, entry.k, entry.format, precision)

    def _vector(self, name: str) -> int | None:
        return self._weights.address(name) if name in self._weights.entries else None
