"""Which transport is taken, what happens when peers restart, stall or lie, and that nothing leaks."""

import asyncio
import gc
import random
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from common.errors import MismatchError, TransferError, WorkerLostError
from kvtransfer import native
from kvtransfer.codecs import quantising
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.ticket import make_ticket
from kvtransfer.transports import shm
from tests.kvtransfer.descriptors import num_descriptors

MakePair = Callable[..., AbstractAsyncContextManager[Any]]
ROOT = Path(__file__).parents[2]
BLOCK_BYTES = SMALL_LAYOUT.block_bytes


async def transfer(pair: Any, targets: list[int], sources: list[int]) -> str:
    landing = pair.receiver.grant(targets, 0)
    push = await pair.sender.open_push(landing.ticket)
    push.announce(0, sources)
    await push.finish()
    report = await landing.landed()
    for target, source in zip(targets, sources, strict=True):
        assert pair.target.block(target) == pair.source.block(source)
    return str(report.transport)


@asynccontextmanager
async def auto_pair(**settings: Any) -> AsyncIterator[Any]:
    class Pair:
        source, target = FakeBlockStore(), FakeBlockStore()
        sender: TransferEndpoint
        receiver: TransferEndpoint

    for block in range(16):
        Pair.source.fill(block, block)
    Pair.sender = await TransferEndpoint.start("sender", "127.0.0.1", Pair.source, TransferConfig(**settings))
    Pair.receiver = await TransferEndpoint.start("receiver", "127.0.0.1", Pair.target, TransferConfig())
    try:
        yield Pair
    finally:
        await Pair.sender.close()
        await Pair.receiver.close()


def test_auto_takes_shared_memory_on_one_host() -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            assert await transfer(pair, [1], [2]) == "shm"
            assert [entry.fallbacks for entry in pair.sender.stats()] == [0]

    asyncio.run(test())


def test_auto_takes_ucx_to_another_host() -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            pair.receiver.address.host_id = "elsewhere"

            assert await transfer(pair, [1], [2]) == "ucx"
            assert [entry.fallbacks for entry in pair.sender.stats()] == [0]

    asyncio.run(test())


def test_auto_takes_plain_tcp_to_a_host_without_ucx(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            pair.receiver.address.host_id = "elsewhere"
            pair.receiver.address.ucx_port = 0

            assert await transfer(pair, [1], [2]) == "tcp"
            assert [entry.fallbacks for entry in pair.sender.stats()] == [1]

    asyncio.run(test())
    assert "SLOW PATH: ucx cannot be used there" in caplog.text


WITHOUT_UCX = """
import asyncio, sys
sys.modules["ucxx"] = None  # what an import of a package that is not there comes to
from common.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import FakeBlockStore

async def main():
    stores = FakeBlockStore(), FakeBlockStore()
    stores[0].fill(2, 7)
    ends = [await TransferEndpoint.start(f"end-{i}", "127.0.0.1", s, TransferConfig()) for i, s in enumerate(stores)]
    ends[1].address.host_id = "elsewhere"
    landing = ends[1].grant([1], 0)
    push = await ends[0].open_push(landing.ticket)
    push.announce(0, [2])
    await push.finish()
    print((await landing.landed()).transport, stores[1].block(1) == stores[0].block(2))
    for end in ends:
        await end.close()

asyncio.run(main())
"""


def test_without_ucx_installed_hosts_are_joined_by_plain_tcp() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_UCX], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.stdout.split() == ["tcp", "True"], done.stderr


def test_on_a_new_machine_an_endpoint_compiles_all_that_it_needs_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    native.load.cache_clear()
    quantising.library.cache_clear()

    async def test() -> None:
        config = TransferConfig(transport="tcp", codec="int8")
        endpoint = await TransferEndpoint.start("worker", "127.0.0.1", FakeBlockStore(), config)
        await endpoint.close()

    asyncio.run(test())
    assert {path.name for path in tmp_path.rglob("*.so")} == {"libkvtransfer.so", "libquantise.so"}


def test_an_unreachable_socket_on_the_same_host_is_a_counted_and_logged_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            pair.receiver.address.shm_path = "@baton-in-another-namespace"

            assert await transfer(pair, [1], [2]) == "ucx"
            assert await transfer(pair, [1], [3]) == "ucx"
            assert [entry.fallbacks for entry in pair.sender.stats()] == [1]

    asyncio.run(test())
    assert sum("SLOW PATH" in record.message for record in caplog.records) == 1


