"""The life of a request, as the gateway sees it. Both faces, gRPC and HTTP, call `Generator.generate`."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from baton_pb.v1 import common_pb2, inference_pb2, router_pb2, worker_pb2
from cluster.gateway.chat import ChatPrompt
from cluster.gateway.constraints import Constraints
from cluster.gateway.cost import add_cost
from cluster.gateway.counts import Counts
from cluster.gateway.decode_client import DecodeClients, UnreadError
from cluster.gateway.failures import Failures
from cluster.gateway.limits import Limits
from cluster.gateway.metrics import Metrics
from cluster.gateway.parsing.formats import Formats, Thinking
from cluster.gateway.permissions import check_may_use, for_caller, longest_answer
from cluster.gateway.progress import Delta, Progress
from cluster.gateway.request import Request, check_model, check_window, num_kept, request_from_pb
from cluster.gateway.router_client import Reservation, RouterClient, Wanted
from cluster.gateway.texts_log import TextsLog
from cluster.gateway.tokenizing import Tokenizing
from cluster.tenants.callers import CALLER, Caller
from cluster.tenants.quotas import RequestUse, Uses
from common.chain_hash import salted
from common.clock import Clock
from common.config_doors import GatewayConfig
from common.errors import MismatchError, OverloadedError, WorkerLostError
from common.model_facts import ModelFacts
from common.text import Text

EXPLAINED_MAX = 16
"""Choices of a call that are explained in its answer: more have no room there."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that fits, ready to be placed."""

    request: Request
    caller: Caller
    token_ids: Sequence[int]
    block_tokens: int
    sampling: common_pb2.SamplingParams
    """The request's, with max_tokens and the constraint."""
    thinking: Thinking
    """Where the prompt leaves the model."""

    @property
    def cache_salt(self) -> bytes:
        """What its prefixes are named with: the tenant's salt, or one that follows from it and the client's own."""
        return salted(self.caller.cache_salt, self.request.text.cache_salt)


