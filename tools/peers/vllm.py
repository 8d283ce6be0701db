"""vLLM's CPU engine behind the benchmark's interface.

`python -m tools.peers.vllm MODEL_DIR THREADS DTYPE`. The safetensors as they are, eager mode (its compiled mode takes
minutes to start), prefix cache on so that what comes before a decode batch is computed once.
"""

import os
import time

from tools.peers.driver import TimedEngine, context_prompt, intervals, prompt, run


class Vllm:
    """One engine in this process."""

    def __init__(self, folder: str, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=4096,
            max_num_seqs=16,
            max_num_batched_tokens=16_384,
            enable_prefix_caching=True,
            enforce_eager=True,
            async_scheduling=False,
        )
        self._num_requests = 0

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
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        for token_ids in prompts:
            self._num_requests += 1
            engine.add_request(f"bench-{self._num_requests}", {"prompt_token_ids": token_ids}, sampling)
        stamps = []
        while engine.has_unfinished_requests():
            engine.step()
            stamps.append(time.perf_counter())
        return stamps


def load(arguments: list[str]) -> TimedEngine:
    """Load the model that the command line names."""
    folder, threads, dtype = arguments
    # vLLM reads its settings from the environment of its process, which is this one alone.
    os.environ.update(  # noqa: TID251
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{int(threads) - 1}",
        OMP_NUM_THREADS=threads,
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
    )
    return Vllm(folder, dtype)


if __name__ == "__main__":
    run(load)
