"""A certificate is read again when its files change, on both kinds of servers, and a bad file changes nothing."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import peers
from common.config_doors import SecurityConfig, TlsConfig
from common.config_file import load
from common.errors import ConfigError
from common.rpc import Health, bind, make_server, open_channel
from common.tls import CurrentContext, TlsFiles
from tests.certificates import Authority, serial_shown

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    peers.set_up(peers.Peers())


async def is_served(channel: grpc.aio.Channel) -> bool:
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNAVAILABLE
    return True


async def serving() -> tuple[Any, str]:
    server = make_server()
    health = Health(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True, [""])
    return server, address


def test_new_connections_of_both_kinds_show_the_newest_certificate(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority(tmp_path)
        first = authority.certify()
        files = TlsFiles(authority.config(first, is_mutual=False))
        plain = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", ssl=CurrentContext.of(files))
        peers.set_up(peers.Peers(tls=authority.config(first), tls_name="baton.internal"))
        server, address = await serving()
        ports = plain.sockets[0].getsockname()[1], int(address.rpartition(":")[2])
        async with open_channel(address) as old:
            assert await is_served(old)
            assert [await serial_shown(port) for port in ports] == [first.serial] * 2

            second = authority.certify()  # in the same files
            assert [await serial_shown(port) for port in ports] == [second.serial] * 2
            assert await is_served(old)
            async with open_channel(address) as new:
                assert await is_served(new)
        plain.close()
        await plain.wait_closed()
        await server.stop(None)

    asyncio.run(scenario())


def test_a_file_that_goes_bad_leaves_the_certificate_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    first = authority.certify()
    files = TlsFiles(authority.config(first))
    before = files.pem()

    with caplog.at_level(logging.ERROR):
        first.cert.write_bytes(b"half a certi")
        assert files.pem() == before
        assert files.pem() == before
        first.key.unlink()
        assert files.pem() == before
    authority.certify()

    assert files.pem() != before
    assert len(caplog.records) == 2


@pytest.mark.parametrize("stranger", ["no certificate", "another authority", "no encryption"])
def test_a_stranger_gets_no_connection_to_a_cluster_with_certificates(tmp_path: Path, stranger: str) -> None:
    async def scenario() -> None:
        authority, other = Authority(tmp_path), Authority(tmp_path, "other")
        peers.set_up(peers.Peers(tls=authority.config(authority.certify()), tls_name="baton.internal"))
        server, address = await serving()
        match stranger:
            case "no certificate":
                trusting = grpc.ssl_channel_credentials(authority.file.read_bytes())
                channel = grpc.aio.secure_channel(address, trusting)
            case "another authority":
                peers.set_up(peers.Peers(tls=other.config(other.certify("theirs")), tls_name="baton.internal"))
                channel = open_channel(address)
            case _:
                channel = grpc.aio.insecure_channel(address)
        async with channel:
            assert not await is_served(channel)
        await server.stop(None)

    asyncio.run(scenario())


def test_a_peers_name_must_be_the_clusters(tmp_path: Path) -> None:
    async def scenario() -> None:
        authority = Authority(tmp_path)
        tls = authority.config(authority.certify())
        peers.set_up(peers.Peers(tls=tls, tls_name="baton.internal"))
        server, address = await serving()
        peers.set_up(peers.Peers(tls=tls, tls_name="another.cluster"))
        async with open_channel(address) as channel:
            assert not await is_served(channel)
        await server.stop(None)

    asyncio.run(scenario())


def test_settings_that_cannot_work_are_one_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.certify("one"), authority.certify("two")

    with pytest.raises(ConfigError, match="cannot use the certificate"):
        TlsFiles(TlsConfig(cert_file=one.cert, key_file=two.key))
    with pytest.raises(ConfigError, match="cannot use the certificate"):
        TlsFiles(TlsConfig(cert_file=tmp_path / "none", key_file=one.key))
    with pytest.raises(ConfigError, match="ca_file is missing"):
        load(None, [f"security.tls={{cert_file: {one.cert}, key_file: {one.key}}}"])
    tls = SecurityConfig(tls=authority.config(one))
    assert peers.load(tls).tls == authority.config(one)
