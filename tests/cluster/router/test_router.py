"""The router's core: who may be chosen, what is reserved, and that all of it comes back."""

import logging
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.router.fetch_model import FetchTotals
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.registry import POLICIES
from cluster.router.router import Router
from cluster.router.worker import Account, Role, State, WorkerFacts, WorkerInfo, WorkerLoad
from common.chain_hash import HASH_BYTES, chain_hashes, probe
from common.clock import Clock, ManualClock
from common.errors import InvalidRequestError, MismatchError, WorkerLostError
from tests.cluster.router.sizes import reachable_bytes

BLOCK = 4
P0, P1 = WorkerInfo("p0", "h:1", Role.PREFILL), WorkerInfo("p1", "h:2", Role.PREFILL)
D0, D1 = WorkerInfo("d0", "h:3", Role.DECODE), WorkerInfo("d1", "h:4", Role.DECODE)
B0 = WorkerInfo("b0", "h:5", Role.BOTH)


def facts(
    generation: int = 1, model_id: str = "m", layout: str = "l", num_blocks: int = 100, window: int = 512
) -> WorkerFacts:
    return WorkerFacts(generation, model_id, layout, BLOCK, probe(BLOCK), num_blocks, window)


def make(*infos: WorkerInfo, policy: str = "prefix", clock: Clock | None = None) -> Router:
    """Return a router that has these workers, all ready."""
    router = Router(POLICIES[policy](), Random(0), clock)
    router.set_workers(infos)
    for info in infos:
        router.welcome(info.worker_id, facts())
        router.index.replace(info.worker_id, [])
        router.report(info.worker_id, WorkerLoad())
    return router


def ask(num_tokens: int = 10, excluded: set[str] | None = None, tokens: list[int] | None = None) -> PlacementRequest:
    token_ids = list(range(num_tokens)) if tokens is None else tokens
    return PlacementRequest("r", len(token_ids), 20, chain_hashes(token_ids, BLOCK), frozenset(excluded or ()))


def ids(reservation: Reservation) -> tuple[str, str | None]:
    placement = reservation.placement
    assert placement is not None
    return placement.decode.worker_id, None if placement.prefill is None else placement.prefill.worker_id


def account(router: Router, worker_id: str) -> Account:
    worker = router.workers.get(worker_id)
    assert worker is not None
    return worker.account


def test_a_request_goes_to_a_pair_and_a_colocated_worker_is_alone() -> None:
    assert ids(make(P0, D0).place(ask())) == ("d0", "p0")
    assert ids(make(B0).place(ask())) == ("b0", None)
    assert make(B0).counters == {}


def test_each_side_is_chosen_by_its_own_cache() -> None:
    router = make(P0, P1, D0, D1)
    chain = chain_hashes(range(12), BLOCK)
    router.index.apply("p1", 1, True, chain)
    router.index.apply("d1", 1, True, chain[:2])

    placement = router.place(ask(12)).placement

    assert placement is not None
    assert (placement.decode, placement.prefill) == (D1, P1)
    assert (placement.decode_hit_blocks, placement.prefill_hit_blocks) == (2, 3)
    assert "d1 holds 2" in placement.reason


def fetch_of(router: Router, tokens: list[int]) -> tuple[str, int] | None:
    placement = router.place(ask(tokens=tokens)).placement
    assert placement is not None
    return None if placement.holder is None else (placement.holder.worker_id, placement.holder_blocks)


def test_what_another_worker_holds_is_fetched_where_that_is_faster_than_computing_it() -> None:
    long, short = list(range(360)), list(range(1000, 1020))
    router = make(P0, D0, D1, policy="cost")
    router.index.apply("d0", 1, True, chain_hashes(long, BLOCK))
    router.index.apply("d0", 2, True, chain_hashes(short, BLOCK))
    router.report("d0", WorkerLoad(running_sequences=60))  # too busy to prefill

    assert fetch_of(router, [*long, 1]) == ("d0", 90)
    assert fetch_of(router, [*short, 1]) is None
    assert fetch_of(router, [7, *long]) is None


@pytest.mark.parametrize(("token_s", "fetched"), [(1e-6, ("d0", 90)), (1e-2, None)])
def test_where_fetches_have_been_slow_a_prompt_is_computed(token_s: float, fetched: tuple[str, int] | None) -> None:
    long = list(range(360))
    router = make(P0, D0, D1, policy="cost")
    router.index.apply("d0", 1, True, chain_hashes(long, BLOCK))
    router.report("d0", WorkerLoad(running_sequences=60))  # too busy to prefill

    for name in ("p0", "d1"):
        router.report(name, WorkerLoad(fetches=FetchTotals(1, 1000, 1000 * token_s)))

    assert fetch_of(router, [*long, 1]) == fetched


