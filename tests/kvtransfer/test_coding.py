"""Coded and sealed pieces land as they were, or as near as the codec says; damaged ones are refused and counted."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import BatonError, MismatchError, TransferError
from kvtransfer.activity import Stop
from kvtransfer.codecs.registry import CODECS
from kvtransfer.coding import BadMessageError, Coding, Parcel, code, place
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.memory import Memory
from kvtransfer.pieces import Piece, runs_of
from kvtransfer.seal import Seal
from tests.kvtransfer.faulty import FaultyPair, faulty_pair
from tests.kvtransfer.raw_sender import RawSender

LIMIT_S = 20
MODES = [
    *(pytest.param({"codec": name}, id=name) for name in CODECS),
    *(pytest.param({"codec": name, "sealed": True}, id=f"{name}, sealed") for name in CODECS),
]
SOURCES, TARGETS = [8, 9, 2, 15], [3, 4, 11, 0]
GROUPS = (range(2), range(2, 3))


def run(test: Callable[[], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(main())


def floats(store: FakeBlockStore, block: int) -> np.ndarray:
    return np.frombuffer(store.block(block), dtype=np.float32)


async def push_all(pair: Any) -> None:
    """Send four blocks in two groups of layers."""
    landing = pair.receiver.grant(TARGETS, 0)
    push = await pair.sender.open_push(landing.ticket)
    try:
        for layers in GROUPS:
            push.announce(0, SOURCES, layers)
            await asyncio.sleep(0)  # what is announced in one go travels as one piece
        await asyncio.gather(push.finish(), landing.landed())
    finally:
        await push.abort("over")
        await landing.abort("over")


def has_landed(pair: Any, codec: str) -> bool:
    bound = {"int8": 0.02, "fp8": 0.2}.get(codec, 0.0)
    return all(
        np.abs(floats(pair.target, target) - floats(pair.source, source)).max() <= bound
        for source, target in zip(SOURCES, TARGETS, strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_codec_carries_blocks_by_layers(mode: dict[str, Any]) -> None:
    async def test() -> None:
        async with faulty_pair(**mode) as pair:
            untouched = pair.target.block(7)
            await push_all(pair)
            assert has_landed(pair, mode["codec"])
            assert pair.target.block(7) == untouched
            assert pair.num_refusals == 0
            raw_bytes = 4 * SMALL_LAYOUT.block_bytes
            assert (pair.wire.num_bytes < 0.5 * raw_bytes) == (mode["codec"] in ("int8", "fp8"))

    run(test)


@pytest.mark.parametrize("mode", MODES)
def test_codecs_and_seals_work_over_every_transport(make_steady_pair: Any, mode: dict[str, Any]) -> None:
    async def test() -> None:
        async with make_steady_pair(**mode) as pair:
            rng = np.random.default_rng(1)
            for block in range(16):
                pair.source.write(block, rng.normal(size=SMALL_LAYOUT.block_bytes // 4).astype(np.float32).tobytes())
            await push_all(pair)
            assert has_landed(pair, mode["codec"])

    run(test)


@pytest.mark.parametrize("mode", [*MODES, pytest.param({"codec": "int8", "sealed": True, "checksum": False}, id="tag")])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(hit=st.integers(0, 1), at=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_damage_anywhere_is_refused_and_counted(mode: dict[str, Any], hit: int, at: int, flip: int) -> None:
    async def test() -> None:
        async with faulty_pair(**mode) as pair:
            seen: list[int] = []

            def damage(message: bytes) -> bytes | None:
                seen.append(len(message))
                if len(seen) - 1 != hit:
                    return message
                damaged = bytearray(message)
                damaged[at % len(message)] ^= flip
                return bytes(damaged)

            pair.wire.damage = damage
            with pytest.raises(TransferError):
                await push_all(pair)
            assert pair.num_refusals == 1

            pair.wire.damage = lambda message: message
            await push_all(pair)  # the connection is as good as before
            assert has_landed(pair, mode["codec"])

    run(test)


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_message_ends_by_the_lease_and_a_cut_one_at_once(mode: dict[str, Any]) -> None:
    async def test() -> None:
        async with faulty_pair(**mode, lease_s=20.0) as pair:
            pair.wire.damage = lambda message: message[:-1]
            async with asyncio.timeout(1):
                with pytest.raises(TransferError):
                    await push_all(pair)
        async with faulty_pair(**mode, lease_s=0.5) as pair:
            pair.wire.damage = lambda message: None
            with pytest.raises(BatonError):
                await push_all(pair)

    run(test)


def test_a_message_under_another_number_place_or_ticket_does_not_open() -> None:
    store, target = FakeBlockStore(8), FakeBlockStore(8)
    for block in range(8):
        store.write(block, np.full(SMALL_LAYOUT.block_bytes // 4, block, dtype=np.float32).tobytes())
    ids, secrets = (b"i" * 16, b"j" * 16), (b"s" * 32, b"t" * 32)
    piece, layout = Piece(1, (4, 5), range(1, 3)), SMALL_LAYOUT
    landing_ids = [0, 1, 2, 3]
    parcel = Parcel(piece, runs_of(piece, landing_ids, layout), 7)

    def coding(id_: bytes = ids[0], secret: bytes = secrets[0]) -> Coding:
        return Coding(CODECS["raw"], Seal(id_, secret), checksum=False)

    coded = code(coding(), Memory(store.buffer), layout, parcel, Stop())
    elsewhere = piece._replace(first=0)
    earlier = piece._replace(layers=range(2))
    wrong = [
        (coding(), parcel._replace(nonce=8)),
        (coding(), Parcel(elsewhere, runs_of(elsewhere, landing_ids, layout), 7)),
        (coding(), Parcel(earlier, runs_of(earlier, landing_ids, layout), 7)),
        (coding(id_=ids[1]), parcel),
        (coding(secret=secrets[1]), parcel),
    ]
    before = bytes(target.buffer)
    for how, where in wrong:
        with pytest.raises(BadMessageError, match="seal"):
            place(how, coded, Memory(target.buffer), layout, where, Stop())
    assert bytes(target.buffer) == before

    place(coding(), coded, Memory(target.buffer), layout, parcel, Stop())
    assert target.block(1)[layout.layer_bytes :] == store.block(4)[layout.layer_bytes :]
    assert target.block(2)[layout.layer_bytes :] == store.block(5)[layout.layer_bytes :]


def test_sealed_messages_show_nothing_and_never_repeat() -> None:
    async def test() -> None:
        async with faulty_pair(sealed=True) as pair:
            messages: list[bytes] = []

            def listen(message: bytes) -> bytes:
                messages.append(message)
                return message

            pair.wire.damage = listen
            for block in range(16):
                pair.source.write(block, bytes(SMALL_LAYOUT.block_bytes))
            await push_all(pair)
            await push_all(pair)

            assert len(set(messages)) == len(messages) == 4
            starts = {message[:64] for message in messages}
            assert len(starts) == 4  # equal blocks, equal places, other tickets and numbers
            assert all(len(set(message)) > 100 for message in messages)

    run(test)


def test_nothing_of_a_pool_crosses_unsealed_not_even_to_measure_the_link() -> None:
    async def test() -> None:
        async with faulty_pair(num_blocks=2048, sealed=True) as pair:
            messages: list[bytes] = []

            def listen(message: bytes) -> bytes:
                messages.append(message)
                return message

            pair.wire.damage = listen
            mark = b"private "
            for block in range(2048):
                pair.source.write(block, mark * (SMALL_LAYOUT.block_bytes // len(mark)))
            await push_all(pair)

            assert max(map(len, messages)) > 1_000_000  # the link was measured
            assert not any(mark in message for message in messages)
            assert all(pair.target.block(block) == pair.source.block(0) for block in TARGETS)

    run(test)


def test_values_that_a_codec_cannot_carry_fail_their_transfer_only() -> None:
    async def test() -> None:
        async with faulty_pair(codec="int8") as pair:
            good = pair.source.block(SOURCES[0])
            pair.source.write(SOURCES[0], np.full(SMALL_LAYOUT.block_bytes // 4, np.nan, dtype=np.float32).tobytes())
            with pytest.raises(TransferError, match="not finite"):
                await push_all(pair)
            pair.source.write(SOURCES[0], good)
            await push_all(pair)
            assert has_landed(pair, "int8")

    run(test)


def test_a_codec_that_a_ticket_does_not_allow_is_refused() -> None:
    async def test() -> None:
        async with faulty_pair(codec="lossless") as pair:
            for claimed in ("int8", "fp8"):
                landing = pair.receiver.grant(TARGETS, 0)
                forged = type(landing.ticket)()
                forged.CopyFrom(landing.ticket)
                forged.codec = claimed
                with pytest.raises(TransferError, match="asks for 'lossless'"):
                    await pair.sender.open_push(forged)
                await landing.abort("refused")
            forged.codec = "morse"
            with pytest.raises(MismatchError, match="morse"):
                await pair.sender.open_push(forged)
            assert pair.num_refusals == 2

    run(test)


def test_a_sender_that_forgets_the_seal_is_refused() -> None:
    async def test() -> None:
        async with faulty_pair(sealed=True) as pair:
            landing = pair.receiver.grant(TARGETS, 0)
            forged = type(landing.ticket)()
            forged.CopyFrom(landing.ticket)
            forged.sealed = False
            push = await pair.sender.open_push(forged)
            push.announce(0, SOURCES)
            with pytest.raises(TransferError):
                await push.finish()
            with pytest.raises(TransferError):
                await landing.landed()
            await push.abort("over")
            await landing.abort("over")
            assert pair.num_refusals == 1

    run(test)


@pytest.mark.parametrize("by_sender", [True, False])
@pytest.mark.parametrize("yields", [0, 1, 3, 8])
def test_coded_transfers_may_be_aborted_at_any_moment(by_sender: bool, yields: int) -> None:
    async def test() -> None:
        async with faulty_pair(codec="int8") as pair:
            landing = pair.receiver.grant(TARGETS, 0)
            push = await pair.sender.open_push(landing.ticket)
            for layers in GROUPS:
                push.announce(0, SOURCES, layers)
            for _ in range(yields):
                await asyncio.sleep(0)
            first, second = (push, landing) if by_sender else (landing, push)
            await first.abort("enough")
            if not by_sender:
                for block in TARGETS:
                    pair.target.write(block, b"\xee" * SMALL_LAYOUT.block_bytes)
            await second.abort("enough")
            landing = pair.receiver.grant([7], 0)
            push = await pair.sender.open_push(landing.ticket)
            push.announce(0, [7])
            await asyncio.gather(push.finish(), landing.landed())
            if not by_sender:
                assert all(set(pair.target.block(block)) == {0xEE} for block in TARGETS)

    run(test)


@pytest.mark.parametrize("mode", [{}, {"codec": "int8"}])
def test_a_transfer_that_was_vouched_for_lands_when_its_last_message_comes(mode: dict[str, Any]) -> None:
    async def test() -> None:
        async with faulty_pair(**mode) as pair:
            pair.wire.is_held = True
            landing = pair.receiver.grant(TARGETS, 0)
            push = await pair.sender.open_push(landing.ticket)
            push.announce(0, SOURCES)
            finishing = asyncio.create_task(push.finish())
            arriving = asyncio.create_task(landing.landed())
            other = pair.receiver.grant([], 0)
            other_push = await pair.sender.open_push(other.ticket)  # a round trip
            await asyncio.gather(other_push.finish(), other.landed())  # Complete of the first went before
            assert not finishing.done()
            assert not arriving.done()

            pair.wire.flow()

            assert (await finishing).num_bytes == (await arriving).num_bytes == 4 * SMALL_LAYOUT.block_bytes
            assert has_landed(pair, mode.get("codec", "raw"))

    run(test)


def test_a_transfer_that_was_vouched_for_and_never_comes_fails() -> None:
    async def test() -> None:
        async with faulty_pair() as pair:
            pair.wire.is_held = True
            landing = pair.receiver.grant(TARGETS, 0)
            push = await pair.sender.open_push(landing.ticket)
            push.announce(0, SOURCES)
            finishing = asyncio.create_task(push.finish())
            await pair.wire.has_held.wait()
            other = pair.receiver.grant([], 0)
            other_push = await pair.sender.open_push(other.ticket)
            await asyncio.gather(other_push.finish(), other.landed())

            pair.wire.cut()

            with pytest.raises(TransferError):
                await landing.landed()
            with pytest.raises(BatonError):
                await finishing
            await landing.abort("over")
            await push.abort("over")

    run(test)


def raw_to(pair: FaultyPair) -> RawSender:
    """Return a sender of bare frames to a pair's receiver."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(pair.receiver.path)
    sock.setblocking(False)
    return RawSender(sock, pair.source)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("encoded_bytes", [0, 99_999, 2**63, 2**64 - 1])
