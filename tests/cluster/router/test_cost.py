"""The cost policy weighs seconds: its choices follow from what waiting, computing and hindering cost."""

from collections import Counter, deque
from random import Random

import pytest

from cluster.router.backlog import Prompt
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.cost import Cost
from cluster.router.prefix_index import Snapshot
from cluster.router.router import Router
from cluster.router.step_model import StepModel
from cluster.router.worker import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.chain_hash import chain_hashes
from common.clock import ManualClock

BLOCK = 16
MODEL = StepModel(base_s=0.005, token_s=1e-3, pair_s=1e-8, sequence_s=1e-3, context_s=1e-7)


def cluster(*names: str, clock: ManualClock | None = None) -> Router:
    """Return a router with idle workers whose steps cost MODEL; p…: prefill, d…: decode, b…: both."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    router = Router(Cost(), Random(0), clock or ManualClock())
    router.set_workers([WorkerInfo(name, "here", roles[name[0]]) for name in names])
    for name in names:
        router.welcome(name, WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16))
        router.index.replace(name, [])
        router.report(name, WorkerLoad(free_blocks=4096))
        know(router, name, MODEL)
    return router


def know(router: Router, name: str, model: StepModel) -> None:
    """Let the router know what a worker's steps cost."""
    row = router.workers.get(name)
    assert row is not None
    row.candidate.model = model
    row.take_report(row.load, router.now())


def chain(num_tokens: int = 1600, mark: int = 0) -> list[bytes]:
    return chain_hashes(range(mark, mark + num_tokens), BLOCK)


def ask(num_tokens: int = 1600, mark: int = 0, ttft_target_s: float | None = None) -> PlacementRequest:
    return PlacementRequest("r", num_tokens, 100, chain(num_tokens, mark), ttft_target_s=ttft_target_s)


def placed(router: Router, request: PlacementRequest) -> tuple[str, str | None]:
    reservation = router.place(request)
    placement = reservation.placement
    assert placement is not None
    reservation.release()
    return placement.decode.worker_id, None if placement.prefill is None else placement.prefill.worker_id


def test_an_idle_cluster_prefills_apart() -> None:
    assert placed(cluster("p0", "d0"), ask()) == ("d0", "p0")


def test_a_colocated_worker_alone_prefills_itself() -> None:
    assert placed(cluster("b0"), ask()) == ("b0", None)


def test_the_holder_is_worth_a_short_wait() -> None:
    router = cluster("p0", "p1", "d0")
    router.index.replace("p0", chain())
    row = router.workers.get("p0")
    assert row is not None

    assert placed(router, ask())[1] == "p0"
    row.candidate.backlog.add("short", Prompt(20, 20, 0.005), 0.0)
    assert placed(router, ask())[1] == "p0"
    row.candidate.backlog.add("long", Prompt(1000, 1000, 1.0), 0.0)
    assert placed(router, ask())[1] == "p0", "what is left of it is less than of those there"
    row.candidate.backlog.add("next", Prompt(1, 1, 1.0), 0.0)
    assert placed(router, ask())[1] == "p1"


def test_the_decode_worker_prefills_what_it_holds_nearly_all_of() -> None:
    router = cluster("p0", "d0", "d1")
    router.index.replace("d1", chain())

    assert placed(router, ask(1608)) == ("d1", None)
    assert router.counters["local_prefills_chosen"] == 1
    assert router.counters["local_prefill_fallback"] == 0


def test_it_does_not_when_that_would_hold_up_many_sequences() -> None:
    router = cluster("p0", "d0")
    router.index.replace("d0", chain())
    assert placed(router, ask()) == ("d0", None)

    router.report("d0", WorkerLoad(running_sequences=30, used_blocks=300))

    assert placed(router, ask()) == ("d0", "p0")


def test_a_decoder_whose_pool_is_full_is_left_alone() -> None:
    router = cluster("p0", "d0", "d1")
    router.report("d0", WorkerLoad(running_sequences=3, used_blocks=4090))
    router.report("d1", WorkerLoad(running_sequences=5, used_blocks=100))

    assert placed(router, ask())[0] == "d1"


