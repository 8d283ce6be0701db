"""llama.cpp behind the benchmark's interface, through the low-level batch API of llama-cpp-python.

`python -m tools.peers.llama FILE.gguf THREADS`. KV in fp16 (its default), flash attention as it chooses, one
context for each batch size with as many sequences, a physical batch of 512 tokens (its default; 2,048 was no faster).
"""

import ctypes
import time
from typing import Any

import llama_cpp.llama_cpp as native
import numpy as np

from tools.peers.driver import TimedEngine, context_prompt, prompt, run

_BATCH_TOKENS = 2048
_PHYSICAL_TOKENS = 512
_PROMPT_CONTEXT = 4096
_GROWTH_TOKENS = 128


@native.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None:
    del level, text, data


class LlamaCpp:
    """One model; contexts are made when first needed."""

    def __init__(self, file: str, threads: int) -> None:
        native.llama_log_set(_quiet, None)
        native.llama_backend_init()
        self._model = native.llama_model_load_from_file(file.encode(), native.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._threads = threads
        self._vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(self._model))
        self._batch = native.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._prompts = self._context(_PROMPT_CONTEXT, 1)
        self._decoding: dict[tuple[int, int], tuple[Any, list[int]]] = {}

    def prefill(self, num_tokens: int, seed: int) -> float:
        """See TimedEngine."""
        native.llama_memory_clear(native.llama_get_memory(self._prompts), True)
        token_ids = prompt(num_tokens, seed)
        begun = time.perf_counter()
        self._prefill(self._prompts, 0, token_ids)
        return time.perf_counter() - begun

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See TimedEngine; KV beyond the context is removed before the steps."""
        if (batch, context) not in self._decoding:
            handle = self._context((context + _GROWTH_TOKENS) * batch, batch)
            firsts = [self._prefill(handle, row, context_prompt(context, row)) for row in range(batch)]
            self._decoding[batch, context] = handle, firsts
        handle, firsts = self._decoding[batch, context]
        tokens = list(firsts)
        for row in range(batch):
            native.llama_memory_seq_rm(native.llama_get_memory(handle), row, context, -1)
        seconds = []
        for step in range(steps):
            begun = time.perf_counter()
            self._run(handle, [(token, context + step, row, True) for row, token in enumerate(tokens)])
            logits = np.ctypeslib.as_array(native.llama_get_logits(handle), (batch, self._vocab))
            tokens = [int(token) for token in logits.argmax(1)]
            seconds.append(time.perf_counter() - begun)
        return seconds

    def _context(self, num_tokens: int, num_sequences: int) -> Any:
        params = native.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_tokens, num_sequences
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, _PHYSICAL_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        params.kv_unified = False
        context = native.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def _prefill(self, context: Any, row: int, token_ids: list[int]) -> int:
        last = len(token_ids) - 1
        self._run(context, [(token, i, row, i == last) for i, token in enumerate(token_ids)])
        logits = np.ctypeslib.as_array(native.llama_get_logits_ith(context, last), (self._vocab,))
        return int(logits.argmax())

    def _run(self, context: Any, items: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, row, wants_logits) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = row
            batch.logits[i] = wants_logits
        if code := native.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")


def quantise(kind: str, source: str, target: str) -> None:
    """Write `source` (any GGUF) as Q4_0 or Q8_0."""
    params = native.llama_model_quantize_default_params()
    params.ftype = {"Q4_0": native.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": native.LLAMA_FTYPE_MOSTLY_Q8_0}[kind]
    params.allow_requantize = True
    if native.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantise {source} to {kind}")


def load(arguments: list[str]) -> TimedEngine:
    """Load the model that the command line names."""
    file, threads = arguments
    return LlamaCpp(file, int(threads))


if __name__ == "__main__":
    run(load)