def test_a_forced_transport_that_does_not_fit_is_an_error() -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair(transport="shm") as pair:
            pair.receiver.address.host_id = "elsewhere"
            landing = pair.receiver.grant([1], 0)

            with pytest.raises(MismatchError, match="another host"):
                await pair.sender.open_push(landing.ticket)
            await landing.abort("over")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads is 4 here and 2 there"),
        ({"block_tokens": 32}, "block_tokens is 32 here and 4 there"),
        ({"dtype": "bfloat16", "head_dim": 16}, "dtype is 'bfloat16' here and 'float32' there"),
        ({"dtype": "int8"}, "dtype is 'int8' here and 'float32' there"),
        ({"num_layers": 2, "model_id": "m"}, "model_id is 'm' here and 'fake' there; num_layers is 2 here and 3 there"),
    ],
    ids=["heads", "block size", "dtype of equal bytes", "dtype", "model"],
)
def test_another_layout_in_the_peers_pool_is_a_mismatch(
    make_real_pair: MakePair, difference: dict[str, Any], words: str
) -> None:
    """The ticket may say what it likes: the handshake compares the pools themselves."""

    async def test() -> None:
        async with asyncio.timeout(20), make_real_pair() as pair:
            other = SMALL_LAYOUT._replace(**difference)
            config = TransferConfig(transport="auto")
            stranger = await TransferEndpoint.start("stranger", "127.0.0.1", FakeBlockStore(4, other), config)
            ticket = make_ticket(pair.receiver.address, [1], 0, other, lease_s=5.0, checksum=True)

            with pytest.raises(MismatchError, match=words):
                await stranger.open_push(ticket)
            await stranger.close()
            await transfer(pair, [1], [2])

    asyncio.run(test())


