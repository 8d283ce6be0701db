"""What the router knows of one worker: who it is, how it fares, what it reported, what was placed on it."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.router.backlog import Prompt
from cluster.router.fetch_model import FetchLearner, FetchTotals
from cluster.router.question import EXPOSED_TOKEN_S, Candidate
from cluster.router.room import AHEAD_S, Fulls
from cluster.router.step_model import StepLearner, StepTotals
from cluster.router.token_time import TokenTime

_AHEAD_MIN = 2
"""Prompts that a worker always gets: one to work at, one ahead."""
_SPARE_SHARE = 16
"""A worker may have a sixteenth of its sequences waiting, and not be full: the next step needs somebody at hand."""


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class State(enum.Enum):
    """Whether a worker can be used; see WorkerTable."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and place, as the supervisor gave it."""

    worker_id: str
    address: str
    role: Role
    node: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker's handshake says. All but `num_blocks` and `generation` must be alike in a cluster."""

    generation: int
    model_id: str
    layout: str
    """The block layout in words; compared as it is."""
    block_tokens: int
    hash_probe: bytes
    num_blocks: int
    context_tokens: int
    running_max: int = 0
    """Most sequences in a step; 0: unknown, or it does not decode."""
    token_budget: int = 0
    """Most prompt tokens in a step; 0: unknown."""
    block_bytes: int = 0
    """Of a block's KV; 0: unknown."""

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_tokens


class WorkerLoad(NamedTuple):
    """A worker's own report."""

    queued_tokens: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    is_draining: bool = False
    used_blocks: int = 0
    free_blocks: int = 0
    """Those that hold nothing; the rest is used or kept."""
    steps: StepTotals | None = None
    """None: it does not say."""
    fetches: FetchTotals = FetchTotals()


_NO_LOAD = WorkerLoad()


@dataclass(slots=True)
class Account:
    """What was placed on one worker and has not ended. Kept by reservations, which give back what they took."""

    reservations: int = 0
    unstarted: int = 0
    """Of the sequences to decode here: those whose first token was not seen."""
    queued_tokens: int = 0
    """Prompt tokens to prefill here, of reservations whose first token was not seen."""
    num_tokens: int = 0
    """Prompt and output tokens to hold here."""
    prompt_tokens: int = 0
    """Of these: prompt tokens."""


class _Unplaced(NamedTuple):
    """Of a worker's load, what its account did not explain when it reported; tokens may be negative."""

    queued_tokens: int
    sequences: int
    waiting: int
    """Of these: those that wait."""
    used_tokens: int


