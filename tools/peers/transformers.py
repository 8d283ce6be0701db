"""Hugging Face transformers behind the benchmark's interface: the model's own modules and cache, greedy.

`python -m tools.peers.transformers MODEL_DIR THREADS DTYPE`.
"""

import copy
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tools.peers.driver import TimedEngine, context_prompt, prompt, run


class Transformers:
    """One model."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._before: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}

    def prefill(self, num_tokens: int, seed: int) -> float:
        """See TimedEngine."""
        token_ids = torch.tensor([prompt(num_tokens, seed)])
        begun = time.perf_counter()
        self._step(token_ids, DynamicCache(config=self._model.config))
        return time.perf_counter() - begun

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See TimedEngine; all rows have the same context, which costs these kernels as much as different ones."""
        if (batch, context) not in self._before:
            cache = DynamicCache(config=self._model.config)
            tokens = self._step(torch.tensor([context_prompt(context, 0)]), cache)
            cache.batch_repeat_interleave(batch)
            self._before[batch, context] = cache, tokens.repeat(batch, 1)
        cache, tokens = copy.deepcopy(self._before[batch, context])
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            tokens = self._step(tokens, cache)
            seconds.append(time.perf_counter() - begun)
        return seconds

    @torch.inference_mode()
    def _step(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return tokens


def load(arguments: list[str]) -> TimedEngine:
    """Load the model that the command line names."""
    folder, threads, dtype = arguments
    torch.set_num_threads(int(threads))
    return Transformers(folder, dtype)


if __name__ == "__main__":
    run(load)
