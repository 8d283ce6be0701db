"""Plays a load-test plan against a simulated cluster and hands out the same run file."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from cluster.service_level import ORDINARY, Priority, ServiceLevel
from common.errors import ConfigError
from loadtest.arrivals import ClosedArrival, TraceArrival, at_rate
from loadtest.content import Segment, TokenPrompt, content_id
from loadtest.execute import Plan, finished_run, rate_point
from loadtest.goodput import GoodputSearch
from loadtest.records import RequestRecord, RunFile
from loadtest.runner import timed
from loadtest.simulator.cluster import ClusterShape, SimulatedCluster
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.names import block_names
from loadtest.simulator.profile import Profile
from loadtest.workload import Session, take

_GAPS_SESSIONS_MAX = 20_000
"""Beyond so many sessions, single gaps between tokens are not kept: they would fill the memory."""


class Simulation:
    """One plan, one cluster, one virtual clock. The same plan, shape and profile give the same records."""

    def __init__(self, plan: Plan, profile: Profile, shape: ClusterShape) -> None:
        self.records: list[RequestRecord] = []
        self._plan = plan
        self._profile = profile
        self._timeline = Timeline()
        keeps_gaps = _num_sessions(plan, profile.context_tokens) <= _GAPS_SESSIONS_MAX
        self.cluster = SimulatedCluster(profile, shape, self._timeline, plan.options.seed, keeps_gaps)
        self._num_jobs = 0
        targets = plan.options.targets
        self._level = ORDINARY if targets is None else ServiceLevel(Priority.NORMAL, targets.ttft_s, targets.tpot_s)

    def run(self) -> list[RequestRecord]:
        """Simulate to the end.

        Raises:
            ConfigError: the workload has prompts that are no token ids, or no times although they were asked for.
        """
        plan = self._plan
        sessions = take(plan.workload, plan.options.seed, self._profile.context_tokens, plan.sessions_max)
        match plan.arrival:
            case ClosedArrival(users=users, think_s=think_s):
                for _ in range(users):
                    self._next_of_user(sessions, think_s)
            case _:
                self._next_arrival(timed(sessions, plan.arrival, plan.options.seed))
        with _garbage_not_looked_for():
            self._timeline.run()
        self.cluster.check_idle()
        return self.records

    def _is_over(self, at: float) -> bool:
        return self._plan.options.duration_s is not None and at > self._plan.options.duration_s

    def _next_arrival(self, arrivals: Iterator[tuple[float, Session]]) -> None:
        at, session = next(arrivals, (0.0, None))
        if session is None or self._is_over(at):
            return

        def arrive() -> None:
            self._ask(session, 0, (), at, lambda: None)
            self._next_arrival(arrivals)

        self._timeline.at(at, arrive)

    def _next_of_user(self, sessions: Iterator[Session], think_s: float) -> None:
        session = next(sessions, None)
        if session is None or self._is_over(self._timeline.now()):
            return

        def again() -> None:
            self._timeline.after(think_s, lambda: self._next_of_user(sessions, think_s))

        self._ask(session, 0, (), self._timeline.now(), again)

    def _ask(
        self, session: Session, turn: int, said: tuple[Segment, ...], intended: float, ended: Callable[[], None]
    ) -> None:
        """Send one turn; when it is answered, the next one, and after the last call `ended`."""
        what = session.turns[turn]
        parts = (*said, *_segments(what.prompt))
        answer = Segment(content_id("answer", session.number, turn), what.output_tokens)
        job = self._job(session, turn, parts, answer, intended)

        def done(record: RequestRecord) -> None:
            self.records.append(record)
            if record.error is not None or turn + 1 == len(session.turns):
                ended()
                return
            at = self._timeline.now() + session.turns[turn + 1].think_s
            self._timeline.at(at, lambda: self._ask(session, turn + 1, (*parts, answer), at, ended))

        self.cluster.submit(job, done)

    def _job(self, session: Session, turn: int, parts: tuple[Segment, ...], answer: Segment, intended: float) -> Job:
        num_prompt = sum(part.num_tokens for part in parts)
        # The last token's KV is never computed.
        num_blocks = (num_prompt + answer.num_tokens - 1) // self._profile.block_tokens
        self._num_jobs += 1
        return Job(
            number=self._num_jobs,
            session=session.number,
            turn=turn,
            parts=parts,
            answer=answer,
            names=block_names((*parts, answer), self._profile.block_tokens, num_blocks),
            num_prompt=num_prompt,
            intended=intended,
            sent=self._timeline.now(),
            level=self._level,
        )


def simulate(plan: Plan, profile: Profile, shape: ClusterShape) -> RunFile:
    """Simulate the plan once.

    Raises:
        ConfigError: see Simulation.run; or the shape has nobody to decode, or no such policy.
    """
    records = Simulation(plan, profile, shape).run()
    meta = plan.meta(f"simulated: {_describe(shape)}", profile.name) | {"cluster": asdict(shape)}
    return finished_run(plan, records, meta)


def simulated_goodput(plan: Plan, profile: Profile, shape: ClusterShape, search: GoodputSearch) -> RunFile:
    """Search the highest rate within the SLO; every measurement begins with empty caches and the same content.

    Raises:
        ConfigError: as `simulate`.
    """
    best: RunFile | None = None
    while (rate := search.next_rate) is not None:
        run = simulate(replace(plan, arrival=at_rate(plan.arrival, rate)), profile, shape)
        search.observe(rate_point(rate, run))
        if best is None or rate == search.best_rate or not search.best_rate:
            best = run
    assert best is not None
    return replace(best, points=tuple(search.points))


@contextmanager
def _garbage_not_looked_for() -> Iterator[None]:
    """Look for no garbage within the block: a simulation leaves no cycles, and its state is large to go through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_sessions(plan: Plan, window: int) -> float:
    """Return about how many sessions the plan has."""
    if plan.sessions_max is not None:
        return plan.sessions_max
    if plan.options.duration_s is None:
        return sum(1 for _ in plan.workload.sessions(plan.options.seed, window))
    match plan.arrival:
        case ClosedArrival() | TraceArrival():
            return _GAPS_SESSIONS_MAX
        case paced:
            return paced.rate * plan.options.duration_s


def _segments(prompt: object) -> tuple[Segment, ...]:
    if isinstance(prompt, TokenPrompt):
        segments = tuple(part for part in prompt.parts if isinstance(part, Segment))
        if len(segments) == len(prompt.parts):
            return segments
    raise ConfigError("a simulation needs a workload by token ids: not `prompts`, and no conversation with form=chat")


def _describe(shape: ClusterShape) -> str:
    counts = {"prefill": shape.prefill, "decode": shape.decode, "both": shape.both}
    return ", ".join(f"{count} {role}" for role, count in counts.items() if count) + f", {shape.policy}"
