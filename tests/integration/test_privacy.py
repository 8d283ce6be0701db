"""No tenant learns of another's prompt from what it is told about its own, and no prompt is written down anywhere."""

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.tenants import key_file
from common.errors import BatonError
from common.text import Text
from engine.tiny import make_tiny_model
from tests.integration.asking import Answer, Asker, greedy, request
from tests.integration.local_cluster import MODEL_ID, local_cluster

BLOCK = 8
PROMPT = [5 + number % 90 for number in range(6 * BLOCK + 3)]
FULL = 6 * BLOCK
TEXT = "the launch code is swordfish nine"


def _told(answer: Answer) -> tuple[int, str, list[int]]:
    """Return what an answer says that could depend on what others asked."""
    assert answer.finished is not None
    return answer.finished.usage.cached_tokens, answer.finished.placement.reason, answer.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 0], ids=["disaggregated", "colocated"])
def test_a_prompt_is_found_again_by_those_whom_the_rules_name_and_by_nobody_else(
    tmp_path: Path, num_prefill: int
) -> None:
    path = tmp_path / "keys.yaml"
    admin = key_file.add_key(path, "ops", "admin", {}).key

    def new(tenant: str, cache: str) -> str:
        return key_file.add_key(path, tenant, "user", {"cache": cache}).key

    own, same, other = new("a", "tenant"), new("a", "tenant"), new("b", "tenant")
    private, sibling = new("c", "private"), new("c", "private")
    shared, sharer = new("d", "shared"), new("e", "shared")
    model_dir = make_tiny_model(tmp_path / "llama", "llama")

    async def scenario() -> None:
        async with (
            local_cluster(model_dir, num_prefill, 1, block_tokens=BLOCK, pool_blocks=512, keys_file=path) as cluster,
            AsyncExitStack() as stack,
        ):

            async def ask(key: str) -> tuple[int, str, list[int]]:
                asker = await stack.enter_async_context(Asker(cluster.address, key))
                told = _told(await asker.ask(request(PROMPT, greedy(4))))
                await status.quiet_status()  # reports of what is cached have arrived
                return told

            status = await stack.enter_async_context(Asker(cluster.address, admin))
            untouched = await ask(other)  # what b hears when nobody has asked before
            assert untouched[0] == 0
            first, again, sister = await ask(own), await ask(own), await ask(same)
            assert (first[0], again[0], sister[0]) == (0, FULL, FULL)
            assert first == untouched  # a hears nothing of b's prompt
            assert (await ask(private))[0] == 0
            assert (await ask(private))[0] == FULL
            assert (await ask(sibling)) == untouched
            assert (await ask(shared)) == untouched
            assert (await ask(sharer))[0] == FULL
            assert all(token_ids == first[2] for *_, token_ids in (again, sister))

    asyncio.run(scenario())


@pytest.mark.slow
def test_prompts_and_outputs_are_in_no_log_no_metric_and_no_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_tiny_model(tmp_path / "llama", "llama")
    path = tmp_path / "keys.yaml"
    key = key_file.add_key(path, "ops", "admin", {}).key
    secrets: list[str] = []

    async def ask(asker: Asker, message: inference_pb2.GenerateRequest, **more: Any) -> None:
        answer = Answer()
        with suppress(BatonError):
            await asker.ask(message, into=answer, **more)
        secrets.extend([answer.text[:12]] if len(answer.text) >= 12 else [])
        secrets.extend([", ".join(map(str, answer.token_ids[:5]))] if len(answer.token_ids) >= 5 else [])

    async def scenario() -> str:
        async with (
            local_cluster(model_dir, 1, 1, block_tokens=BLOCK, keys_file=path) as cluster,
            Asker(cluster.address, key) as asker,
            httpx.AsyncClient(
                base_url=f"http://{cluster.http_address}", headers={"authorization": f"Bearer {key}"}
            ) as http,
        ):
            text = inference_pb2.GenerateRequest(text=TEXT, sampling=greedy(24))
            chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content=TEXT)])
            await ask(asker, text)
            await ask(asker, inference_pb2.GenerateRequest(chat=chat, sampling=greedy(24)))
            await ask(asker, request(PROMPT, greedy(24)))
            await ask(asker, text, cancel_after_messages=3)
            await ask(asker, text, timeout_s=0.01)
            await ask(
                asker, inference_pb2.GenerateRequest(text=TEXT, sampling=common_pb2.SamplingParams(stop=[TEXT] * 99))
            )
            await ask(asker, inference_pb2.GenerateRequest(text=TEXT, sampling=greedy(100_000)))
            await ask(asker, inference_pb2.GenerateRequest(text=TEXT, model=TEXT, request_id=TEXT))
            for body in ({"prompt": TEXT, "max_tokens": 9}, {"prompt": TEXT, TEXT: 1}, {"prompt": [TEXT, [TEXT]]}):
                await http.post("/v1/completions", json=body)
            await http.post("/v1/completions", content=f'{{"prompt": "{TEXT}"')
            await http.post("/tokenize", json={"prompt": TEXT})
            await http.get(f"/{TEXT}")
            for worker in cluster.decode:
                await worker.stop(0.0)  # requests now fail on their way
            await ask(asker, text, timeout_s=2.0)
            metrics = await http.get("/metrics")
            return metrics.text + str(await asker.status())

    with caplog.at_level(logging.DEBUG):
        shown = asyncio.run(scenario())

    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]  # the client's
    written = shown + "".join(f"{record.getMessage()} {record.__dict__}\n" for record in ours)
    token_ids = Text.load(model_dir).encode(TEXT)
    assert len(secrets) >= 4
    assert MODEL_ID in written
    for secret in ("swordfish", *secrets, ", ".join(map(str, token_ids[:5])), ", ".join(map(str, PROMPT[:5])), key):
        assert secret not in written
