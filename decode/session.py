"""One gateway's session: the streams it started, and what it has not been sent yet."""

import asyncio

from baton_pb.v1 import worker_pb2
from common.errors import BatonError, OverloadedError
from decode.stream import TokenStream


class GatewaySession:
    """Collects outputs and hands them out as one DecodeStep for all that came together.

    While the gateway is slow, outputs add up in the next message instead of queueing as messages of their own. Owned by
    the decode loop; plain functions but for `next_step`.
    """

    def __init__(self, gateway_id: str, unsent_max: int) -> None:
        self.gateway_id = gateway_id
        self._unsent_max = unsent_max
        self.streams: dict[str, TokenStream] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the session must end."""
        self.broken.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._outputs: list[worker_pb2.SequenceOutput] = []
        self._open: dict[str, worker_pb2.SequenceOutput] = {}
        self._num_unsent = 0
        self._ready = asyncio.Event()

    def emit(self, output: worker_pb2.SequenceOutput) -> None:
        """Add an output to the next message; outputs of one sequence are joined.

        A gateway that is `unsent_max` outputs behind loses the session: it would cost others their memory.
        """
        if self.broken.done():
            return
        self._num_unsent += 1
        if self._num_unsent > self._unsent_max:
            self.end(OverloadedError(f"gateway {self.gateway_id} left {self._unsent_max} outputs unread"))
            return
        earlier = self._open.get(output.request_id)
        if earlier is None:
            self._outputs.append(output)
            self._open[output.request_id] = output
        else:
            earlier.MergeFrom(output)
        if output.HasField("finished") or output.HasField("error"):
            # Whatever follows under this id belongs to another sequence.
            del self._open[output.request_id]
        self._ready.set()

    def forget(self, request_id: str) -> None:
        """Drop what a cancelled sequence has unsent."""
        output = self._open.pop(request_id, None)
        if output is not None:
            self._outputs = [other for other in self._outputs if other is not output]

    def end(self, error: BatonError) -> None:
        """Break the session: the gateway's stream ends with `error`."""
        if not self.broken.done():
            self._outputs, self._open = [], {}
            self.broken.set_exception(error)

    async def next_step(self) -> worker_pb2.DecodeStep:
        """Wait for outputs and take all there are."""
        while not self._outputs:
            self._ready.clear()
            await self._ready.wait()
        outputs, self._outputs, self._open, self._num_unsent = self._outputs, [], {}, 0
        return worker_pb2.DecodeStep(outputs=outputs)
