"""On the demo model, disaggregated output equals colocated output equals Hugging Face's, token for token."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.testing import RunningCluster
from tests.integration.asking import Answer, Asker, Oracle, greedy, request

pytestmark = pytest.mark.slow

BLOCK = 16
NEW_TOKENS = 64
# One shorter, equal to and one longer than whole blocks, and both sides of a chunk of 512.
LENGTHS = [5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 79, 100, 127, 129, 200, 300, 511, 513, 1500]
KINDS = ["block", "prefix"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}, "name": {"type": "string", "maxLength": 12}},
    "required": ["kind", "name"],
    "additionalProperties": False,
}
FP32 = ("engine.backend=reference", "engine.weights=fp32", "engine.kv_dtype=float32", "engine.pool_mib=768")


def prompts(tokens: list[int]) -> list[list[int]]:
    """Cut prompts of LENGTHS tokens out of a text, each from another place."""
    rng = random.Random(7)
    starts = [rng.randrange(len(tokens) - length) for length in LENGTHS]
    return [tokens[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def cases(demo_model_dir: Path, demo_text_tokens: list[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts with the reference's answers."""
    torch.set_num_threads(2)
    oracle = Oracle(demo_model_dir)
    return [(prompt, oracle.generate(prompt, NEW_TOKENS)) for prompt in prompts(demo_text_tokens)]


@pytest.fixture(scope="module")
def forms_seen() -> dict[str, list[int]]:
    """The tokens of the answer in a form, from whichever cluster gave it first."""
    return {}


def in_form(prompt: list[int]) -> inference_pb2.GenerateRequest:
    """Return a request whose answer must obey SCHEMA."""
    grammar = common_pb2.Grammar(json_schema=json.dumps(SCHEMA))
    return request(prompt, common_pb2.SamplingParams(max_tokens=100, temperature=0.0, grammar=grammar))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(("prefill.workers=1", "decode.workers=1"), id="disaggregated"),
        pytest.param(("prefill.workers=0", "decode.workers=0", "both.workers=1"), id="colocated"),
    ],
)
def test_every_prompt_gets_the_references_tokens_alone_and_among_the_others_and_a_schema_is_obeyed(
    cases: list[tuple[list[int], list[int]]], roles: tuple[str, ...], forms_seen: dict[str, list[int]]
) -> None:
    async def ask(address: str) -> tuple[list[Answer], list[Answer], Answer, list[str]]:
        async with Asker(address) as asker:
            messages = [request(prompt, greedy(NEW_TOKENS)) for prompt, _ in cases]
            alone = [await asker.ask(message) for message in messages]
            together = await asker.ask_all(messages)
            formed = await asker.ask(in_form(cases[0][0]))
            return alone, together, formed, list((await asker.quiet_status()).transports)

    with RunningCluster(*FP32, *roles) as cluster:
        alone, together, formed, transports = asyncio.run(ask(cluster.address))

    expected = [tokens for _, tokens in cases]
    assert [answer.token_ids for answer in alone] == expected
    assert [answer.token_ids for answer in together] == expected
    assert [answer.finished and answer.finished.usage.cached_tokens > 0 for answer in together] == [
        length > BLOCK for length in LENGTHS
    ], "the second round finds the first one's full blocks"
    value = json.loads(formed.text)
    assert (sorted(value), value["kind"] in KINDS, len(value["name"]) <= 12) == (["kind", "name"], True, True)
    assert formed.finished is not None
    assert formed.finished.reason == common_pb2.FINISH_REASON_STOP
    # Whoever comes second must have chosen the same tokens.
    assert forms_seen.setdefault("tokens", formed.token_ids) == formed.token_ids
    assert transports == (["shm"] if "prefill.workers=1" in roles else [])
