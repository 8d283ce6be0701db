"""A session joins what waits for a slow gateway, and gives up one that does not read at all."""

import asyncio

import pytest

from baton_pb.v1 import common_pb2, worker_pb2
from common.errors import OverloadedError
from decode.session import GatewaySession


def output(request_id: str, *tokens: int, is_last: bool = False) -> worker_pb2.SequenceOutput:
    sampled = [common_pb2.SampledToken(token_id=token) for token in tokens]
    finished = worker_pb2.SequenceFinished(reason=common_pb2.FINISH_REASON_STOP) if is_last else None
    return worker_pb2.SequenceOutput(request_id=request_id, tokens=sampled, finished=finished)


def told(step: worker_pb2.DecodeStep) -> list[tuple[str, list[int], bool]]:
    return [(o.request_id, [t.token_id for t in o.tokens], o.HasField("finished")) for o in step.outputs]


def test_outputs_that_wait_are_one_message_with_one_entry_for_each_sequence() -> None:
    async def main() -> None:
        session = GatewaySession("g", unsent_max=100)
        session.emit(output("a", 1))
        session.emit(output("b", 2))
        session.emit(output("a", 3, is_last=True))
        session.emit(output("a", 9))  # another sequence, which took the free id

        assert told(await session.next_step()) == [("a", [1, 3], True), ("b", [2], False), ("a", [9], False)]

    asyncio.run(main())


def test_what_a_cancelled_sequence_has_unsent_is_dropped() -> None:
    async def main() -> None:
        session = GatewaySession("g", unsent_max=100)
        session.emit(output("a", 1))
        session.emit(output("b", 2))
        session.forget("a")

        assert told(await session.next_step()) == [("b", [2], False)]

    asyncio.run(main())


def test_a_gateway_that_does_not_read_loses_the_session() -> None:
    async def main() -> None:
        session = GatewaySession("g", unsent_max=100)
        for _ in range(100):
            session.emit(output("a", 1))
        assert not session.broken.done()
        session.emit(output("a", 1))

        with pytest.raises(OverloadedError, match="gateway g left 100 outputs unread"):
            await session.broken

    asyncio.run(main())