def test_a_message_of_a_length_that_no_codec_makes_is_refused(encoded_bytes: int, sealed: bool) -> None:
    async def test() -> None:
        async with faulty_pair(codec="int8", sealed=sealed) as pair:
            raw = raw_to(pair)
            landing = pair.receiver.grant([1], 0)
            await raw.hello()
            await raw.receive()
            await raw.open(landing, "int8")

            await raw.send(raw.ready(landing, encoded_bytes=encoded_bytes))

            with pytest.raises(TransferError, match=f"a message of {encoded_bytes} bytes"):
                await landing.landed()
            await landing.abort("failed")
            assert pair.num_refusals == 1
            raw.sock.close()
            await push_all(pair)
            assert has_landed(pair, "int8")

    run(test)


def test_more_under_way_than_was_granted_is_refused() -> None:
    async def test() -> None:
        async with faulty_pair(inflight_bytes_max=SMALL_LAYOUT.block_bytes) as pair:
            raw = raw_to(pair)
            landing = pair.receiver.grant([1, 2], 0)
            await raw.hello()
            hello = await raw.receive()
            assert hello is not None
            assert hello.hello.window_bytes == SMALL_LAYOUT.block_bytes
            await raw.open(landing)
            first = raw.ready(landing)
            await raw.send(first)  # and its message does not come
            await raw.send(raw.ready(landing, seq=1, first=1, tag=(first.ready.tag + 1) % 2**64))

            with pytest.raises(TransferError, match="were granted"):
                await landing.landed()
            raw.sock.close()
            await landing.abort("failed")
            assert pair.num_refusals == 1

    run(test)
