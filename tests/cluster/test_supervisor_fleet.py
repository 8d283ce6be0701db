"""The fleet restarts what dies, once at once and then with backoff, and the router always learns who is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.supervisor.fleet import Action, Fleet, GiveUp, Launch, Member, Phase, Place, Publish, Role

ROUTER = Member("router", Role.ROUTER)
GATEWAY = Member("gateway", Role.GATEWAY)
PREFILL = Member("prefill-0", Role.PREFILL)
DECODE = Member("decode-0", Role.DECODE)
MEMBERS = [ROUTER, GATEWAY, PREFILL, DECODE]


def place(number: int) -> Place:
    return Place(f"127.0.0.1:{number}", "127.0.0.1", number)


def ready_fleet(backoff_s: float = 1.0) -> Fleet:
    fleet = Fleet(MEMBERS, backoff_s)
    fleet.begin(0.0)
    for number, member in enumerate([ROUTER, PREFILL, DECODE, GATEWAY]):
        fleet.started(member.name, 1, place(number), 0.0)
    assert fleet.is_ready
    return fleet


def published(actions: list[Action]) -> list[set[str]]:
    return [{member.name for member, _ in a.workers} for a in actions if isinstance(a, Publish)]


def launched(actions: list[Action]) -> list[str]:
    return [a.member.name for a in actions if isinstance(a, Launch)]


def test_all_but_the_gateway_start_together() -> None:
    fleet = Fleet(MEMBERS, 1.0)

    assert launched(fleet.begin(0.0)) == ["router", "prefill-0", "decode-0"]


def test_the_gateway_starts_when_the_router_is_known() -> None:
    fleet = Fleet(MEMBERS, 1.0)
    fleet.begin(0.0)

    actions = fleet.started("router", 1, place(7), 0.0)

    assert Launch(GATEWAY, 1, None, "127.0.0.1:7") in actions


def test_every_new_worker_is_published() -> None:
    fleet = Fleet(MEMBERS, 1.0)
    fleet.begin(0.0)

    before_router = fleet.started("prefill-0", 1, place(1), 0.0)
    with_router = fleet.started("router", 1, place(2), 0.0)
    after_router = fleet.started("decode-0", 1, place(3), 0.0)

    assert published(before_router) == []
    assert published(with_router) == [{"prefill-0"}]
    assert published(after_router) == [{"prefill-0", "decode-0"}]


def test_a_worker_that_dies_is_withdrawn_and_restarted_at_once() -> None:
    fleet = ready_fleet()

    actions = fleet.failed("decode-0", 1, "killed", 10.0)

    assert launched(actions) == ["decode-0"]
    assert published(actions) == [{"prefill-0"}]


def test_a_worker_comes_back_with_a_free_port_and_is_published() -> None:
    fleet = ready_fleet()
    launch = next(a for a in fleet.failed("decode-0", 1, "killed", 10.0) if isinstance(a, Launch))

    actions = fleet.started("decode-0", 2, place(9), 11.0)

    assert launch.address is None
    assert published(actions) == [{"prefill-0", "decode-0"}]


@pytest.mark.parametrize(("name", "address"), [("router", "127.0.0.1:0"), ("gateway", "127.0.0.1:3")])
def test_router_and_gateway_keep_their_address(name: str, address: str) -> None:
    fleet = ready_fleet()

    launch = next(a for a in fleet.failed(name, 1, "killed", 10.0) if isinstance(a, Launch))

    assert launch.address == address


def test_a_new_router_is_told_of_all_workers() -> None:
    fleet = ready_fleet()
    fleet.failed("router", 1, "killed", 10.0)
    while_away = fleet.failed("prefill-0", 1, "killed", 10.1)

    actions = fleet.started("router", 2, place(0), 11.0)

    assert published(while_away) == []
    assert published(actions) == [{"decode-0"}]


def test_failures_in_a_row_wait_twice_as_long_each() -> None:
    fleet = ready_fleet(backoff_s=1.0)
    now, waits = 10.0, []
    for life in range(1, 9):
        fleet.failed("decode-0", life, "killed", now)
        wake = fleet.next_wake
        waits.append(0.0 if wake is None else wake - now)
        if wake is not None:
            now = wake
            assert launched(fleet.tick(now)) == ["decode-0"]

    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_long_life_ends_the_row_of_failures() -> None:
    fleet = ready_fleet()
    fleet.failed("decode-0", 1, "killed", 10.0)
    fleet.started("decode-0", 2, place(9), 11.0)

    actions = fleet.failed("decode-0", 2, "killed", 1000.0)

    assert launched(actions) == ["decode-0"]


def test_nothing_is_restarted_before_its_time() -> None:
    fleet = ready_fleet()
    fleet.failed("decode-0", 1, "killed", 10.0)
    fleet.failed("decode-0", 2, "killed", 10.0)

    assert fleet.tick(10.9) == []
    assert launched(fleet.tick(11.0)) == ["decode-0"]
    assert fleet.tick(11.0) == []


@pytest.mark.parametrize("life", [0, 1, 3])
def test_news_of_another_life_changes_nothing(life: int) -> None:
    fleet = ready_fleet()
    fleet.failed("decode-0", 1, "killed", 10.0)
    before = fleet.snapshot()

    assert fleet.started("decode-0", life, place(9), 11.0) == []
    assert fleet.failed("decode-0", life, "late", 11.0) == []
    assert fleet.snapshot() == before


def test_a_failure_of_the_first_start_gives_up() -> None:
    fleet = Fleet(MEMBERS, 1.0)
    fleet.begin(0.0)

    actions = fleet.failed("prefill-0", 1, "no such model", 3.0)

    assert actions == [GiveUp("prefill-0", "no such model")]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["started", "failed", "tick"]),
        st.sampled_from([m.name for m in MEMBERS]),
        st.integers(0, 2),
        st.floats(0, 40),
    ),
    max_size=60,
)


@given(EVENTS)
def test_one_life_runs_at_a_time_and_the_router_knows_exactly_the_ready_workers(
    events: list[tuple[str, str, int, float]],
) -> None:
    fleet, now = ready_fleet(), 0.0
    running = {member.name: {1} for member in MEMBERS}
    known: set[str] = {"prefill-0", "decode-0"}
    missed: set[str] = set()
    for kind, name, age, wait in events:
        now += wait
        life = next(s.life for s in fleet.snapshot() if s.member.name == name) - age
        if kind == "started":
            actions = fleet.started(name, life, place(5), now)
        elif kind == "failed":
            running[name].discard(life)
            actions = fleet.failed(name, life, "killed", now)
        else:
            actions = fleet.tick(now)
        for action in actions:
            match action:
                case Launch():
                    running[action.member.name].add(action.life)
                case Publish():
                    known = {member.name for member, _ in action.workers}
                    missed = {member.name for member in action.absent}
                case GiveUp():
                    pytest.fail("gave up after the first start")
        states = {s.member.name: s for s in fleet.snapshot()}

        assert all(len(lives) <= 1 for lives in running.values())
        assert all(bool(running[n]) == (s.phase is not Phase.BACKOFF) for n, s in states.items())
        if states["router"].phase is Phase.READY:
            workers = {n: s for n, s in states.items() if s.member.role.is_worker}
            assert known == {n for n, s in workers.items() if s.phase is Phase.READY}
            assert missed == workers.keys() - known