def test_a_receiver_that_restarted_is_found_and_its_old_tickets_are_refused(make_real_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_real_pair() as pair:
            await transfer(pair, [1], [2])
            old = pair.receiver.grant([3], 0).ticket
            config = TransferConfig(transport=pair.sender.stats()[0].transport)
            await pair.receiver.close()
            with pytest.raises(WorkerLostError):
                await pair.sender.open_push(old)

            pair.receiver = await TransferEndpoint.start("receiver", "127.0.0.1", pair.target, config)
            try:
                old.receiver.shm_path = pair.receiver.address.shm_path
                old.receiver.ucx_port = pair.receiver.address.ucx_port
                old.receiver.tcp_port = pair.receiver.address.tcp_port
                with pytest.raises(TransferError, match="earlier life"):
                    await pair.sender.open_push(old)
                await transfer(pair, [1], [4])
            finally:
                await pair.receiver.close()

    asyncio.run(test())


def test_a_sender_that_restarted_is_served(make_real_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_real_pair() as pair:
            await transfer(pair, [1], [2])
            config = TransferConfig(transport=pair.sender.stats()[0].transport)
            await pair.sender.close()
            pair.sender = await TransferEndpoint.start("sender", "127.0.0.1", pair.source, config)
            await transfer(pair, [1], [3])
            await pair.sender.close()

    asyncio.run(test())


def test_connecting_and_closing_over_and_over_leaves_no_descriptor(make_real_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(60), make_real_pair() as pair:
            address = pair.receiver.address
            transport = "shm" if address.shm_path else "ucx" if address.ucx_port else "tcp"
            config = TransferConfig.model_validate({"transport": transport})
            gc.collect()  # pools of earlier tests
            counts = []
            for cycle in range(20 if transport == "ucx" else 100):  # UCX takes 100 ms to start and connect
                sender = await TransferEndpoint.start(f"sender-{cycle % 3}", "127.0.0.1", pair.source, config)
                landing = pair.receiver.grant([1], 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, [2])
                await push.finish()
                await landing.landed()
                await sender.close()
                counts.append(num_descriptors())
            assert max(counts[3:]) <= max(counts[:3])

    asyncio.run(test())


def test_a_small_window_slows_but_completes(make_steady_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_steady_pair(inflight_bytes_max=2 * BLOCK_BYTES) as pair:
            landing = pair.receiver.grant(list(range(16)), 0)
            push = await pair.sender.open_push(landing.ticket)
            for block in range(16):
                push.announce(block, [15 - block])
            await push.finish()
            await landing.landed()
            assert all(pair.target.block(block) == pair.source.block(15 - block) for block in range(16))

    asyncio.run(test())


@pytest.mark.parametrize(("settings", "num_pieces"), [({}, 1), ({"checksum_shm": True}, 2)])
def test_what_the_receiver_reads_unhashed_takes_one_announcement(
    make_shm_pair: MakePair, settings: dict[str, bool], num_pieces: int
) -> None:
    """16 MiB; where they are hashed, in pieces of 8 MiB."""

    async def test() -> None:
        layout = SMALL_LAYOUT._replace(num_layers=16, block_tokens=64, num_kv_heads=2, head_dim=64)
        assert layout.block_bytes == 1024 * 1024
        async with asyncio.timeout(60), make_shm_pair(num_blocks=32, layout=layout, **settings) as pair:
            landing = pair.receiver.grant(list(range(16)), 0)
            push = await pair.sender.open_push(landing.ticket)
            push.announce(0, list(range(16, 32)))
            _, report = await asyncio.gather(push.finish(), landing.landed())
            assert [stats.pieces for stats in pair.receiver.stats()] == [num_pieces]
            assert 0 < report.moving_s <= report.seconds
            assert all(pair.target.block(block) == pair.source.block(block + 16) for block in range(16))

    asyncio.run(test())


def test_a_prompt_of_128k_tokens_moves_by_chunks_and_layers(make_steady_pair: MakePair) -> None:
    """8,192 blocks of 16 tokens: thousands of blocks in a frame, block tables in any order."""

    async def test() -> None:
        layout = SMALL_LAYOUT._replace(block_tokens=16)
        count = 128 * 1024 // layout.block_tokens
        async with asyncio.timeout(60), make_steady_pair(num_blocks=count, layout=layout) as pair:
            targets = [(block * 5 + 3) % count for block in range(count)]
            sources = [(block * 7 + 1) % count for block in range(count)]
            landing = pair.receiver.grant(targets, 0)
            push = await pair.sender.open_push(landing.ticket)
            for first in range(0, count - 1024, 1024):
                push.announce(first, sources[first : first + 1024])
            for layer in range(layout.num_layers):
                push.announce(count - 1024, sources[count - 1024 :], range(layer, layer + 1))
            await asyncio.gather(push.finish(), landing.landed())
            for index in range(count):
                assert pair.target.block(targets[index]) == pair.source.block(sources[index])

    asyncio.run(test())


def test_aborted_pushes_give_their_window_back(make_steady_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_steady_pair(inflight_bytes_max=2 * BLOCK_BYTES) as pair:
            for yields in range(12):
                landing = pair.receiver.grant([1, 2], 0)
                push = await pair.sender.open_push(landing.ticket)
                push.announce(0, [1, 2])
                for _ in range(yields):
                    await asyncio.sleep(0)
                await push.abort("over")
                await landing.abort("over")

            await transfer(pair, [3, 5, 7], [1, 2, 3])

    asyncio.run(test())


@asynccontextmanager
async def silent_receiver(address: transfer_pb2.TransferAddress) -> AsyncIterator[None]:
    """A receiver that shakes hands, accepts every ticket and then never acknowledges anything."""
    listener, path = shm.listen()
    address.shm_path = path
    loop = asyncio.get_running_loop()

    def framed(frame: transfer_pb2.TransferFrame) -> bytes:
        payload = frame.SerializeToString()
        return struct.pack("<I", len(payload)) + payload

    async def serve() -> None:
        sock, _ = await loop.sock_accept(listener)
        with sock:
            hello = transfer_pb2.Hello(
                protocol=1, worker_id=address.worker_id, generation=address.generation, layout=SMALL_LAYOUT.to_pb()
            )
            await loop.sock_sendall(sock, framed(transfer_pb2.TransferFrame(hello=hello)))
            buffer = b""
            while data := await loop.sock_recv(sock, 65536):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= 4 + struct.unpack("<I", buffer[:4])[0]:
                    size = struct.unpack("<I", buffer[:4])[0]
                    frame = transfer_pb2.TransferFrame.FromString(buffer[4 : 4 + size])
                    buffer = buffer[4 + size :]
                    if frame.WhichOneof("frame") == "open":
                        answer = transfer_pb2.Open(transfer_id=frame.open.transfer_id)
                        await loop.sock_sendall(sock, framed(transfer_pb2.TransferFrame(open=answer)))

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        listener.close()


def silent_address() -> transfer_pb2.TransferAddress:
    return transfer_pb2.TransferAddress(worker_id="silent", generation=5, host_id=shm.host_id())


def test_a_stalled_receiver_fails_its_own_push_and_delays_no_other(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_shm_pair(inflight_bytes_max=BLOCK_BYTES) as pair:
            address = silent_address()
            async with silent_receiver(address):
                ticket = make_ticket(address, [0, 1, 2], 0, SMALL_LAYOUT, lease_s=0.4, checksum=True)
                stalled = await pair.sender.open_push(ticket)
                for block in range(3):
                    stalled.announce(block, [block])

                for block in range(8):
                    await transfer(pair, [block], [15 - block])

                with pytest.raises(WorkerLostError, match="no progress for"):
                    await stalled.finish()
                await stalled.abort("stalled")
                assert pair.sender.num_active == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        pytest.param("a..b", 4711, "no host name", id="an empty label"),
        pytest.param("ä" * 100, 4711, "cannot reach", id="a long label"),
        pytest.param("127.0.0.1", 70_000, "70000 is no port", id="a large port"),
    ],
)
def test_an_address_that_makes_no_sense_is_an_unreachable_receiver(host: str, port: int, words: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            address = silent_address()
            address.host_id, address.host, address.ucx_port = "elsewhere", host, port
            ticket = make_ticket(address, [0], 0, SMALL_LAYOUT, lease_s=5.0, checksum=True)

            with pytest.raises(WorkerLostError, match=words):
                await pair.sender.open_push(ticket)
            assert pair.sender.num_active == 0

    asyncio.run(test())


def test_a_receiver_that_never_answers_is_lost_after_the_connect_timeout(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_shm_pair(connect_timeout_s=0.1) as pair:
            address = silent_address()
            listener, address.shm_path = shm.listen()
            with listener:
                ticket = make_ticket(address, [0], 0, SMALL_LAYOUT, lease_s=5.0, checksum=True)

                with pytest.raises(WorkerLostError, match="did not answer"):
                    await pair.sender.open_push(ticket)
                assert pair.sender.num_active == 0

    asyncio.run(test())


def test_a_stranger_on_the_ucx_ports_disturbs_nobody() -> None:
    async def test() -> None:
        async with asyncio.timeout(20), auto_pair() as pair:
            pair.receiver.address.host_id = "elsewhere"
            await transfer(pair, [1], [2])
            loop = asyncio.get_running_loop()
            for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(500), b"\xff" * 70000):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                    await loop.sock_connect(sock, ("127.0.0.1", pair.receiver.address.ucx_port))
                    try:
                        await loop.sock_sendall(sock, junk)
                        while await loop.sock_recv(sock, 4096):
                            pass
                    except ConnectionError:
                        pass
            await transfer(pair, [1], [3])
            assert sum(entry.refusals for entry in pair.receiver.stats()) == 3

    asyncio.run(test())


def test_a_burst_of_transfers_with_random_aborts_fails_nothing_else(make_steady_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(60), make_steady_pair(num_blocks=200, lease_s=30.0) as pair:
            rng = random.Random(3)

            async def one(block: int) -> None:
                landing = pair.receiver.grant([block], 0)
                push = await pair.sender.open_push(landing.ticket)
                push.announce(0, [199 - block], range(1))
                for _ in range(rng.randint(0, 30)):
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    await rng.choice([landing, push]).abort("at random")
                    await landing.abort("at random")
                    await push.abort("at random")
                    return
                push.announce(0, [199 - block], range(1, 3))
                await push.finish()
                await landing.landed()
                assert pair.target.block(block) == pair.source.block(199 - block)

            await asyncio.gather(*(one(block) for block in range(200)))
            assert pair.sender.num_active == pair.receiver.num_active == 0
            assert sum(entry.refusals for entry in pair.receiver.stats()) == 0

    asyncio.run(test())


LARGE_LAYOUT = SMALL_LAYOUT._replace(num_layers=4, block_tokens=32, head_dim=128)  # 256 KiB a block


@pytest.mark.parametrize("by_sender", [False, True])
def test_large_pieces_may_be_aborted_at_any_moment(make_steady_pair: MakePair, by_sender: bool) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_steady_pair(num_blocks=8, layout=LARGE_LAYOUT) as pair:
            foreign = bytes([0xEE]) * LARGE_LAYOUT.block_bytes
            for yields in (0, 1, 2, 4, 8, 12, 16, 24, 32, 48):
                landing = pair.receiver.grant(list(range(6)), 0)
                push = await pair.sender.open_push(landing.ticket)
                for block in (0, 2, 4):
                    push.announce(block, [block + 1, block])
                for _ in range(yields):
                    await asyncio.sleep(0)

                if by_sender:
                    await push.abort("enough")
                    with pytest.raises(TransferError):
                        await landing.landed()
                    await landing.abort("enough")
                else:
                    await landing.abort("enough")
                for block in range(6):
                    pair.target.write(block, foreign)
                await push.abort("enough")

                await transfer(pair, [7], [7])
                assert all(pair.target.block(block) == foreign for block in range(6))
            assert pair.sender.num_active == pair.receiver.num_active == 0
            assert sum(entry.refusals for entry in pair.receiver.stats()) == 0

    asyncio.run(test())