_NONE_UNPLACED = _Unplaced(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class Worker:
    """One row. What changes it keeps its candidate up to date."""

    info: WorkerInfo
    state: State = State.STARTING
    reason: str = ""
    facts: WorkerFacts | None = None
    load: WorkerLoad = _NO_LOAD
    account: Account = field(default_factory=Account)
    elders: StepLearner | None = None
    """What the whole cluster has learned of steps."""
    fetch_elders: TokenTime | None = None
    """Likewise of fetches."""
    ahead_s: float = AHEAD_S
    fulls: Fulls = field(default_factory=Fulls)
    """Counts it while it is full."""
    candidate: Candidate = field(init=False)
    _learner: StepLearner = field(init=False)
    _fetches: FetchLearner = field(init=False)
    _exposed: TokenTime = field(init=False)
    _unplaced: _Unplaced = _NONE_UNPLACED

    def __post_init__(self) -> None:
        self.candidate = Candidate(self.info.worker_id, self.info.role is Role.BOTH)
        self._learn_anew()

    def greet(self, facts: WorkerFacts) -> None:
        """Take a handshake: this is another life, and perhaps another machine."""
        self.facts = facts
        self._learn_anew()
        self.candidate.model = self._learner.model
        self.candidate.pool_tokens = facts.pool_tokens
        self.candidate.backlog.token_budget = facts.token_budget
        if facts.block_bytes:
            self.candidate.token_bytes = facts.block_bytes / facts.block_tokens
        self._refresh()

    def begin_decode(self, prompt_tokens: int, output_tokens: int) -> None:
        """A sequence is to be decoded here; `end_decode` with the same numbers takes it back."""
        account = self.account
        account.reservations += 1
        account.unstarted += 1
        account.num_tokens += prompt_tokens + output_tokens
        account.prompt_tokens += prompt_tokens
        self._refresh()

    def started(self) -> None:
        """The first token of a sequence to decode here was seen, or will not be: it waits for no place any more."""
        self.account.unstarted -= 1
        if self.load.waiting_sequences:
            self._refresh()

    def end_decode(self, prompt_tokens: int, output_tokens: int) -> None:
        """A sequence was decoded, or will not be."""
        account = self.account
        account.reservations -= 1
        account.num_tokens -= prompt_tokens + output_tokens
        account.prompt_tokens -= prompt_tokens
        self._refresh()

    def begin_prefill(self, key: object, prompt: Prompt, now: float, *, is_remote: bool) -> None:
        """A prompt is to be prefilled here, perhaps for another worker; `end_prefill` with the same key takes it back.

        A sequence that is decoded here as well is counted by `begin_decode`.
        """
        self.candidate.backlog.add(key, prompt, now)
        self.account.reservations += is_remote
        self.account.queued_tokens += prompt.num_uncached
        self._refresh()

    def end_prefill(self, key: object, prompt: Prompt, prefilled_at: float | None, *, is_remote: bool) -> None:
        """A prompt was prefilled, or (None) will not be."""
        self.candidate.backlog.remove(key, prefilled_at)
        self.account.reservations -= is_remote
        self.account.queued_tokens -= prompt.num_uncached
        self._refresh()

    def begin_fetch(self, now: float) -> None:
        """The beginning of a prompt is to be pushed here by another worker."""
        self._fetches.time.tried(now)
        self.candidate.fetch_token_s = self._fetches.time.token_s(now)

    def take_report(self, load: WorkerLoad, now: float) -> None:
        """Take the worker's own word for its load; what is placed from now on is added to it."""
        before, account, candidate, self.load = self.load.steps, self.account, self.candidate, load
        block_tokens = 0 if self.facts is None else self.facts.block_tokens
        candidate.free_tokens = load.free_blocks * block_tokens
        self._unplaced = _Unplaced(
            load.queued_tokens - account.queued_tokens,
            max(0, load.waiting_sequences + load.running_sequences - account.reservations),
            max(0, load.waiting_sequences - account.unstarted),
            load.used_blocks * block_tokens - account.prompt_tokens,
        )
        if load.steps is not None:
            if self._learner.report(load.steps):
                candidate.model = self._learner.model
            step_s = 0.0 if before is None else load.steps.mean_step_s(before)
            candidate.backlog.progressed(load.steps.prompt_tokens, step_s, now)
        candidate.token_s = candidate.model.token_s
        self._fetches.report(load.fetches, now)
        candidate.fetch_token_s = self._fetches.time.token_s(now)
        candidate.exposed_token_s = self._exposed.token_s(now)
        self._refresh()

    def forget_report(self) -> None:
        """Nothing is known of the worker but what was placed there."""
        self.load, self._unplaced = _NO_LOAD, _NONE_UNPLACED
        self.candidate.free_tokens = 0
        self._refresh()

    def saw_exposed(self, num_tokens: int, seconds: float, now: float) -> None:
        """Learn how long a sequence waited here for so many tokens' KV after its first token."""
        if num_tokens > 0:
            self._exposed.came(num_tokens, seconds, now)
            self.candidate.exposed_token_s = self._exposed.token_s(now)

    def holds(self, num_tokens: int) -> bool:
        """Whether its whole pool is large enough for so many tokens, and one more, which a worker asks for."""
        return self.facts is not None and num_tokens < self.facts.pool_tokens

    def can_finish(self, num_tokens: int, max_output_tokens: int) -> bool:
        """Whether its whole pool is large enough for all of a request that it holds.

        All that the window leaves is no wish of its own: such a request ends when the pool is full, at the latest.
        """
        if self.facts is None:
            return False
        most = num_tokens + max_output_tokens
        return most <= self.facts.pool_tokens or most >= self.facts.context_tokens

    def _learn_anew(self) -> None:
        self._learner, self._fetches = StepLearner(elders=self.elders), FetchLearner(self.fetch_elders)
        self._exposed = TokenTime(EXPOSED_TOKEN_S)

    def _refresh(self) -> None:
        """Reckon the load: what was reported, and how the account has changed since then."""
        unplaced, account, candidate = self._unplaced, self.account, self.candidate
        queued = unplaced.queued_tokens + account.queued_tokens
        candidate.queued_tokens = queued if queued > 0 else 0
        candidate.num_sequences = sequences = unplaced.sequences + account.reservations
        candidate.num_tokens = account.num_tokens
        if self.facts is not None:
            used = unplaced.used_tokens + account.prompt_tokens
            if self.load.waiting_sequences and used < account.prompt_tokens:
                used = account.prompt_tokens  # those that wait for room use none yet, but they come first
            candidate.used_tokens = used if used > 0 else 0
        candidate.step_s = candidate.model.decode_s(sequences, candidate.used_tokens)
        candidate.backlog_s = candidate.backlog.total_s
        self._mark(self._is_full())

    def leave(self) -> None:
        """The row leaves the table: from now on it counts for itself, as what was placed there ends."""
        self._mark(is_full=False)
        self.fulls = Fulls()

    def _mark(self, is_full: bool) -> None:
        if self.candidate.is_full != is_full:
            self.candidate.is_full = is_full
            self.fulls.changed(self.candidate)

    def _is_full(self) -> bool:
        candidate = self.candidate
        if candidate.backlog_s >= self.ahead_s and len(candidate.backlog) >= _AHEAD_MIN:
            return True
        running_max = 0 if self.facts is None else self.facts.running_max
        if not running_max:
            return False
        spare = max(1, running_max // _SPARE_SHARE)
        if candidate.num_sequences >= running_max + spare:
            return True
        # Who waits there waits for blocks, or for one of the `running_max` places. Whoever has a token waits no more,
        # though the worker has not reported since.
        waiting = self.load.waiting_sequences
        return waiting > spare and self._unplaced.waiting + self.account.unstarted > spare
