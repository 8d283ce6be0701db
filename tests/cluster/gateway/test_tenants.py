"""Both faces serve whoever shows a key, as its tenant's rules say, and nobody else; tenants do not see each other."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.kserve import inference_pb2_grpc as kserve_pb2_grpc
from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.permissions import for_caller
from cluster.gateway.request import Request, TextPrompt
from cluster.service_level import level_from_pb, priority_to_pb
from cluster.tenants import key_file
from cluster.tenants.callers import Caller
from cluster.tenants.key_file import TenantRules
from common.chain_hash import chain_hashes
from common.config_doors import GatewayConfig
from common.config_file import load
from common.errors import (
    BatonError,
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, bearer, fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import Response, get, post

BODY = {"prompt": "hello", "max_tokens": 2}


class Keys:
    """A key file with an administrator."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.admin = key_file.add_key(self.path, "ops", "admin", {}).key

    def new(self, tenant: str, **rules: Any) -> str:
        return key_file.add_key(self.path, tenant, "user", rules).key

    @property
    def settings(self) -> dict[str, Any]:
        return {"keys_file": self.path, "admin_key": self.admin}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


async def ask_http(cluster: FakeCluster, key: str, **body: Any) -> Response:
    return await post(cluster, "/v1/completions", {**BODY, **body}, authorization=f"Bearer {key}")


