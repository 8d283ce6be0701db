"""From reserved blocks to a sequence that can decode: grant a ticket, let the prompt be prefilled, see it land.

A preempted sequence lands from the tiers below the pool instead. What fails on the prefill worker reaches the gateway
with that worker's own code and words.
"""

import asyncio
from typing import Any, Protocol, TypeVar

from baton_pb.v1 import transfer_pb2, worker_pb2
from common.errors import BatonError
from decode.prefill_calls import PrefillCall, PrefillCalls
from decode.stream import TokenStream
from engine.tiers import BlockTiers
from kvtransfer.interface import Endpoint, Landing, LandingReport

T = TypeVar("T")

CAUSE_WAIT_S = 0.5
"""When a transfer fails, how long the prefill worker may take to say why in its own words."""
END_WAIT_S = 5.0
"""After everything landed, how long the prefill worker may take to end its call."""


class LandingOwner(Protocol):
    """The decode loop, as the landing sees it. Plain functions."""

    def first_token(self, stream: TokenStream, first_token: worker_pb2.FirstToken) -> bool:
        """Take the first token; False: the sequence ended with it."""
        ...

    def landed(self, stream: TokenStream, report: LandingReport) -> None:
        """The prompt's KV is in the stream's blocks, which are the owner's from now on."""
        ...

    def landing_failed(self, stream: TokenStream, error: BatonError) -> None:
        """End the stream with an error; `quiet` follows."""
        ...

    def returned(self, stream: TokenStream, num_blocks: int) -> None:
        """So many of the first blocks that a preempted stream lacked are back, and its blocks the owner's."""
        ...

    def quiet(self, stream: TokenStream) -> None:
        """The stream did not land, and no byte can arrive in its blocks any more: release them."""
        ...


class LandingRun:
    """One landing, from reserved blocks to a sequence that can decode.

    grant ─► call ─► first token ─► landed ─► the loop decodes
       └───────┴──────────┴── error, cancel ─► tell the gateway ─► abort until quiet ─► release
    """

    def __init__(self, owner: LandingOwner, endpoint: Endpoint, calls: PrefillCalls, stream: TokenStream) -> None:
        self._owner = owner
        self._endpoint = endpoint
        self._calls = calls
        self._stream = stream
        self._has_landed = False

    async def run(self, num_blocks: int, timeout_s: float | None) -> None:
        """Land the prompt. May be cancelled at any moment; the blocks come back when nothing can arrive.

        Args:
            num_blocks: of the prompt.
            timeout_s: left of the request's deadline.
        """
        stream = self._stream
        assert stream.target is not None
        address = stream.target.address
        landing = self._endpoint.grant(stream.sequence.block_table[stream.first_block : num_blocks], stream.first_block)
        try:
            request = _request(stream, landing.ticket, timeout_s)
            async with self._calls.open(address, request, timeout_s) as call:
                await self._receive(call, landing)
        except BatonError as error:
            if not self._has_landed:
                self._owner.landing_failed(stream, error)
        finally:
            if not self._has_landed:
                await landing.abort("the decode worker gave up")
                self._owner.quiet(stream)

    async def _receive(self, call: PrefillCall, landing: Landing) -> None:
        arrival = asyncio.create_task(landing.landed())
        tasks: list[asyncio.Task[Any]] = [arrival]
        try:
            first_token = asyncio.create_task(call.first_token())
            tasks.append(first_token)
            if not self._owner.first_token(self._stream, await _unless_failed(first_token, arrival)):
                return
            ending = asyncio.create_task(call.pushed())
            tasks.append(ending)
            report = await _landed(arrival, ending)
            self._has_landed = True
            self._owner.landed(self._stream, report)
            await asyncio.wait([ending], timeout=END_WAIT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                _is_failed(task)  # seen: what mattered was raised


async def bring_back(owner: LandingOwner, tiers: BlockTiers, stream: TokenStream) -> None:
    """Land a preempted stream from the tiers below the pool. May be cancelled at any moment."""
    wanted, stream.below = stream.below, ()
    first, num_back = stream.first_block, None
    try:
        num_back = await tiers.restore(wanted, stream.sequence.block_table[first : first + len(wanted)])
    finally:
        if num_back is None:
            owner.quiet(stream)
    owner.returned(stream, num_back)


def _request(stream: TokenStream, ticket: transfer_pb2.Ticket, timeout_s: float | None) -> worker_pb2.PrefillRequest:
    sequence = stream.sequence
    return worker_pb2.PrefillRequest(
        request_id=stream.request_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling.to_pb(),
        ticket=ticket,
        timeout_s=timeout_s or 0.0,
        cache_salt=sequence.cache_salt,
        prefix_holder=stream.prefix_holder,
    )


async def _unless_failed(first_token: "asyncio.Task[T]", arrival: asyncio.Task[LandingReport]) -> "T":
    """Wait for the first token; raise when the transfer fails before it comes."""
    await asyncio.wait([first_token, arrival], return_when=asyncio.FIRST_COMPLETED)
    if _is_failed(arrival):
        await _raise_cause(first_token)
        arrival.result()
    return await first_token


async def _landed(arrival: asyncio.Task[LandingReport], ending: asyncio.Task[None]) -> LandingReport:
    """Wait for the transfer; raise what the prefill worker says when it fails, else what the transfer says."""
    await asyncio.wait([arrival, ending], return_when=asyncio.FIRST_COMPLETED)
    if not arrival.done():
        ending.result()
        await asyncio.wait([arrival])
    if _is_failed(arrival):
        await _raise_cause(ending)
    return arrival.result()


async def _raise_cause(call: "asyncio.Task[Any]") -> None:
    """Raise the call's own error, if it has or soon gets one."""
    await asyncio.wait([call], timeout=CAUSE_WAIT_S)
    if _is_failed(call):
        call.result()


def _is_failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
