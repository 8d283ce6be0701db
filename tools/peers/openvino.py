"""OpenVINO GenAI behind the benchmark's interface: its continuous batching pipeline, one step at a time.

`python -m tools.peers.openvino MODEL_DIR THREADS`. MODEL_DIR holds the model in OpenVINO's own format, in 8 or 4 bits.
KV as it chooses on a CPU (8 bits), latency hint, prefix cache on so that what comes before a decode batch is computed
once.
"""

import time

import numpy as np
import openvino
import openvino_genai

from tools.peers.driver import TimedEngine, context_prompt, intervals, prompt, run

_CACHE_GB = 1
_STEP_TOKENS = 16 * 512 + 64


class OpenVino:
    """One pipeline."""

    def __init__(self, folder: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        scheduler.max_num_seqs = 32
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._next_id = 0

    def prefill(self, num_tokens: int, seed: int) -> float:
        """See TimedEngine."""
        token_ids = prompt(num_tokens, seed)
        begun = time.perf_counter()
        return self._stamps([token_ids], 1)[-1] - begun

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See TimedEngine."""
        stamps = self._stamps([context_prompt(context, row) for row in range(batch)], steps + 1)
        return intervals(stamps[-steps - 1 :])

    def _stamps(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        handles = []
        for token_ids in prompts:
            ids = openvino.Tensor(np.array([token_ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1
        stamps = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            stamps.append(time.perf_counter())
        for handle in handles:
            made = len(handle.read_all()[0].generated_ids)
            if made != num_tokens:
                raise RuntimeError(f"made {made} tokens instead of {num_tokens}")
        return stamps


def load(arguments: list[str]) -> TimedEngine:
    """Load the model that the command line names."""
    folder, threads = arguments
    return OpenVino(folder, int(threads))


if __name__ == "__main__":
    run(load)
