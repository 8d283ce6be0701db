"""Prompts that nobody has cached, and when their first token comes: what benchmarks of whole clusters ask."""

import random
import time
from typing import Any

from baton_pb.v1 import common_pb2, inference_pb2

VOCAB_FROM, VOCAB_TO = 1000, 20_000


def request_of(rng: random.Random, prompt_tokens: int, output_tokens: int) -> inference_pb2.GenerateRequest:
    """Return a request of random tokens, answered greedily in full length."""
    ids = [rng.randrange(VOCAB_FROM, VOCAB_TO) for _ in range(prompt_tokens)]
    sampling = common_pb2.SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), sampling=sampling)


async def ttft_of(stub: Any, rng: random.Random, prompt_tokens: int, output_tokens: int) -> float:
    """Send a new prompt, read its answer, and return its TTFT at the client, seconds."""
    sent = time.monotonic()
    first: float | None = None
    async for response in stub.Generate(request_of(rng, prompt_tokens, output_tokens)):
        if first is None and response.token_ids:
            first = time.monotonic()
    assert first is not None
    return first - sent
