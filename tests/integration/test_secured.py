"""Two gateways of a cluster with API keys, encrypted towards clients and inside: who may is served, nobody else is."""

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
import httpx
import openai
import pytest

from baton_pb.v1 import inference_pb2, router_pb2, router_pb2_grpc
from cluster.asking import Retries, completion_request
from cluster.async_client import AsyncClient
from cluster.client import Client
from cluster.tenants import key_file
from cluster.testing import RunningCluster
from common.errors import PermissionDeniedError, UnauthenticatedError, WorkerLostError
from tests.certificates import Authority, Certified
from tests.integration.asking import Asker

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
PROMPT = "Once upon a time"
TENANT = "acme"
PEERS_NAME = "baton.internal"
LOST_TOKENS, KEPT_TOKENS = 1500, 150
AGAIN = Retries(attempts=60, most_s=1.0)


class Secured(NamedTuple):
    """The cluster, and what its users were given."""

    cluster: RunningCluster
    authority: Authority
    peer: Certified
    keys: Path
    user: str
    admin: str

    @property
    def ca(self) -> bytes:
        """What clients trust."""
        return self.authority.file.read_bytes()

    @property
    def gateways(self) -> list[str]:
        """Their gRPC addresses."""
        return [str(gateway["grpc"]) for gateway in self.cluster.addresses["gateways"]]

    @property
    def url(self) -> str:
        """Of the first gateway's HTTP API."""
        return f"https://{self.cluster.addresses['http']}"


