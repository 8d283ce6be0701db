"""Between two hosts whose network is slow and loses packets, every byte arrives all the same."""

import asyncio

import pytest

from loadtest.bench.network import LinkShape, TwoHosts, why_no_hosts
from tests.kvtransfer.peer_process import peer

pytestmark = pytest.mark.slow

NUM_BLOCKS = 4
ONLY_TCP = ["env", "UCX_TLS=tcp,self"]
"""UCX's shared memory would see through network namespaces."""


@pytest.mark.parametrize("transport", ["ucx", "tcp", "tcp lossless"])
def test_bytes_arrive_over_a_link_with_delay_that_loses_packets(transport: str) -> None:
    if reason := why_no_hosts():
        pytest.skip(reason)

    async def test(hosts: TwoHosts) -> None:
        commands = [[*hosts.prefix(number), *ONLY_TCP] for number in range(2)]
        async with (
            asyncio.timeout(120),
            peer(transport, hosts.addresses[0], commands[0]) as sender,
            peer(transport, hosts.addresses[1], commands[1]) as receiver,
        ):
            ticket = await receiver.ask(f"grant {NUM_BLOCKS}")

            assert await sender.ask(f"push {ticket}") == "announced"
            assert int(await sender.ask("finish")) > 0
            assert await receiver.ask(f"landed {NUM_BLOCKS}") == "True"

    with TwoHosts(LinkShape(delay_ms=5, loss=0.005)) as hosts:
        asyncio.run(test(hosts))