def test_without_a_key_only_health_and_documents_are_served(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            for shown in ("", "nonsense", keys.admin[:-1] + "x"):
                with pytest.raises(UnauthenticatedError, match="API key"):
                    await cluster.ask(request("hello"), key=shown)
                answer = await ask_http(cluster, shown)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert answer.error["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "bearer"
            for path in ("/v1/models", "/v1/models/fake", "/metrics", "/load"):
                assert (await get(cluster, path)).status == 401
            for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
                assert (await post(cluster, path, {})).status == 401
            for path in (
                "/health",
                "/ping",
                "/ready",
                "/version",
                "/is_sleeping",
                "/docs",
                "/openapi.json",
                "/",
                "/health/",
            ):
                assert (await get(cluster, path)).status == 200
            check = health_pb2.HealthCheckRequest()
            assert (await health_pb2_grpc.HealthStub(cluster.channel).Check(check, timeout=LIMIT_S)).status
            assert not any(worker.started for worker in cluster.workers.values())

    run(scenario())


def test_a_key_opens_both_faces_and_its_tenant_is_told_to_the_router(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        key = keys.new("acme")
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            assert len((await cluster.ask(request("hello", max_tokens=2), key=key)).token_ids) == 2
            assert (await ask_http(cluster, key)).status == 200
            with typed_rpc_errors():
                models = await cluster.stub.ListModels(
                    inference_pb2.ListModelsRequest(), timeout=LIMIT_S, metadata=bearer(key)
                )
            assert [model.id for model in models.models] == ["fake"]

    run(scenario())


def test_the_clusters_state_is_for_administrators(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        key = keys.new("acme")
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            admin, cluster.metadata = cluster.metadata, bearer(key)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await cluster.status()
            cluster.metadata = admin
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
            async with asyncio.timeout(LIMIT_S):
                refused = await get(cluster, "/metrics", authorization=f"Bearer {key}")
                shown = await get(cluster, "/metrics", authorization=f"Bearer {keys.admin}")
            assert (refused.status, refused.error["type"]) == (403, "permission_error")
            assert shown.status == 200

    run(scenario())


RULES = [
    pytest.param({"models": ["other"]}, {}, PermissionDeniedError, 403, "may not use model 'fake'", id="model"),
    pytest.param({"prompt_tokens_max": 2}, {}, InvalidRequestError, 400, "send at most 2", id="prompt"),
    pytest.param({"output_tokens_max": 1}, {}, InvalidRequestError, 400, "max_tokens must be at most 1", id="output"),
    pytest.param({"requests_per_s": 0.001}, {}, OverloadedError, 429, "0.001 calls a second", id="rate"),
    pytest.param({"tokens_per_min": 8}, {}, OverloadedError, 429, "8 tokens a minute", id="tokens"),
    pytest.param({"concurrent_max": 1}, {"n": 2}, OverloadedError, 429, "1 request at once", id="concurrent"),
]


@pytest.mark.parametrize(("rules", "more", "error", "status", "words"), RULES)
def test_a_tenants_rules_hold_on_both_faces_with_the_words_and_codes_that_clients_know(
    model_dir: Path,
    keys: Keys,
    rules: dict[str, Any],
    more: dict[str, Any],
    error: type[BatonError],
    status: int,
    words: str,
) -> None:
    async def scenario() -> None:
        free, bound = keys.new("free"), keys.new("bound", **rules)
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            asked = request("hello hello", max_tokens=4)
            asked.n = more.get("n", 1)
            refusals = await asyncio.gather(*(cluster.ask(asked, key=bound) for _ in range(3)), return_exceptions=True)
            refusal = next(one for one in refusals if isinstance(one, error))
            assert words in refusal.message
            answers = [await ask_http(cluster, bound, prompt="hello hello", max_tokens=4, **more) for _ in range(3)]
            assert status in {answer.status for answer in answers}
            refused = next(answer for answer in answers if answer.status == status)
            assert words in refused.error["message"]
            if status == 429:
                assert refusal.retry_after_s > 0
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.error["type"] == "rate_limit_error"
            assert (await ask_http(cluster, free)).status == 200  # nobody else feels it
            page = (await get(cluster, "/metrics", authorization=f"Bearer {keys.admin}")).body.decode()
            if status == 429:
                assert f'baton_tenant_refusals_total{{tenant="bound",rule="{next(iter(rules))}"}}' in page
            assert 'baton_tenant_output_tokens_total{tenant="free"} 2' in page

    run(scenario())


def test_requests_that_wait_are_bounded_for_each_tenant(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        key = keys.new("acme", queued_max=1)
        async with fake_cluster(model_dir, router_wait_s=LIMIT_S, **keys.settings) as cluster:
            await cluster.ask(request("hello", max_tokens=1), key=key)
            await cluster.router.stop()  # placements wait from now on
            first = asyncio.create_task(cluster.ask(request("hello", max_tokens=1), key=key))
            async with asyncio.timeout(LIMIT_S):
                while (await cluster.status()).gateway.queued_requests != 1:  # noqa: ASYNC110 - seen from outside
                    await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError, match="1 requests that wait"):
                await cluster.ask(request("hello", max_tokens=1), key=key)
            await cluster.restart_router()
            assert len((await first).token_ids) == 1

    run(scenario())


def test_a_message_of_a_stranger_is_not_even_taken_in(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, message_bytes_max=10_000, **keys.settings) as cluster:
            with pytest.raises(UnauthenticatedError):  # not the error about its size
                await cluster.ask(request("x" * 100_000), key="bk-nobody")
            with pytest.raises(OverloadedError, match="10000"):
                await cluster.ask(request("x" * 100_000), key=keys.admin)

    run(scenario())


def test_each_request_of_a_long_call_is_held_to_the_rules_of_now(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        key, removed = keys.new("acme", requests_per_s=3), keys.new("other")
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            tensor = kserve_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(b"hello")
            asked = kserve_pb2.ModelInferRequest(model_name="fake", inputs=[tensor])
            stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)
            call = stub.ModelStreamInfer(timeout=LIMIT_S, metadata=bearer(key))
            for _ in range(6):
                await call.write(asked)
            await call.done_writing()
            answers = [answer async for answer in call]
            refused = [answer.error_message for answer in answers if answer.error_message]
            assert refused
            assert all("3 calls a second" in message for message in refused)
            assert len(refused) <= 3

            call = stub.ModelStreamInfer(timeout=LIMIT_S, metadata=bearer(removed))
            await call.write(asked)
            assert not (await call.read()).error_message
            key_file.remove_key(keys.path, key_file.key_id(removed) or "")
            async with asyncio.timeout(LIMIT_S):
                while True:
                    await call.write(asked)
                    if message := (await call.read()).error_message:
                        break
                    await asyncio.sleep(0.05)  # keys are looked at once a second
            assert "not known here any more" in message
            await call.done_writing()
            assert (await call.code()) is grpc.StatusCode.OK  # the call goes on; only its requests are refused

    run(scenario())


@pytest.mark.parametrize("stage", ["no router", "prefill", "decode"])
@pytest.mark.parametrize("ending", ["leaves", "deadline"])
def test_a_request_that_ends_early_frees_its_tenants_place_wherever_it_is(
    model_dir: Path, keys: Keys, stage: str, ending: str
) -> None:
    async def scenario() -> None:
        key = keys.new("acme", concurrent_max=1, queued_max=1)
        async with fake_cluster(model_dir, router_wait_s=LIMIT_S, **keys.settings) as cluster:
            await cluster.ask(request("hello", max_tokens=1), key=key)
            stuck = cluster.worker("p0" if stage == "prefill" else "d0")
            stuck.may_step.clear()
            if stage == "no router":
                await cluster.router.stop()
            call = cluster.call(request("hello"), 0.3 if ending == "deadline" else LIMIT_S, key)
            reading = asyncio.create_task(call.read())
            if ending == "leaves":
                async with asyncio.timeout(LIMIT_S):
                    while (await cluster.status()).gateway.running_requests != 1:  # noqa: ASYNC110 - seen from outside
                        await asyncio.sleep(0.01)
                call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            async with asyncio.timeout(LIMIT_S):
                while (await cluster.status()).gateway.running_requests:  # noqa: ASYNC110 - seen from outside
                    await asyncio.sleep(0.01)
            if stage == "no router":
                await cluster.restart_router()
                await cluster.all_ready()
            stuck.may_step.set()
            assert len((await cluster.ask(request("hello", max_tokens=1), key=key)).token_ids) == 1

    run(scenario())


def test_an_answer_without_a_length_ends_where_the_tenants_may(model_dir: Path, keys: Keys) -> None:
    async def scenario() -> None:
        key = keys.new("acme", output_tokens_max=3)
        async with fake_cluster(model_dir, **keys.settings) as cluster:
            answer = await cluster.ask(request("hello", ignore_eos=True), key=key)
            assert len(answer.token_ids) == 3
            assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH

    run(scenario())


def test_prefixes_are_named_with_the_tenants_salt_from_router_to_worker(model_dir: Path, keys: Keys) -> None:
    """What one tenant's prompt leaves in caches and in the router's index, no other tenant can name."""

    async def scenario() -> None:
        one, two, shared = keys.new("one"), keys.new("two"), keys.new("three", cache="shared")
        prompt = list(range(5, 69))
        async with fake_cluster(model_dir, num_prefill=0, num_decode=0, num_both=2, **keys.settings) as cluster:

            async def salt_of(key: str) -> bytes:
                before = {name: len(worker.started) for name, worker in cluster.workers.items()}
                await cluster.ask(request("hello", max_tokens=1), key=key)
                (started,) = (
                    worker.started[-1] for name, worker in cluster.workers.items() if len(worker.started) > before[name]
                )
                return started.cache_salt

            salts = {name: await salt_of(key) for name, key in (("one", one), ("two", two), ("three", shared))}
            assert salts["three"] == b""
            assert len(set(salts.values())) == 3

            # A worker that holds tenant one's prompt draws tenant one's next request, and not tenant two's.
            block_tokens = cluster.worker("b0").model.block_tokens
            for name, salt in salts.items():
                if name != "two":
                    cluster.worker("b1").store(*chain_hashes(prompt, block_tokens, salt))
            held = 2 * (len(prompt) // block_tokens)
            await until(lambda: cluster.router.status().indexed_blocks == held, "not indexed")
            hits = {}
            for name, key in (("one", one), ("two", two), ("three", shared)):
                answer = await cluster.ask(request(prompt, max_tokens=1), key=key)
                hits[name] = answer.finished.placement.reason
            assert hits["one"] == hits["three"] == "prefix: b1 holds 16 of 16 blocks"
            assert hits["two"].endswith("holds 0 of 16 blocks")

    run(scenario())


@pytest.mark.parametrize(
    ("rule", "asked", "told"),
    [
        pytest.param("normal", common_pb2.PRIORITY_HIGH, common_pb2.PRIORITY_NORMAL, id="not above"),
        pytest.param("high", common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_LOW, id="below"),
        pytest.param("high", common_pb2.PRIORITY_UNSPECIFIED, common_pb2.PRIORITY_HIGH, id="its own"),
        pytest.param("low", common_pb2.PRIORITY_UNSPECIFIED, common_pb2.PRIORITY_LOW, id="its own, low"),
    ],
)
def test_a_tenants_class_is_the_best_and_the_usual_one(rule: str, asked: Any, told: Any) -> None:
    message = inference_pb2.GenerateRequest(priority=asked)
    made = Request("r", TextPrompt("x"), common_pb2.SamplingParams(), (), level=level_from_pb(message))
    caller = Caller("acme", "0" * 12, False, TenantRules.model_validate({"cache": "shared", "priority": rule}))

    found = for_caller(made, caller, names_class=asked != common_pb2.PRIORITY_UNSPECIFIED)

    assert (found.tenant, priority_to_pb(found.level.priority)) == ("acme", told)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "10.1.2.3", "gateway.example"])
def test_without_keys_only_this_machine_is_served_unless_the_configuration_says_otherwise(
    host: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no key would be asked for"):
        load(None, [f"gateway.host={host}"])

    assert load(None, [f"gateway.host={host}", "gateway.allow_anonymous=true"]).gateway.allow_anonymous
    assert load(None, [f"gateway.host={host}", f"gateway.keys_file={tmp_path}"]).gateway.keys_file == tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert GatewayConfig(host=host).host == host
