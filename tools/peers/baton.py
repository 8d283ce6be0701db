"""Our engine behind the benchmark's interface: the whole step of a worker, with batch building and sampling.

`python -m tools.peers.baton MODEL_DIR THREADS WEIGHTS ACTIVATIONS KV_DTYPE`.
"""

import gc
import time
from pathlib import Path

from common.config import EngineConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk
from tools.peers.driver import TimedEngine, context_prompt, prompt, run

_POOL_MIB = 1024


class BatonEngine:
    """Steps an Engine as a worker's loop does, without the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, num_tokens: int, seed: int) -> float:
        """See TimedEngine."""
        begun = time.perf_counter()
        sequence = self._admit(prompt(num_tokens, seed))
        self._step([sequence])
        seconds = time.perf_counter() - begun
        self._engine.pool.release(sequence.block_table)
        return seconds

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See TimedEngine; what comes before is found in the prefix cache from the second call on."""
        sequences = [self._admit(context_prompt(context, row)) for row in range(batch)]
        for sequence in sequences:
            self._step([sequence])
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            self._step(sequences)
            seconds.append(time.perf_counter() - begun)
        for sequence in sequences:
            self._engine.pool.release(sequence.block_table)
        return seconds

    def _admit(self, token_ids: list[int]) -> Sequence:
        block_tokens = self._engine.layout.block_tokens
        sequence = Sequence.start("bench", token_ids, len(token_ids), SamplingParams(), block_tokens)
        sequence.block_table = self._engine.pool.match(sequence.reusable_hashes(block_tokens))
        sequence.num_computed = len(sequence.block_table) * block_tokens
        return sequence

    def _step(self, sequences: list[Sequence]) -> None:
        engine = self._engine
        for sequence in sequences:
            missing = engine.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            sequence.block_table += engine.pool.allocate(missing)
        chunks = [ScheduledChunk(sequence, sequence.num_uncomputed) for sequence in sequences]
        for chunk, output in zip(chunks, engine.step(chunks), strict=True):
            engine.complete(chunk, output)


def load(arguments: list[str]) -> TimedEngine:
    """Load the model that the command line names."""
    folder, threads, weights, activations, kv_dtype = arguments
    config = EngineConfig.model_validate(
        {
            "threads": int(threads),
            "weights": weights,
            "activations": activations,
            "kv_dtype": kv_dtype,
            "pool_mib": _POOL_MIB,
        }
    )
    engine = BatonEngine(Engine.load(Path(folder), config, "bench"))
    gc.freeze()  # as a worker's process does once it is up
    return engine


if __name__ == "__main__":
    run(load)
