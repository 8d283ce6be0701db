"""Asks an idle cluster for prompts of several lengths and batches of several sizes, and notes what each took.

All that is known afterwards comes from the answers' own timing (Timing in common.proto), from the gaps between tokens,
and from the workers' handshakes in the cluster's status.
"""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate

import grpc.aio

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, router_pb2, worker_pb2
from common.errors import BatonError, ConfigError
from common.status import typed_rpc_errors
from loadtest.client import BatonTarget, ClientRequest, StreamLog
from loadtest.content import Segment, TokenPrompt, content_id
from loadtest.records import RequestRecord
from loadtest.simulator.fit import DecodeSeen, PrefillSeen, PushSeen

_TIMEOUT_S = 300.0
_TOKENS_MIN = 16
"""Fewest tokens of a prompt that is asked for."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What to ask for."""

    prompts: Sequence[int] = (64, 192, 448, 960, 1920)
    """Lengths, each asked for `repeats` times, one after the other."""
    repeats: int = 3
    batches: Sequence[tuple[int, int]] = ((1, 48), (2, 48), (4, 48), (8, 48), (1, 768), (4, 768))
    """Requests that decode at once, and the length of their prompts."""
    output_tokens: int = 40
    """Of each, while all of them decode."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What the handshakes say; 0 where they do not."""

    role: worker_pb2.WorkerRole.ValueType
    num_blocks: int
    limits: worker_pb2.WorkerLimits


@dataclass(frozen=True, slots=True)
class Observations:
    """What was seen."""

    model_id: str
    backend: str
    context_tokens: int
    block_tokens: int
    kv_bytes_per_token: int
    workers: Sequence[WorkerKind]
    hops_s: Sequence[float]
    """TTFT less prefill of short prompts, over the messages in it: one message each."""
    prefills: Sequence[PrefillSeen]
    decodes: Sequence[DecodeSeen]
    pushes: Sequence[PushSeen]
    """Empty without prefill workers."""


_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_HOPS_APART, _HOPS_TOGETHER = 6, 5
"""Messages in a TTFT: client, gateway and router four times, decode worker, and prefill worker if there is one."""


async def observe(address: str, plan: ProbePlan = ProbePlan()) -> Observations:
    """Probe a cluster, which should do nothing else meanwhile.

    Args:
        address: of the gateway's gRPC API.
        plan: what to ask for; what does not fit the window is left out.

    Raises:
        BatonError: the cluster cannot be reached or an answer failed.
        ConfigError: no worker is ready, or their handshakes lack the layout.
    """
    async with _target(address) as target:
        status = await cluster_status(address)
        rows = [row for row in status.router.workers if row.state == "ready"]
        layout = rows[0].handshake.layout if rows else None
        if layout is None or layout.dtype not in _DTYPE_BYTES:
            raise ConfigError(f"{address} has no ready worker that tells its KV's layout")
        model = await target.model()
        prober = _Prober(target, model.context_tokens, _token_budget(rows))
        await prober.ask(_TOKENS_MIN, 2)  # the first request opens connections
        lengths = [length for length in plan.prompts if length + 2 <= model.context_tokens]
        alone = [await prober.ask(length, 2) for length in lengths for _ in range(plan.repeats)]
        token_s = min(answer.server.prefill_s / answer.prompt_tokens for answer in alone if answer.server is not None)
        step_s = (await prober.ask(_TOKENS_MIN, 8)).tpot_s or 1.0
        batches = []
        for size, context in plan.batches:
            # The first must still decode when the last begins, and they are prefilled one after the other.
            output = plan.output_tokens + math.ceil(2 * (size - 1) * context * token_s / step_s)
            if context + output <= model.context_tokens:
                batches.append(await asyncio.gather(*(prober.ask(context, output) for _ in range(size))))
    kv_bytes = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _DTYPE_BYTES[layout.dtype]
    return Observations(
        model_id=model.id,
        backend=rows[0].handshake.backend,
        context_tokens=model.context_tokens,
        block_tokens=layout.block_tokens,
        kv_bytes_per_token=kv_bytes,
        workers=[WorkerKind(row.role, row.handshake.num_blocks, row.handshake.limits) for row in rows],
        hops_s=[_hop_s(answer) for answer in alone if answer.prompt_tokens <= min(lengths)],
        prefills=[prober.prefill_seen(answer) for answer in alone],
        decodes=[seen for batch in batches for seen in decodes_seen(batch)],
        pushes=[prober.push_seen(answer, kv_bytes) for answer in alone if answer.transport != "local"],
    )


