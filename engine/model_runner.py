"""One forward pass over scheduled chunks, and the sampling after it."""

import threading
from collections.abc import Sequence as Seq

import torch

from common.control_groups import usable_cores
from engine.backend import Backend
from engine.batch import make_batch
from engine.kv_cache import KVMemory
from engine.sampler import Sampler
from engine.step import LayerWatch, ScheduledChunk, TokenOutput


class ModelRunner:
    """Implements engine.engine.Runner over a backend. Called from the loop's compute thread only."""

    def __init__(self, name: str, backend: Backend, kv: KVMemory, threads: int) -> None:
        """Tie a loaded backend to its pool.

        Args:
            name: of the backend, for status.
            backend: loaded, attached to `kv`.
            kv: the pool.
            threads: compute threads, at most as many as the calling thread has cores; 0: as many.
        """
        self.backend = name
        self._model = backend
        self._block_tokens = kv.layout.block_tokens
        self._sampler = Sampler(backend.facts.eos_token_ids)
        cores = usable_cores()
        self._torch_threads = 1 if backend.facts.has_own_threads else min(threads or cores, cores)
        self._compute_thread: int | None = None

    @torch.inference_mode()
    def run(self, batch: Seq[ScheduledChunk], watch: LayerWatch | None) -> list[TokenOutput | None]:
        """Write the chunks' KV; return a token for each chunk that reaches its sequence's end."""
        if self._compute_thread != threading.get_ident():
            # OpenMP keeps its thread count for each calling thread.
            torch.set_num_threads(self._torch_threads)
            self._compute_thread = threading.get_ident()
        logits, winners = self._model.forward(make_batch(batch, self._block_tokens), watch)
        asking = [chunk.sequence for chunk in batch if chunk.reaches_end and chunk.sequence.needs_logits]
        assert logits.shape[0] == len(asking)
        sampled = iter(self._sampler.sample(logits, asking) if asking else ())
        greedy = (TokenOutput(token_id, None, []) for token_id in winners.tolist())
        return [
            next(sampled if chunk.sequence.needs_logits else greedy) if chunk.reaches_end else None for chunk in batch
        ]

    def close(self) -> None:
        """Drop weights and pool views."""
        self._model.close()