def test_over_a_link_that_always_fails_fetches_are_tried_one_at_a_time_and_seldom_until_it_works() -> None:
    long, clock, fetches, tried_at = list(range(360)), ManualClock(), FetchTotals(), list[float]()
    router = make(P0, D0, D1, policy="cost", clock=clock)
    router.index.apply("d0", 1, True, chain_hashes(long, BLOCK))
    router.report("d0", WorkerLoad(running_sequences=60))  # too busy to prefill

    def place() -> bool:
        reservation = router.place(ask(tokens=[*long, 1]))
        reservation.release()
        assert reservation.placement is not None
        return reservation.placement.holder is not None

    def seconds_pass(count: int, fetches: FetchTotals) -> None:
        clock.advance(float(count))
        for name in ("p0", "d1"):
            router.report(name, WorkerLoad(fetches=fetches))

    for _ in range(360):  # a prompt every five seconds, half an hour long
        if place():
            tried_at.append(clock.now())
            fetches = FetchTotals(failed_tokens=360 * len(tried_at), failed_seconds=5.0 * len(tried_at))
        seconds_pass(5, fetches)

    assert 4 <= len(tried_at) <= 12
    for _ in range(600):
        if place():
            break
        seconds_pass(1, fetches)
    assert not place()  # one tries, the others wait
    seconds_pass(1, fetches._replace(fetches=1, tokens=360, seconds=0.01))
    assert all(place() for _ in range(10))


def test_where_kv_is_long_waited_for_the_decoder_prefills_and_after_some_minutes_the_way_is_tried_again() -> None:
    clock, prompts = ManualClock(), iter(range(1000, 10_000, 300))
    router = make(P0, D0, policy="cost", clock=clock)

    def place() -> str | None:
        first = next(prompts)
        reservation = router.place(ask(tokens=list(range(first, first + 300))))
        reservation.first_token()
        reservation.release(1.0)  # so long it waited, if it was prefilled elsewhere
        return ids(reservation)[1]

    assert [place() for _ in range(3)] == ["p0", None, None]
    clock.advance(600.0)
    for name in ("p0", "d0"):
        router.report(name, WorkerLoad())
    assert [place() for _ in range(3)] == ["p0", None, None]


def test_nothing_is_fetched_for_a_policy_that_does_not_reckon_in_seconds_or_of_what_is_only_expected() -> None:
    long = list(range(360))
    router = make(P0, D0, D1, policy="least_loaded")
    router.index.apply("d0", 1, True, chain_hashes(long, BLOCK))
    assert fetch_of(router, [*long, 1]) is None

    router = make(P0, P1, D0, policy="cost")
    assert fetch_of(router, [*long, 1]) is None
    assert fetch_of(router, [*long, 1]) is None


def test_a_conversation_follows_all_of_its_tokens_not_its_first_message() -> None:
    router = make(D0, D1)
    common, one, other = list(range(8)), list(range(8)) + [50] * 8, list(range(8)) + [60] * 8
    router.index.apply("d0", 1, True, chain_hashes(one, BLOCK))
    router.index.apply("d1", 1, True, chain_hashes(other, BLOCK))

    assert ids(router.place(ask(tokens=[*other, 1]))) == ("d1", None)
    assert ids(router.place(ask(tokens=[*one, 1]))) == ("d0", None)
    assert common == one[:8]


def test_without_a_ready_prefill_worker_the_decoder_prefills_and_it_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = make(P0, D0)
    router.lose("p0", "killed")

    with caplog.at_level(logging.WARNING):
        placed = [ids(router.place(ask())) for _ in range(3)]

    assert placed == [("d0", None)] * 3
    assert router.counters["local_prefill_fallback"] == 3
    assert sum("no prefill worker can be used" in record.message for record in caplog.records) == 1


def test_without_the_fallback_a_request_fails_while_no_prefill_worker_can_be_used() -> None:
    router = Router(POLICIES["cost"](), Random(0), falls_back=False)
    router.set_workers([P0, D0])
    for info in (P0, D0):
        router.welcome(info.worker_id, facts())
        router.report(info.worker_id, WorkerLoad())
    router.lose("p0", "killed")

    with pytest.raises(WorkerLostError, match="no prefill worker can take the prompt") as caught:
        router.place(ask())
    assert caught.value.retry_after_s
    assert router.num_reservations == 0

    router.set_workers([P0, D0, B0])
    router.welcome("b0", facts())
    router.report("b0", WorkerLoad())
    assert ids(router.place(ask())) == ("b0", None)
    assert router.counters["local_prefill_fallback"] == 0


