"""No tenant learns of another's prompt from what it is told about its own, and no prompt is written down anywhere."""

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_pb.v1 import common_pb2, inference_pb2, worker_pb2
from cluster.tenants import key_file
from common.errors import BatonError
from common.text import Text
from engine.tiny import make_tiny_model
from tests.integration.asking import QUIET_WITHIN_S, Answer, Asker, greedy, request
from tests.integration.local_cluster import MODEL_ID, LocalCluster, local_cluster

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


async def _work(cluster: LocalCluster) -> Counter[str]:
    """Return all that the workers have done until now, in tokens, steps, blocks and bytes. Seconds are not among it.

    They are asked themselves, when they have nothing to do: what they report arrives later.
    """
    async with asyncio.timeout(QUIET_WITHIN_S):
        while any(load.blocks_used or load.transfers or load.running_sequences for load in _loads(cluster).values()):
            await asyncio.sleep(0.01)
    done: Counter[str] = Counter()
    for worker_id, load in _loads(cluster).items():
        counts = {field.name: getattr(load.steps, field.name) for field in load.steps.DESCRIPTOR.fields}
        del counts["seconds"]
        counts |= load.counters
        for stats in load.transfer_stats:
            counts[f"bytes with {stats.peer_worker_id}"] = stats.bytes  # in how many pieces is a matter of chance
        done.update({f"{worker_id}: {name}": round(value) for name, value in counts.items()})
    return done


def _loads(cluster: LocalCluster) -> dict[str, worker_pb2.LoadReport]:
    services = [worker.service for worker in (*cluster.prefill, *cluster.decode)]
    return {service.handshake().worker_id: service.load() for service in services}


class _World:
    """A cluster with small pools, in which tenant a has sent a prompt and others have pushed it out of the pools."""

    def __init__(self, folder: Path, num_prefill: int, tier: str) -> None:
        self._path = folder / "keys.yaml"
        self._admin = key_file.add_key(self._path, "ops", "admin", {}).key
        self._keys = {tenant: key_file.add_key(self._path, tenant, "user", {}).key for tenant in "abc"}
        self._tiers = {tier: 1, "disk_tier_dir": folder / "blocks", "tier_codec": "raw"}
        self._num_prefill = num_prefill

    async def seen_by(self, tenant: str, model_dir: Path, prompt_of_a: list[int]) -> tuple[object, Counter[str]]:
        """Return what a tenant is told about PROMPT, and the work done for it."""
        async with (
            local_cluster(
                model_dir,
                self._num_prefill,
                1,
                block_tokens=BLOCK,
                pool_blocks=20,
                tiers=self._tiers,
                keys_file=self._path,
            ) as cluster,
            AsyncExitStack() as stack,
        ):
            admin = await stack.enter_async_context(Asker(cluster.address, self._admin))
            askers = {
                name: await stack.enter_async_context(Asker(cluster.address, key)) for name, key in self._keys.items()
            }
            await askers["a"].ask(request(prompt_of_a, greedy(4)))
            for number in range(8):
                await askers["c"].ask(request([100 + number, *PROMPT], greedy(4)))
            await admin.quiet_status()  # the router knows what is cached
            before = await _work(cluster)
            told = _told(await askers[tenant].ask(request(PROMPT, greedy(4))))
            return told, await _work(cluster) - before


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 0], ids=["disaggregated", "colocated"])
@pytest.mark.parametrize("tier", ["host_tier_mib", "disk_tier_mib"])
def test_the_work_done_for_a_prompt_does_not_tell_whether_another_tenant_has_sent_it(
    tmp_path: Path, num_prefill: int, tier: str
) -> None:
    """Time is work divided by speed, so this is what another's timing can reveal: no token, step or byte differs."""
    model_dir = make_tiny_model(tmp_path / "llama", "llama")
    other = [token + 1 for token in PROMPT]

    def seen(name: str, tenant: str, prompt_of_a: list[int]) -> tuple[object, Counter[str]]:
        folder = tmp_path / name
        folder.mkdir()
        return asyncio.run(_World(folder, num_prefill, tier).seen_by(tenant, model_dir, prompt_of_a))

    assert seen("same", "b", PROMPT) == seen("other", "b", other)
    told, work = seen("own", "a", PROMPT)  # who sent it finds it again: the worlds do keep it, and it can be seen
    assert told[0] == FULL  # type: ignore[index]
    assert any("tier_blocks_restored_total" in name for name in work)


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