class Generator:
    """Serves requests of one gateway. Owned by its loop."""

    def __init__(
        self,
        model_id: str,
        facts: ModelFacts,
        text: Text,
        formats: Formats,
        config: GatewayConfig,
        router: RouterClient,
        workers: DecodeClients,
        tokenizing: Tokenizing,
        counts: Counts,
        uses: Uses,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._model_id = model_id
        self._facts = facts
        self._text = text
        self._config = config
        self._router = router
        self._workers = workers
        self._tokenizing = tokenizing
        self._formats = formats
        self._constraints = Constraints(tokenizing, formats, config.request)
        self._counts = counts
        self._uses = uses
        self._clock = clock
        self._metrics = metrics
        self._texts = TextsLog(text, config.log_texts_max)
        self._random = Random(secrets.randbits(64))
        self._count = 0
        self._id = secrets.token_hex(4)

    async def generate(
        self, message: inference_pb2.GenerateRequest, request_id: str, timeout_s: float
    ) -> AsyncGenerator[Delta, None]:
        """Serve a request: check it, tokenize it, place it, relay its tokens. Closing the iterator cancels it.

        Args:
            message: what the client asks for.
            request_id: what it is called; for its choices see choices.py.
            timeout_s: what is left of its deadline, for the workers. The caller keeps it here.

        Raises:
            InvalidRequestError, NotFoundError: the request is wrong, see request.py.
            OverloadedError: no room; has retry_after_s.
            WorkerLostError: no worker, or every one that was tried was lost.
            BatonError: what a worker answered.
        """
        received_s = self._clock.now()
        caller = CALLER.get()
        with self._counts.request(), self._uses.of(caller).request(caller.rules) as use:
            self._uses.check_share(caller, self._counts.running, self._config.running_max)
            limits = self.limits()
            check_model(message.model, limits)
            check_may_use(self._model_id, caller)
            request = for_caller(
                request_from_pb(message, limits, request_id, lambda: self._random.getrandbits(63)),
                caller,
                names_class=message.priority != common_pb2.PRIORITY_UNSPECIFIED,
            )
            prepared = await self._prepare(request, caller, use, limits)
            self._texts.prompt(request.request_id, caller.tenant, prepared.token_ids)
            reading = self._formats.reading(request.tools, prepared.thinking)
            progress = Progress(
                request, prepared.token_ids, received_s, self._text, self._facts.eos_token_ids, self._clock, reading
            )
            deadline_s = received_s + timeout_s
            metrics = self._metrics.stream(received_s)
            try:
                async with aclosing(self._serve(prepared, progress, deadline_s)) as deltas:
                    async for delta in deltas:
                        metrics.took(delta)
                        use.took(len(delta.token_ids))
                        if delta.finished is not None:
                            add_cost(delta.finished.usage, self._config.prices)
                            use.finished(delta.finished.usage)
                        yield delta
            finally:
                self._texts.answer(request.request_id, caller.tenant, progress.token_ids)

    async def explanation(self, request_ids: Sequence[str]) -> router_pb2.ExplainReply:
        """Return why requests of the caller's tenant went where they did; what the router cannot say is left out."""
        try:
            return await self._router.explain(request_ids[:EXPLAINED_MAX], CALLER.get().tenant)
        except WorkerLostError:
            return router_pb2.ExplainReply()

    def check_model(self, model: str) -> None:
        """Accept the served model's name, or none, from a caller who may use it.

        Raises:
            NotFoundError: any other name.
            PermissionDeniedError: the caller may not.
        """
        check_model(model, self.limits())
        check_may_use(self._model_id, CALLER.get())

    @property
    def request_s(self) -> float:
        """Longest life of a request."""
        return self._config.request_s

    def limits(self) -> Limits:
        """Return what a request must keep to; the workers' window may be smaller than the model's."""
        known = self._router.facts
        window = self._facts.context_tokens if known is None else min(self._facts.context_tokens, known.context_tokens)
        longest = min(window - 1, self._config.prompt_tokens_max or window)
        return Limits(self._model_id, window, self._facts.vocab_tokens, longest, self._config.request)

    async def _prepare(self, request: Request, caller: Caller, use: RequestUse, limits: Limits) -> _Prepared:
        """Tokenize a request and see that it fits."""
        token_ids = await self._tokenizing.token_ids(request.prompt)
        most = num_kept(request.text.prompt_tokens_kept, _max_tokens(request), limits)
        token_ids = token_ids if most is None else token_ids[-most:]
        check_window(len(token_ids), _max_tokens(request), limits)  # before anything is waited for
        is_chat = isinstance(request.prompt, ChatPrompt)
        thinking = self._formats.thinking_after(token_ids) if is_chat else Thinking.NEVER
        constraint = await self._constraints.of(request, thinking)
        cluster = await self._router.known_facts()
        if cluster.model_id != self._model_id:
            raise MismatchError(f"the workers serve model {cluster.model_id!r}, this gateway {self._model_id!r}")
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        room = check_window(len(token_ids), _max_tokens(request), self.limits())
        sampling.max_tokens = room if sampling.HasField("max_tokens") else longest_answer(room, caller)
        sampling.constraint = constraint
        use.prompt(len(token_ids))
        return _Prepared(request, caller, token_ids, cluster.block_tokens, sampling, thinking)

    async def _serve(self, prepared: _Prepared, progress: Progress, deadline_s: float) -> AsyncGenerator[Delta, None]:
        """Place the request and relay its tokens; when a worker fails it, place it anew with the tokens it has so far.

        The client sees a pause: draws, penalties, stop rules and text go on as functions of the tokens alone.
        """
        failures = Failures()
        for attempt in range(1 + self._config.retries_max):
            reservation = await self._place(prepared, progress, failures, deadline_s)
            try:
                async with aclosing(self._relay(prepared, progress, reservation, deadline_s)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except UnreadError:
                raise
            except (WorkerLostError, OverloadedError) as error:
                if attempt == self._config.retries_max:
                    raise
                failures.add(error, reservation.placement)
                self._counts.retried(prepared.request.request_id, failures.excluded, error)
            finally:
                reservation.release()

    async def _place(
        self, prepared: _Prepared, progress: Progress, failures: Failures, deadline_s: float
    ) -> Reservation:
        """Ask the router for workers, other than those that failed."""
        token_ids = [*prepared.token_ids, *progress.token_ids]
        caller = prepared.caller
        with self._counts.queueing(), self._uses.of(caller).queueing(caller.rules):
            hashes = await self._tokenizing.hashes(token_ids, prepared.block_tokens, prepared.cache_salt)
            wanted = Wanted(
                prepared.request.request_id,
                len(token_ids),
                prepared.sampling.max_tokens - len(progress.token_ids),
                hashes,
                failures.excluded,
                prepared.request.level,
                prepared.request.tenant,
                self._left_s(deadline_s),
                is_admitted=failures.last is not None,
            )
            try:
                return await self._router.place(wanted)
            except WorkerLostError:
                if failures.last is not None:
                    raise failures.last from None  # nobody is left: what the last worker said is worth more
                raise

    async def _relay(
        self, prepared: _Prepared, progress: Progress, reservation: Reservation, deadline_s: float
    ) -> AsyncGenerator[Delta, None]:
        """Start the sequence on its decode worker and hand out what comes, until its end.

        The reservation ends with the sequence: a client that reads slowly keeps no place that others wait for.
        """
        placement, placed_s = reservation.placement, self._clock.now()
        start = self._start_request(prepared, progress, placement, deadline_s)
        stream = self._workers.start(placement.decode_worker_id, placement.decode_address, start)

        def first_token() -> None:
            if reservation.first_token():
                self._metrics.predicted(placement.predicted_ttft_s, self._clock.now() - placed_s)

        def ended(summary: worker_pb2.SequenceFinished | None, num_unread: int) -> None:
            if num_unread:
                first_token()
            num_tokens = len(progress.token_ids) + (0 if progress.stopped else num_unread)
            if summary is not None:
                travelled = placement.HasField("prefill") and num_tokens > 1
                reservation.finished(num_tokens, summary.transfer_exposed_s if travelled else None)
            reservation.release()

        stream.on_end = ended
        try:
            while True:
                tokens, summary = await stream.next()
                if tokens:
                    first_token()
                delta = progress.take(tokens)
                if progress.stopped and summary is None:
                    yield delta
                    delta = Delta("")
                    summary = await stream.stop() or worker_pb2.SequenceFinished()
                if summary is not None:
                    self._counts.transports.update([summary.transport] if summary.transport else [])
                    yield progress.finish(summary, placement, delta)
                    return
                yield delta
        finally:
            stream.close()

    def _start_request(
        self,
        prepared: _Prepared,
        progress: Progress,
        placement: router_pb2.WorkerPlacement,
        deadline_s: float,
    ) -> worker_pb2.StartRequest:
        """Return what the decode worker needs, under an id of our own: clients may give two requests one id."""
        self._count += 1
        return worker_pb2.StartRequest(
            request_id=f"{prepared.request.request_id}/{self._id}.{self._count}",
            token_ids=[*prepared.token_ids, *progress.token_ids],
            num_prompt_tokens=len(prepared.token_ids),
            sampling=prepared.sampling,
            prefill=placement.prefill if placement.HasField("prefill") else None,
            timeout_s=self._left_s(deadline_s),
            cache_salt=prepared.cache_salt,
            prefix_holder=placement.prefix_holder if placement.HasField("prefix_holder") else None,
        )

    def _left_s(self, deadline_s: float) -> float:
        """Return what is left of a deadline, more than nothing."""
        return max(1e-3, deadline_s - self._clock.now())


def _max_tokens(request: Request) -> int | None:
    return request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None