def test_a_prefill_worker_whose_process_is_gone_is_missed_like_one_that_is_lost() -> None:
    """Its supervisor takes it out of the list until it is back: that must not look like a cluster without any."""
    router = make(P0, D0)
    router.set_workers([D0], absent=[P0])
    assert ids(router.place(ask())) == ("d0", None)
    assert router.counters["local_prefill_fallback"] == 1

    strict = Router(POLICIES["cost"](), Random(0), falls_back=False)
    strict.set_workers([D0], absent=[P0])
    strict.welcome("d0", facts())
    strict.report("d0", WorkerLoad())
    with pytest.raises(WorkerLostError, match="no prefill worker can take the prompt \\(1 absent\\)"):
        strict.place(ask())


def test_an_excluded_prefill_worker_is_a_fallback_too() -> None:
    router = make(P0, D0)

    assert ids(router.place(ask(excluded={"p0"}))) == ("d0", None)
    assert router.counters["local_prefill_fallback"] == 1


def test_a_cluster_without_prefill_workers_does_not_fall_back() -> None:
    router = make(D0)
    router.place(ask())

    assert router.counters["local_prefill_fallback"] == 0


@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        pytest.param(lambda router: router.lose("d0", "x"), "1 lost", id="lost"),
        pytest.param(lambda router: router.report("d0", WorkerLoad(is_draining=True)), "1 draining", id="draining"),
        pytest.param(lambda router: router.refuse("d0", "x"), "1 refused", id="refused"),
        pytest.param(lambda router: router.welcome("d0", facts(2)), "1 starting", id="starting"),
        pytest.param(lambda router: router.set_workers([P0]), "none exists", id="gone"),
    ],
)
def test_nobody_to_decode_is_said_with_the_reason_and_a_time_to_retry(disturb: object, words: str) -> None:
    router = make(P0, D0)
    assert callable(disturb)
    disturb(router)

    with pytest.raises(WorkerLostError, match=words) as caught:
        router.place(ask())

    assert caught.value.retry_after_s > 0
    assert router.num_reservations == 0


def test_all_decoders_excluded_is_a_lost_worker() -> None:
    with pytest.raises(WorkerLostError, match="d0 failed this request"):
        make(D0).place(ask(excluded={"d0"}))


def test_a_prompt_larger_than_every_pool_is_refused_for_good() -> None:
    router = make(D0)

    with pytest.raises(InvalidRequestError, match="prompt has 400 tokens, the largest pool of a worker holds 400"):
        router.place(ask(400))

    assert ids(router.place(ask(399))) == ("d0", None)


def test_a_prompt_goes_to_the_pool_that_can_hold_it() -> None:
    router = make(D0, D1)
    router.welcome("d1", facts(2, num_blocks=1000))
    router.report("d1", WorkerLoad())

    assert {ids(router.place(ask(500)))[0] for _ in range(8)} == {"d1"}


def test_a_request_goes_to_the_pool_that_can_finish_it_if_there_is_one() -> None:
    router = make(D0, D1)
    router.welcome("d1", facts(2, num_blocks=104))
    router.report("d1", WorkerLoad())

    def placed(num_tokens: int, max_output_tokens: int) -> set[str]:
        chosen = set()
        for _ in range(16):
            reservation = router.place(PlacementRequest("r", num_tokens, max_output_tokens))
            chosen.add(ids(reservation)[0])
            reservation.release()
        return chosen

    assert placed(385, 16) == {"d1"}
    assert placed(384, 16) == {"d0", "d1"}
    assert placed(399, 113) == {"d0", "d1"}, "the rest of the window is no wish of its own"
    assert placed(398, 80) == {"d0", "d1"}, "nobody can: any of them says so in numbers"


def test_a_prompt_that_fills_a_prefill_workers_pool_is_not_sent_there() -> None:
    router = make(P0, D0)
    router.welcome("d0", facts(2, num_blocks=200))
    router.report("d0", WorkerLoad())

    assert ids(router.place(ask(400))) == ("d0", None)
    assert ids(router.place(ask(399))) == ("d0", "p0")


