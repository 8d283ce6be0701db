"""Both faces are encrypted when there is a certificate, ask for one when they should, and serve as ever behind it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.v1 import inference_pb2_grpc
from cluster.client import Client
from cluster.gateway.server import GatewayServer
from common import peers
from common.config_doors import GatewayConfig, TlsConfig
from common.errors import WorkerLostError
from common.rpc import open_channel
from tests.certificates import Authority, Certified, serial_shown
from tests.cluster.fake_cluster import HOST, LIMIT_S, fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import request_bytes

ASKED = request("hello", max_tokens=2)


@asynccontextmanager
async def encrypted_gateway(model_dir: Path, tls: TlsConfig) -> AsyncIterator[GatewayServer]:
    async with fake_cluster(model_dir) as cluster:
        config = GatewayConfig(host=HOST, grpc_port=0, http_port=0, tls=tls)
        gateway = await GatewayServer.start(config, model_dir, "fake", cluster.router.address)
        try:
            yield gateway
        finally:
            await gateway.stop()


async def tokens_over_grpc(gateway: GatewayServer, credentials: grpc.ChannelCredentials) -> int:
    async with grpc.aio.secure_channel(gateway.grpc_address, credentials) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ASKED, timeout=LIMIT_S)
        return sum([len(response.token_ids) async for response in call])


def test_clients_that_trust_the_authority_are_served_on_both_faces(model_dir: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    def ask_with_our_client(gateway: GatewayServer) -> str:
        with Client(gateway.grpc_address, ca=authority.file.read_bytes()) as client:
            return "".join(response.text for response in client.generate(ASKED, LIMIT_S))

    async def scenario() -> None:
        tls = authority.config(authority.certify(), is_mutual=False)
        async with encrypted_gateway(model_dir, tls) as gateway:
            assert await tokens_over_grpc(gateway, grpc.ssl_channel_credentials(authority.file.read_bytes())) == 2
            assert await asyncio.to_thread(ask_with_our_client, gateway)
            context = ssl.create_default_context(cafile=authority.file)
            async with openai.AsyncOpenAI(
                base_url=f"https://{gateway.http_address}/v1",
                api_key="any",
                http_client=openai.DefaultAsyncHttpxClient(verify=context),
            ) as client:
                whole = await client.completions.create(model="fake", prompt="hello", max_tokens=2)
                stream = await client.completions.create(model="fake", prompt="hello", max_tokens=2, stream=True)
                text = "".join([event.choices[0].text async for event in stream if event.choices])
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 2
            assert text == whole.choices[0].text

    run(scenario())


def test_who_does_not_encrypt_or_does_not_trust_is_told_so(model_dir: Path, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")

    def ask(address: str, ca: bytes | None) -> None:
        with Client(address, ca=ca) as client:
            list(client.generate(ASKED, LIMIT_S))

    async def scenario() -> None:
        tls = authority.config(authority.certify(), is_mutual=False)
        async with encrypted_gateway(model_dir, tls) as gateway:
            with pytest.raises(WorkerLostError, match="not by an authority of --ca"):
                await asyncio.to_thread(ask, gateway.grpc_address, other.file.read_bytes())
            with pytest.raises(WorkerLostError, match="if it encrypts, it needs --ca"):
                await asyncio.to_thread(ask, gateway.grpc_address, None)
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"http://{gateway.http_address}/health")
            assert gateway.probe_address is not None
            async with open_channel(gateway.probe_address) as channel:  # who watches the process needs no certificate
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)

    run(scenario())


def test_new_connections_to_both_faces_see_a_certificate_that_was_replaced_and_open_ones_go_on(
    model_dir: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first = authority.certify()

    async def scenario() -> None:
        async with encrypted_gateway(model_dir, authority.config(first, is_mutual=False)) as gateway:
            ports = [int(address.rpartition(":")[2]) for address in (gateway.grpc_address, gateway.http_address)]
            trusted = grpc.ssl_channel_credentials(authority.file.read_bytes())
            context = ssl.create_default_context(cafile=authority.file)
            async with (
                grpc.aio.secure_channel(gateway.grpc_address, trusted) as channel,
                httpx.AsyncClient(verify=context, base_url=f"https://{gateway.http_address}") as client,
            ):
                health = health_pb2_grpc.HealthStub(channel)
                await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
                assert (await client.get("/health")).status_code == 200
                assert [await serial_shown(port) for port in ports] == [first.serial] * 2

                second = authority.certify()  # in the same files

                assert [await serial_shown(port) for port in ports] == [second.serial] * 2
                await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
                assert (await client.get("/health")).status_code == 200
            assert await tokens_over_grpc(gateway, trusted) == 2

    run(scenario())


def test_with_an_authority_for_clients_only_those_with_a_certificate_are_served(
    model_dir: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    mine = authority.certify("client")
    trusted = authority.file.read_bytes()

    async def status_of_health(gateway: GatewayServer, shown: Certified | None) -> int:
        context = ssl.create_default_context(cafile=authority.file)
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        async with httpx.AsyncClient(verify=context) as client:
            return (await client.get(f"https://{gateway.http_address}/health")).status_code

    async def scenario() -> None:
        async with encrypted_gateway(model_dir, authority.config(authority.certify())) as gateway:
            shown = grpc.ssl_channel_credentials(trusted, mine.key.read_bytes(), mine.cert.read_bytes())
            assert await tokens_over_grpc(gateway, shown) == 2
            assert await status_of_health(gateway, mine) == 200
            with pytest.raises(grpc.aio.AioRpcError):
                await tokens_over_grpc(gateway, grpc.ssl_channel_credentials(trusted))
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await status_of_health(gateway, None)

    run(scenario())


@pytest.mark.parametrize("leaves", ["with a goodbye", "without a word"])
def test_a_client_that_leaves_an_encrypted_stream_frees_everything(
    model_dir: Path, tmp_path: Path, leaves: str
) -> None:
    authority = Authority(tmp_path)
    tls = authority.config(authority.certify(), is_mutual=False)

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.01
            config = GatewayConfig(host=HOST, grpc_port=0, http_port=0, tls=tls)
            gateway = await GatewayServer.start(config, model_dir, "fake", cluster.router.address)
            port = int(gateway.http_address.rpartition(":")[2])
            trusted = ssl.create_default_context(cafile=authority.file)
            reader, writer = await asyncio.open_connection(HOST, port, ssl=trusted)
            asked = {"prompt": "hello", "stream": True, "max_tokens": 400, "ignore_eos": True}
            writer.write(request_bytes("/v1/completions", asked))
            async with asyncio.timeout(LIMIT_S):
                await reader.readuntil(b"data: ")
            assert worker.num_running == 1

            if leaves == "without a word":
                writer.transport.abort()
            writer.close()

            await until(lambda: worker.num_running == 0, "still running")
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            await gateway.stop()

    run(scenario())


def test_a_cluster_whose_processes_have_certificates_serves_as_ever(model_dir: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    peers.set_up(peers.Peers("s" * 32, authority.config(authority.certify()), "baton.internal"))

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            assert len((await cluster.ask(ASKED)).token_ids) == 2
            authority.certify()  # in the same files
            await cluster.restart_router()
            assert len((await cluster.ask(ASKED)).token_ids) == 2

    try:
        run(scenario())
    finally:
        peers.set_up(peers.Peers())
