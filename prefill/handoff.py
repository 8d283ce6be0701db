"""Handing a prompt over: prefill it, push its blocks as they become final, and let go of them when confirmed."""

import asyncio
from collections.abc import Sequence as Seq
from typing import Any

from baton_pb.v1 import transfer_pb2, worker_pb2
from common.errors import BatonError, CancelledRequestError, InvalidRequestError
from engine.sequence import Sequence
from kvtransfer.interface import Endpoint, Push, PushReport
from prefill.loop import Prefilled, PrefillLoop, PromptJob


class Handoff:
    """One prompt and its push, from arrival until its blocks are released.

        connect ∥ queue, prefill ──► all announced ──► confirmed ──► withdraw, quiet, release
              └───────── error, cancel, deadline, crash ────────────────────▲

    The connection is opened while the prompt is still queued. Blocks that the receiver holds are not sent. Owned by the
    worker's asyncio loop.
    """

    def __init__(
        self,
        loop: PrefillLoop,
        endpoint: Endpoint,
        sequence: Sequence,
        ticket: transfer_pb2.Ticket,
        holder: worker_pb2.PrefixHolder | None = None,
    ) -> None:
        """Queue the prompt and begin.

        Raises:
            InvalidRequestError: the ticket does not cover the prompt, or the prompt can never be served.
            OverloadedError: no place in the queue.
        """
        num_blocks = loop.blocks_for(sequence.num_tokens)
        if ticket.first_block + len(ticket.block_ids) != num_blocks:
            raise InvalidRequestError(
                f"the ticket covers blocks {ticket.first_block}+{len(ticket.block_ids)} of {num_blocks}"
            )
        self._loop = loop
        self._endpoint = endpoint
        self._ticket = ticket
        self._push: Push | None = None
        self._unannounced: list[tuple[int, Seq[int], range]] = []
        self._error: BatonError | None = None
        self._outcome: asyncio.Future[PushReport] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda future: future.exception())  # a handoff may end unwatched
        self._job: PromptJob = loop.submit(sequence, self, holder)
        self._work = loop.runner.spawn(self._run(), f"handoff-{sequence.request_id}")

    async def first_token(self) -> Prefilled:
        """Wait for the prompt to be prefilled.

        Raises:
            BatonError: the handoff failed.
        """
        prefilled = self._job.prefilled
        either: list[asyncio.Future[Any]] = [prefilled, self._outcome]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._outcome.done():
            self._outcome.result()
        return prefilled.result()

    async def pushed(self) -> PushReport:
        """Wait until the receiver has confirmed all blocks.

        Raises:
            BatonError: the handoff failed.
        """
        return await asyncio.shield(self._outcome)

    def fail(self, error: BatonError) -> None:
        """End with `error`, unless it is over: blocks come back as soon as nobody reads them."""
        if self._error is None and not self._outcome.done():
            self._error = error
            self._outcome.set_exception(error)
            self._work.cancel()

    def cancel(self) -> None:
        """End it because nobody waits for it any more."""
        self.fail(CancelledRequestError("the caller left"))

    def blocks_final(self, first: int, block_ids: Seq[int], layers: range) -> None:
        """Announce blocks to the receiver, or remember them until connected."""
        skip = max(0, self._ticket.first_block - first)
        block_ids = block_ids[skip:]
        if not block_ids:
            return
        landing_index = first + skip - self._ticket.first_block
        if self._push is None:
            self._unannounced.append((landing_index, block_ids, layers))
        else:
            self._push.announce(landing_index, block_ids, layers)

    async def _run(self) -> None:
        try:
            await self._prefill_and_push()
        except BatonError as error:
            self._settle(error)
        except asyncio.CancelledError:
            # Asked for by `fail`, which has told the caller already.
            if self._error is None:
                raise
        finally:
            self._loop.withdraw(self._job)
            if self._push is not None:
                await self._push.abort("the prefill worker gave up")  # nothing, after it was confirmed
            self._loop.release(self._job)

    async def _prefill_and_push(self) -> None:
        self._push = await self._endpoint.open_push(self._ticket)
        for piece in self._unannounced:
            self._push.announce(*piece)
        await asyncio.wait([self._job.prefilled])
        self._settle(await self._push.finish())

    def _settle(self, outcome: BatonError | PushReport) -> None:
        """Tell the caller, before the push is quiet, which may take a lease. From here on nothing cancels the task."""
        if self._outcome.done():
            return
        if isinstance(outcome, BatonError):
            self._outcome.set_exception(outcome)
        else:
            self._outcome.set_result(outcome)