def test_a_placement_counts_at_once_and_a_report_is_not_added_to_it() -> None:
    router = make(P0, D0, policy="least_loaded")
    router.place(ask(10))
    router.report("p0", WorkerLoad(queued_tokens=10, waiting_sequences=1))
    worker = router.workers.get("p0")
    assert worker is not None

    assert worker.candidate.queued_tokens == 10
    assert worker.candidate.num_sequences == 1

    router.report("p0", WorkerLoad(queued_tokens=25, waiting_sequences=2, running_sequences=1))
    assert (worker.candidate.queued_tokens, worker.candidate.num_sequences) == (25, 3)
    router.place(ask(tokens=list(range(50, 60))))
    assert (worker.candidate.queued_tokens, worker.candidate.num_sequences) == (35, 4)


def test_only_what_is_not_cached_is_queued() -> None:
    router = make(P0, D0)
    router.index.apply("p0", 1, True, chain_hashes(range(8), BLOCK))

    router.place(ask(10))

    assert account(router, "p0").queued_tokens == 2
    assert account(router, "d0") == Account(
        reservations=1, unstarted=1, queued_tokens=0, num_tokens=30, prompt_tokens=10
    )


def test_the_first_token_frees_the_prefill_worker_and_the_end_frees_all_once() -> None:
    router = make(P0, D0)
    reservation = router.place(ask())

    reservation.first_token()
    reservation.first_token()
    assert account(router, "p0") == Account()
    assert account(router, "d0").reservations == 1

    reservation.release()
    reservation.release()
    reservation.first_token()
    router.check()
    assert router.num_reservations == 0


def test_a_burst_of_equal_requests_spreads_over_idle_workers() -> None:
    router = make(P0, P1, D0, D1, policy="least_loaded")

    placed = [ids(router.place(ask())) for _ in range(8)]

    for side in (0, 1):
        chosen = [pair[side] for pair in placed]
        assert all(chosen.count(worker) == 4 for worker in set(chosen))


def test_ties_are_broken_at_random_over_the_long_run() -> None:
    router = make(*(WorkerInfo(f"d{i}", f"h:{i}", Role.DECODE) for i in range(4)))
    counts = dict.fromkeys(("d0", "d1", "d2", "d3"), 0)

    for _ in range(4000):
        reservation = router.place(ask())
        counts[ids(reservation)[0]] += 1
        reservation.release()

    assert all(900 < count < 1100 for count in counts.values())


def test_a_lost_workers_prefixes_vanish_and_its_return_starts_empty() -> None:
    router = make(D0)
    router.index.apply("d0", 1, True, chain_hashes(range(8), BLOCK))

    router.lose("d0", "killed")
    assert router.index.num_blocks == 0

    router.welcome("d0", facts(generation=2))
    router.index.replace("d0", [])
    router.report("d0", WorkerLoad())
    placement = router.place(ask(8)).placement
    assert placement is not None
    assert placement.decode_hit_blocks == 0


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        pytest.param(facts(model_id="other"), "model id is other, the cluster's is m", id="model"),
        pytest.param(facts(layout="half"), "block layout is half, the cluster's is l", id="layout"),
    ],
)
def test_a_worker_that_disagrees_is_refused_with_a_readable_reason(theirs: WorkerFacts, words: str) -> None:
    router = make(D0)
    router.set_workers([D0, D1])

    with pytest.raises(MismatchError, match=words):
        router.welcome("d1", theirs)

    router.report("d1", WorkerLoad())
    refused = router.workers.get("d1")
    assert refused is not None
    assert (refused.state, words in refused.reason) == (State.REFUSED, True)
    assert ids(router.place(ask())) == ("d0", None)


def test_the_only_worker_may_come_back_as_another_model() -> None:
    router = make(D0)
    router.lose("d0", "restarted")

    router.welcome("d0", facts(generation=2, model_id="other"))
    router.report("d0", WorkerLoad())

    agreed = router.agreed()
    assert agreed is not None
    assert agreed.model_id == "other"


def test_the_clusters_window_is_the_smallest() -> None:
    router = make(D0, D1)
    router.welcome("d1", facts(2, window=256))
    router.report("d1", WorkerLoad())

    assert router.context_tokens == 256


def test_a_held_reservation_counts_like_a_placed_one() -> None:
    router = make(P0, D0)

    held = router.hold("d0", "p0", num_tokens=10, max_output_tokens=5, is_prefilled=False)
    running = router.hold("d0", "p0", num_tokens=10, max_output_tokens=5, is_prefilled=True)
    elsewhere = router.hold("nobody", None, 10, 5, is_prefilled=False)

    assert router.num_reservations == 3
    assert account(router, "p0") == Account(reservations=1, queued_tokens=10, num_tokens=0)
    assert account(router, "d0") == Account(
        reservations=2, unstarted=1, queued_tokens=0, num_tokens=30, prompt_tokens=20
    )
    for reservation in (held, running, elsewhere):
        reservation.release()
    router.check()