def test_targets_come_before_the_sum() -> None:
    router = cluster("p0", "d0", "d1")
    router.index.replace("d1", chain())
    router.report("d1", WorkerLoad(running_sequences=20, used_blocks=200))
    assert placed(router, ask())[1] == "p0"
    pairs = router.explanations.latest(1)[0].considered
    fastest = min(pairs, key=lambda pair: pair.first.ttft_s)
    assert (fastest.decode.worker_id, fastest.prefill) == ("d1", None)

    assert placed(router, ask(ttft_target_s=1.1 * fastest.first.ttft_s)) == ("d1", None)
    assert placed(router, ask(ttft_target_s=0.5 * fastest.first.ttft_s))[1] == "p0", "nobody can: the least sum"


def test_a_slow_worker_gets_less() -> None:
    router = cluster("p0", "p1", "d0")
    know(router, "p1", StepModel(*(4 * part for part in MODEL)))

    live = [router.place(ask(mark=10_000 * number)) for number in range(40)]

    counts = Counter(r.placement.prefill.worker_id for r in live if r.placement and r.placement.prefill)
    assert 3 < counts["p0"] / counts["p1"] < 6


def test_what_lies_in_slower_tiers_counts_for_less() -> None:
    router = cluster("p0", "p1", "d0")
    whole = chain()
    router.index.replace("p0", Snapshot(pool=whole[:20], host=whole[20:]))
    router.index.replace("p1", whole)

    assert placed(router, ask())[1] == "p1"
    router.lose("p1", "gone")
    estimate = router.predict(ask())
    assert estimate.prefill is not None
    assert (estimate.first.num_cached, estimate.first.restore_s > 0) == (1599, True)


@pytest.mark.parametrize(
    ("token_bytes", "num_cached"), [(20_000, 1599), (600_000, 1599), (2_000_000, 640), (20_000_000, 320)]
)
def test_what_is_brought_back_from_host_or_disk_depends_on_how_large_the_models_kv_is(
    token_bytes: int, num_cached: int
) -> None:
    router, whole = cluster("p0", "d0"), chain()
    router.welcome("p0", WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16, block_bytes=token_bytes * BLOCK))
    router.report("p0", WorkerLoad(free_blocks=4096))
    know(router, "p0", MODEL)
    router.index.replace("p0", Snapshot(pool=whole[:20], host=whole[20:40], disk=whole[40:]))

    first = router.predict(ask()).first

    assert first.num_cached == num_cached
    restored = {320: 0, 640: 320 / 6.5e9}.get(num_cached, 320 / 6.5e9 + 959 / 6.5e8)
    assert first.restore_s == pytest.approx(token_bytes * restored)


def test_a_prompt_follows_its_sibling_that_is_being_prefilled() -> None:
    clock = ManualClock()
    router = cluster("p0", "p1", "p2", "p3", "d0", clock=clock)
    siblings = [PlacementRequest(str(i), 1640, 10, [*chain(), *chain(32, 5000 * (i + 1))]) for i in range(3)]

    first = router.place(siblings[0])
    clock.advance(1.0)
    second = router.place(siblings[1])
    assert first.placement is not None
    assert second.placement is not None
    assert second.placement.prefill == first.placement.prefill
    assert second.placement.prefill_hit_blocks == 100

    for failed in (first, second):
        failed.release()
    assert router.predict(siblings[2]).first.num_cached == 0


@pytest.mark.parametrize("role", ["p", "b"])
@pytest.mark.parametrize("in_flight", [8, 64])
def test_a_prefix_that_all_share_does_not_pull_everything_to_one_worker(role: str, in_flight: int) -> None:
    """FIELD_PROBLEMS 42: 90 % common prefix, equal suffixes, max/mean load below 1.3 on four workers."""
    names = [f"{role}{number}" for number in range(4)]
    router = cluster(*names, *(["d0"] if role == "p" else []))
    common = chain(1440)
    router.index.replace(names[0], common)
    counts: Counter[str] = Counter()
    running: deque[tuple[Reservation, str]] = deque()
    for number in range(400):
        request = PlacementRequest(str(number), 1600, 20, [*common, *chain(160, 100_000 + 1000 * number)])
        reservation = router.place(request)
        assert reservation.placement is not None
        prefiller = (reservation.placement.prefill or reservation.placement.decode).worker_id
        counts[prefiller] += 1
        running.append((reservation, prefiller))
        if len(running) == in_flight:
            reservation, prefiller = running.popleft()
            router.index.replace(prefiller, common)
            reservation.first_token()
            reservation.release()

    assert max(counts.values()) / 100 < 1.3, counts