@asynccontextmanager
async def _target(address: str) -> AsyncIterator[BatonTarget]:
    target = BatonTarget(address)
    try:
        yield target
    finally:
        await target.close()


async def cluster_status(address: str) -> admin_pb2.ClusterStatus:
    """Return the cluster's status.

    Raises:
        BatonError: it cannot be reached.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        with typed_rpc_errors():
            return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_TIMEOUT_S)


def _token_budget(rows: Sequence[router_pb2.WorkerStatus]) -> int:
    """Return the budget of those who prefill; 0: unknown."""
    order = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_BOTH, worker_pb2.WORKER_ROLE_DECODE)
    return next((row.handshake.limits.token_budget for role in order for row in rows if row.role == role), 0)


class _Prober:
    """Asks for prompts that nobody has cached, so that all of each is computed."""

    def __init__(self, target: BatonTarget, context_tokens: int, token_budget: int) -> None:
        self._target = target
        self._token_budget = token_budget or context_tokens
        self._run = time.time_ns()
        self._count = 0

    async def ask(self, prompt_tokens: int, output_tokens: int) -> RequestRecord:
        """Send a request and return its record.

        Raises:
            BatonError: it failed, or the answer does not say what is needed.
        """
        self._count += 1
        prompt = TokenPrompt((Segment(content_id("probe", self._run, self._count), prompt_tokens),))
        request = ClientRequest(f"probe-{self._count}", prompt, output_tokens, True, _TIMEOUT_S, self._count)
        log, sent = StreamLog(), time.monotonic()
        await self._target.generate(request, log)
        if log.server is None or len(log.token_times) != output_tokens:
            raise BatonError(f"asked for {output_tokens} tokens with timing, got {len(log.token_times)}")
        return log.record(request, self._count, 0, sent, sent, None, 0.0)

    def prefill_seen(self, answer: RequestRecord) -> PrefillSeen:
        """Return what an answer says of prefill."""
        assert answer.server is not None
        computed = answer.prompt_tokens - answer.cached_tokens
        return PrefillSeen(computed, -(-computed // self._token_budget), answer.server.prefill_s)

    def push_seen(self, answer: RequestRecord, bytes_per_token: int) -> PushSeen:
        """Return what an answer says of its transfer."""
        assert answer.server is not None
        computed = answer.prompt_tokens - answer.cached_tokens
        last = (computed - 1) % self._token_budget + 1
        return PushSeen(last * bytes_per_token, answer.server.transfer_exposed_s)


def _hop_s(answer: RequestRecord) -> float:
    assert answer.server is not None
    assert answer.ttft_s is not None
    hops = _HOPS_TOGETHER if answer.transport == "local" else _HOPS_APART
    return max(0.0, answer.ttft_s - answer.server.prefill_s) / hops


def decodes_seen(batch: Sequence[RequestRecord]) -> list[DecodeSeen]:
    """Return one observation for each worker that decoded a part of the batch.

    It is of the steps between the last beginning and the first end, in which all of its sequences took part. Their mean
    is what a TPOT is made of; single gaps say when messages were read: some come together, and the next one late.
    """
    by_worker = defaultdict[str | None, list[RequestRecord]](list)
    for answer in batch:
        by_worker[answer.decode_worker].append(answer)
    seen = [_steps_seen(answers) for answers in by_worker.values()]
    return [one for one in seen if one is not None]


def _steps_seen(answers: Sequence[RequestRecord]) -> DecodeSeen | None:
    times = [list(accumulate(answer.gaps_s, initial=answer.first_token_s or 0.0)) for answer in answers]
    begin, end = max(one[1] for one in times), min(one[-1] for one in times)
    seconds, num_steps, context = 0.0, 0, 0.0
    for answer, one in zip(answers, times, strict=True):
        inside = [position for position, at in enumerate(one) if begin <= at <= end]
        if inside:
            seconds += one[inside[-1]] - one[inside[0]]
            num_steps += len(inside) - 1
        context += answer.prompt_tokens + (statistics.fmean(inside) if inside else 0.0)
    return DecodeSeen(len(answers), context, seconds / num_steps) if seconds else None