@pytest.fixture(scope="module")
def secured(demo_model_dir: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Two gateways over the demo model, slow enough (fp32) to be killed in the middle of a stream."""
    folder = tmp_path_factory.mktemp("secured")
    authority, keys = Authority(folder), folder / "keys.yaml"
    served, peer = authority.certify("gateway"), authority.certify("peer")
    user = key_file.add_key(keys, TENANT, "user", {}).key
    admin = key_file.add_key(keys, "ops", "admin", {}).key
    with RunningCluster(
        *("engine.backend=reference", "engine.weights=fp32", "gateway.count=2", f"gateway.keys_file={keys}"),
        *(f"gateway.tls.cert_file={served.cert}", f"gateway.tls.key_file={served.key}"),
        *(f"security.tls.cert_file={peer.cert}", f"security.tls.key_file={peer.key}"),
        *(f"security.tls.ca_file={authority.file}", f"security.tls_name={PEERS_NAME}"),
    ) as cluster:
        yield Secured(cluster, authority, peer, keys, user, admin)


def asked(num_tokens: int) -> inference_pb2.GenerateRequest:
    return completion_request(PROMPT, {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True})


def test_both_faces_serve_a_tenants_key_alike_and_count_it(secured: Secured) -> None:
    with Client(secured.gateways[0], secured.user, secured.ca) as client:
        over_grpc = client.ask(asked(8), LIMIT_S)
    trusted = ssl.create_default_context(cafile=secured.authority.file)
    with openai.OpenAI(
        base_url=f"{secured.url}/v1", api_key=secured.user, http_client=openai.DefaultHttpxClient(verify=trusted)
    ) as user:
        model = user.models.list().data[0].id
        more = {"ignore_eos": True}
        whole = user.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=more)
        stream = user.completions.create(
            model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=more, stream=True
        )
        streamed = "".join(event.choices[0].text for event in stream if event.choices)
    with httpx.Client(verify=trusted, headers={"authorization": f"Bearer {secured.admin}"}) as operator:
        metrics = operator.get(f"{secured.url}/metrics").text

    assert over_grpc.text == whole.choices[0].text == streamed
    assert over_grpc.finished.placement.prefill_worker_id == "prefill-0"
    counted = [line for line in metrics.splitlines() if line.startswith("baton_tenant_output_tokens_total")]
    assert any(f'tenant="{TENANT}"' in line and float(line.split()[-1]) >= 24 for line in counted), counted


def test_who_shows_no_key_or_does_not_encrypt_is_refused_on_both_faces(secured: Secured) -> None:
    trusted = ssl.create_default_context(cafile=secured.authority.file)
    address = secured.gateways[0]
    for key in (None, secured.user.swapcase()):
        with Client(address, key, secured.ca) as client, pytest.raises(UnauthenticatedError):
            client.ask(asked(2), LIMIT_S)
    with Client(address, secured.user) as client, pytest.raises(WorkerLostError, match="--ca"):
        client.ask(asked(2), LIMIT_S)
    with Client(address, secured.user, secured.ca) as client, pytest.raises(PermissionDeniedError):
        client.status()
    with httpx.Client(verify=trusted) as client:
        refused = client.post(f"{secured.url}/v1/completions", json={"prompt": PROMPT})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert client.get(f"{secured.url}/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            client.get(secured.url.replace("https", "http") + "/health")
    with httpx.Client() as stranger, pytest.raises(httpx.TransportError):
        stranger.get(f"{secured.url}/health")


def test_the_processes_behind_talk_only_with_whom_has_certificate_and_secret(secured: Secured) -> None:
    address = str(secured.cluster.addresses["router"])
    peer = grpc.ssl_channel_credentials(secured.ca, secured.peer.key.read_bytes(), secured.peer.cert.read_bytes())
    named = [("grpc.ssl_target_name_override", PEERS_NAME)]

    async def code_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
        async with channel:
            try:
                await router_pb2_grpc.RouterStub(channel).GetRouterStatus(
                    router_pb2.GetRouterStatusRequest(), timeout=LIMIT_S
                )
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    async def scenario() -> list[grpc.StatusCode]:
        return [
            await code_of(grpc.aio.insecure_channel(address)),
            await code_of(grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(secured.ca), named)),
            await code_of(grpc.aio.secure_channel(address, peer, named)),
        ]

    found = asyncio.run(scenario())

    assert found == [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED]


def test_the_command_line_reaches_it_with_key_and_authority(secured: Secured, tmp_path: Path) -> None:
    shown = tmp_path / "key"
    shown.write_text(secured.admin)
    known = ("--addr", secured.gateways[1], "--key-file", str(shown), "--ca", str(secured.authority.file))

    def baton(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)

    answer = json.loads(baton("generate", PROMPT, "--max-tokens", "3", "--json", *known).stdout)
    status = json.loads(baton("status", "--json", *known).stdout)

    assert answer["usage"]["output"] <= 3
    assert {worker["state"] for worker in status["workers"]} == {"ready"}
    assert "\x1b" not in secured.cluster.log, "a log that is no terminal's has no colours"


def test_a_killed_gateway_costs_the_streams_it_carries_and_nothing_else(secured: Secured) -> None:
    before = secured.cluster.pids
    first, second = secured.gateways
    both = f"{first},{second}"

    async def read(client: AsyncClient, num_tokens: int, begun: asyncio.Event) -> int:
        received = 0
        async for part in client.generate(asked(num_tokens), 3 * LIMIT_S):
            received += len(part.token_ids)
            begun.set()
        return received

    async def scenario() -> None:
        async with AsyncClient(both, secured.user, secured.ca) as client:
            begun = [asyncio.Event() for _ in range(4)]
            streams = []
            for number, num_tokens in enumerate((LOST_TOKENS, KEPT_TOKENS) * 2):  # to the first and second in turn
                streams.append(asyncio.create_task(read(client, num_tokens, begun[number])))
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*(event.wait() for event in begun))

            secured.cluster.kill("gateway-0")
            for lost in streams[::2]:
                with pytest.raises(WorkerLostError):
                    async with asyncio.timeout(LIMIT_S):
                        await lost
            answers = await asyncio.gather(*(client.ask(asked(4), LIMIT_S) for _ in range(8)))

            assert [len(answer.token_ids) for answer in answers] == [4] * 8
            assert await asyncio.gather(*streams[1::2]) == [KEPT_TOKENS] * 2
        async with AsyncClient(first, secured.user, secured.ca, AGAIN) as returned:
            assert len((await returned.ask(asked(4), 2 * LIMIT_S)).token_ids) == 4
        async with Asker(second, secured.admin, secured.ca) as asker:
            await asker.quiet_status()  # what the lost streams held is free again

    asyncio.run(scenario())

    after = secured.cluster.pids
    assert after.pop("gateway-0") != before.pop("gateway-0")
    assert after == before, "nothing else was restarted"


def test_a_revoked_key_is_refused_without_a_restart(secured: Secured) -> None:
    made = key_file.add_key(secured.keys, TENANT, "user", {})

    def is_known() -> bool:
        with Client(secured.gateways[1], made.key, secured.ca) as client:
            try:
                client.model_id()
            except UnauthenticatedError:
                return False
        return True

    def until_known(expected: bool) -> None:
        deadline = time.monotonic() + LIMIT_S
        while is_known() is not expected:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    until_known(True)
    key_file.remove_key(secured.keys, made.entry.id)
    until_known(False)