def test_what_a_copy_of_a_hot_prefix_costs_is_not_held_against_the_request_that_makes_it() -> None:
    router = cluster("p0", "p1", "d0")
    for name in ("p0", "p1", "d0"):
        know(router, name, MODEL._replace(token_s=1e-6))  # so fast that nothing is worth a fetch
    common = chain(1440)
    router.index.replace("p0", common)
    for _ in range(60):
        router.place(PlacementRequest("r", 1450, 20, common)).release()

    router.place(PlacementRequest("last", 1450, 20, common))

    spread = {
        pair.prefill.worker_id: pair.terms()["spread"]
        for pair in router.explanations.of("last")[0].considered
        if pair.prefill is not None
    }
    assert spread["p0"] == 0
    assert spread["p1"] < 0
    pair = next(pair for pair in router.explanations.of("last")[0].considered)
    assert pair.total_s == pytest.approx(sum(pair.terms().values()))


def test_reservations_leave_nothing_behind() -> None:
    router = cluster("p0", "d0", "b0")
    live = [router.place(ask(mark=100 * number)) for number in range(50)]
    for reservation in live[::2]:
        reservation.first_token()
    for reservation in live:
        reservation.release()

    router.check()


def test_a_worker_that_says_its_token_budget_is_known_to_finish_whole_steps() -> None:
    def predicted(token_budget: int) -> float:
        router = cluster("p0", "d0")
        router.welcome("p0", WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16, token_budget=token_budget))
        router.report("p0", WorkerLoad(free_blocks=4096))
        know(router, "p0", MODEL)
        router.report("d0", WorkerLoad(running_sequences=30, used_blocks=300))
        for num_tokens in (1600, 8000):
            router.place(ask(num_tokens, mark=num_tokens))
        placement = router.place(ask(3200, mark=50_000)).placement
        assert placement is not None
        assert placement.prefill is not None
        return placement.predicted_ttft_s

    assert predicted(1600) == pytest.approx(predicted(0) + MODEL.base_s), "it takes two steps"
    assert predicted(4000) - predicted(0) == pytest.approx(2.4 + 0.8, rel=0.1), "of the long one, in either step"


@pytest.mark.parametrize(("token_budget", "num_steps"), [(0, 1), (1600, 1), (1599, 2), (500, 4)])
def test_a_prompt_of_several_steps_pays_for_each_of_them(token_budget: int, num_steps: int) -> None:
    router = cluster("p0", "d0")
    router.welcome("p0", WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16, token_budget=token_budget))
    router.report("p0", WorkerLoad(free_blocks=4096))
    know(router, "p0", MODEL)
    router.report("d0", WorkerLoad(running_sequences=30, used_blocks=300))

    estimate = router.predict(ask(1600))

    assert estimate.prefill is not None
    one_step_s = MODEL.prefill_s(1600, 0)
    assert estimate.first.compute_s == pytest.approx(one_step_s + (num_steps - 1) * MODEL.base_s)


def test_a_worker_that_takes_the_place_of_another_is_found_by_its_own_cache() -> None:
    router = cluster("p0", "p1", "d0")
    router.index.replace("p1", chain())
    assert placed(router, ask())[1] == "p1"

    router.set_workers([WorkerInfo("p0", "here", Role.PREFILL), WorkerInfo("d0", "here", Role.DECODE)])
    assert placed(router, ask())[1] == "p0"
    infos = [WorkerInfo(name, "here", Role.PREFILL) for name in ("p0", "p2")]
    router.set_workers([*infos, WorkerInfo("d0", "here", Role.DECODE)])
    router.welcome("p2", WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16))
    router.index.replace("p2", chain())
    router.report("p2", WorkerLoad(free_blocks=4096))
    know(router, "p2", MODEL)

    assert placed(router, ask())[1] == "p2"