def test_a_moved_worker_is_another_one_and_old_reservations_do_not_touch_it() -> None:
    router = make(D0)
    reservation = router.place(ask())

    router.set_workers([WorkerInfo("d0", "h:99", Role.DECODE)])
    assert account(router, "d0") == Account()

    reservation.release()
    router.check()


def test_a_worker_that_never_announces_a_block_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    router = make(D0)

    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            router.place(ask(8)).release()  # ended before its first token: nothing can be cached
        assert router.counters["silent_cache"] == 0
        for _ in range(50):
            reservation = router.place(ask(8))
            reservation.first_token()
            reservation.release()

    assert router.counters["silent_cache"] == 1
    assert sum("announces no cached block" in record.message for record in caplog.records) == 1


class ReservationMachine(RuleBasedStateMachine):
    """Places, releases, loses, returns, in any order: the accounts are always the sum of what is reserved."""

    ALL = [P0, P1, D0, D1, B0]

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.router = make(*self.ALL, policy=policy)
        self.live: list[Reservation] = []
        self.generation = 1

    @rule(num_tokens=st.integers(1, 40), excluded=st.sets(st.sampled_from([i.worker_id for i in ALL])))
    def place(self, num_tokens: int, excluded: set[str]) -> None:
        before = self.router.num_reservations
        try:
            reservation = self.router.place(ask(num_tokens, excluded))
        except WorkerLostError:
            assert self.router.num_reservations == before
            return
        assert not set(ids(reservation)) & excluded
        for worker_id in ids(reservation):
            worker = None if worker_id is None else self.router.workers.get(worker_id)
            assert worker is None or worker.state is State.READY
        self.live.append(reservation)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            reservation = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            reservation.release()

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.live:
            self.live[data.draw(st.integers(0, len(self.live) - 1))].first_token()

    @rule(info=st.sampled_from(ALL))
    def lose(self, info: WorkerInfo) -> None:
        self.router.lose(info.worker_id, "killed")

    @rule(info=st.sampled_from(ALL))
    def come_back(self, info: WorkerInfo) -> None:
        self.generation += 1
        self.router.welcome(info.worker_id, facts(self.generation))
        self.router.report(info.worker_id, WorkerLoad())

    @rule(infos=st.sets(st.sampled_from(ALL)))
    def resize(self, infos: set[WorkerInfo]) -> None:
        self.router.set_workers(sorted(infos, key=lambda info: info.worker_id))

    @rule(num_tokens=st.integers(1, 40), is_prefilled=st.booleans())
    def hold(self, num_tokens: int, is_prefilled: bool) -> None:
        self.live.append(self.router.hold("d0", "p0", num_tokens, 3, is_prefilled))

    @invariant()
    def accounts_are_sums(self) -> None:
        self.router.check()
        assert self.router.num_reservations == len(self.live)

    def teardown(self) -> None:
        for reservation in self.live:
            reservation.release()
        self.router.check()
        assert self.router.num_reservations == 0


ReservationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestReservations = ReservationMachine.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat_however_many_distinct_prompts_are_placed(policy: str) -> None:
    """FIELD_PROBLEMS 46, for all that the router remembers besides the index, whichever policy it runs."""
    clock = ManualClock()
    router = Router(POLICIES[policy](), Random(0), clock)
    router.set_workers([P0, D0, B0])
    for info in (P0, D0, B0):
        router.welcome(info.worker_id, facts())
        router.index.replace(info.worker_id, [])
        router.report(info.worker_id, WorkerLoad())

    def place(*prompts: int) -> int:
        for number in range(*prompts):
            hashes = [bytes(HASH_BYTES), *(f"{number}/{block}".encode().ljust(HASH_BYTES) for block in range(8))]
            reservation = router.place(PlacementRequest(f"r{number}", 36, 20, hashes))
            reservation.first_token()
            reservation.release()
            clock.advance(0.01)
            if number % 50 == 0:
                for info in (P0, D0, B0):
                    router.expected.reported(info.worker_id)
        return reachable_bytes(router)

    early = place(0, 1200)  # what is remembered of the last 1,024 placements is full
    assert place(1200, 3200) < early + 60_000  # one hash of each kept would be more
