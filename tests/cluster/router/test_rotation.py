"""Deficit round robin: equal shares of cost, whatever single turns cost, and nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.router.rotation import Rotation

QUANTUM = 100.0
Costs = st.lists(st.integers(1, 700), min_size=1, max_size=60)


def serve(rotation: Rotation, waiting: dict[str, list[int]]) -> str:
    """Serve one turn; a name without further wishes leaves."""
    turn = rotation.next(lambda name: waiting[name][0])
    rotation.serve(turn, waiting[turn.name].pop(0))
    if not waiting[turn.name]:
        rotation.remove(turn.name)
    return turn.name


def rotation_of(waiting: dict[str, list[int]], weights: dict[str, float] | None = None) -> Rotation:
    rotation = Rotation(lambda name: QUANTUM * (weights or {}).get(name, 1.0))
    for name in waiting:
        rotation.add(name)
    return rotation


@given(st.dictionaries(st.sampled_from("abcde"), Costs, min_size=2), st.data())
def test_who_always_wants_something_gets_an_equal_share_of_cost(
    waiting: dict[str, list[int]], data: st.DataObject
) -> None:
    weights = {name: data.draw(st.sampled_from([1.0, 2.0, 5.0])) for name in waiting}
    rotation, served = rotation_of(waiting, weights), dict.fromkeys(waiting, 0.0)
    most = max(max(costs) for costs in waiting.values())
    while all(waiting.values()):
        turn = rotation.next(lambda name: waiting[name][0])
        cost = waiting[turn.name].pop(0)
        rotation.serve(turn, cost)
        served[turn.name] += cost / weights[turn.name]

        assert max(served.values()) - min(served.values()) <= 2 * (QUANTUM + most)


@given(Costs, Costs)
def test_a_newcomer_is_served_before_another_has_two_quanta_and_a_cost(old: list[int], new: list[int]) -> None:
    waiting = {"old": [*old, *([50] * 200)]}
    rotation = rotation_of(waiting)
    for _ in old:
        serve(rotation, waiting)
    waiting["new"] = list(new)
    rotation.add("new")

    spent, before = 0, 0
    while waiting["new"] == new:
        before = waiting["old"][0]
        spent += before if serve(rotation, waiting) == "old" else 0

    visits = -(-new[0] // QUANTUM)
    assert spent <= (visits + 1) * QUANTUM + 700


def test_dear_turns_are_as_good_as_many_cheap_ones() -> None:
    waiting = {"cheap": [10] * 100, "dear": [500] * 2}
    rotation = rotation_of(waiting)

    order = [serve(rotation, waiting) for _ in range(102)]

    assert order.index("dear") == 50  # five visits of 100 for the other one before five of its own have paid
    assert order.count("dear") == 2


def test_looking_changes_nothing() -> None:
    waiting = {"a": [300], "b": [1], "c": [100]}
    rotation = rotation_of(waiting)

    looks = {rotation.next(lambda name: waiting[name][0]) for _ in range(3)}

    assert len(looks) == 1
    assert [serve(rotation, waiting) for _ in range(3)] == ["b", "c", "a"]


def test_who_leaves_saves_nothing() -> None:
    waiting = {"a": [1000], "b": [100] * 50}
    rotation = rotation_of(waiting)
    for _ in range(9):
        assert serve(rotation, waiting) == "b"

    rotation.remove("a")
    rotation.add("a")
    for _ in range(9):
        assert serve(rotation, waiting) == "b"
    rotation.remove("b")

    assert len(rotation) == 1
    assert "a" in rotation
