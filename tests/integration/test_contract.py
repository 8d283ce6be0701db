"""What OpenAI's API promises holds when one worker prefills and another decodes: usage, logprobs, kinds of answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.tiny import make_tiny_model
from tests.integration.local_cluster import local_cluster

pytestmark = pytest.mark.slow

BLOCK = 8
PROMPT = [5 + number % 90 for number in range(4 * BLOCK + 3)]
NUM_TOKENS = 6
COMPLETION = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", path, json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["disaggregated", "colocated"])
def test_cached_tokens_are_what_the_prefill_really_found(tmp_path: Path, num_prefill: int) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")

    async def scenario() -> list[int]:
        async with (
            local_cluster(model_dir, num_prefill, 1, block_tokens=BLOCK) as cluster,
            httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60) as http,
        ):
            found = []
            for prompt in (PROMPT, PROMPT, [*PROMPT[: 2 * BLOCK], *[200] * BLOCK]):
                body = {**COMPLETION, "prompt": prompt}
                usage = (await post(http, "/v1/completions", body))["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), NUM_TOKENS)
                found.append(usage["prompt_tokens_details"]["cached_tokens"])
            *_, last = await streamed(http, "/v1/completions", {**COMPLETION, "prompt": PROMPT})
            found.append(last["usage"]["prompt_tokens_details"]["cached_tokens"])
            return found

    assert asyncio.run(scenario()) == [0, 4 * BLOCK, 2 * BLOCK, 4 * BLOCK]


def test_every_token_has_its_logprob_the_first_one_too_and_the_same_as_from_one_worker(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    chat = {**COMPLETION, "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2}

    async def scenario(num_prefill: int) -> tuple[list[float], list[float], list[float]]:
        async with (
            local_cluster(model_dir, num_prefill, 1, block_tokens=BLOCK) as cluster,
            httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60) as http,
        ):
            completed = await post(http, "/v1/completions", {**COMPLETION, "prompt": PROMPT, "logprobs": 2})
            chatted = await post(http, "/v1/chat/completions", chat)
            events = await streamed(http, "/v1/chat/completions", chat)
        pieces = [event["choices"][0].get("logprobs") for event in events if event["choices"]]
        tokens = [token for piece in pieces if piece for token in piece["content"]]
        whole = chatted["choices"][0]["logprobs"]["content"]
        assert [token["token"] for token in tokens] == [token["token"] for token in whole]
        assert all(len(token["top_logprobs"]) == 2 for token in (*tokens, *whole))
        return (
            completed["choices"][0]["logprobs"]["token_logprobs"],
            [token["logprob"] for token in whole],
            [token["logprob"] for token in tokens],
        )

    apart, together = asyncio.run(scenario(1)), asyncio.run(scenario(0))

    for one, other in zip(apart, together, strict=True):
        assert len(one) == NUM_TOKENS
        assert one == pytest.approx(other, abs=1e-4)
