"""What a prompt waits for is what its worker would do first."""

import pytest

from cluster.router.backlog import Backlog, Prompt


def wait(backlog: Backlog, num_tokens: int, now: float) -> tuple[float, int]:
    seconds, num_delayed = backlog.wait(num_tokens, now)
    return round(seconds, 6), num_delayed


def prompt(num_tokens: int, cached: int = 0) -> Prompt:
    return Prompt(num_tokens, num_tokens - cached, (num_tokens - cached) / 1000)


def test_nobody_waits_for_an_idle_worker() -> None:
    assert wait(Backlog(), 100, 0.0) == (0.0, 0)


def test_the_shorter_go_first_and_the_longer_are_delayed() -> None:
    backlog = Backlog()
    for key, num_tokens in enumerate((500, 1000, 4000)):
        backlog.add(key, prompt(num_tokens), 0.0)

    assert wait(backlog, 100, 0.0) == (0.0, 3)
    assert wait(backlog, 1000, 0.0) == (1.5, 1)
    assert wait(backlog, 9000, 0.0) == (5.5, 0)


def test_only_what_is_not_cached_takes_time_and_gives_the_place_in_the_order() -> None:
    backlog = Backlog()
    backlog.add("begun", prompt(100), 0.0)
    backlog.add("cached", prompt(4000, cached=3900), 0.0)

    assert wait(backlog, 1000, 0.0) == (0.2, 0)
    assert wait(backlog, 50, 0.0) == (0.0, 2)


def test_a_prompt_that_has_waited_is_not_overtaken_for_ever() -> None:
    backlog = Backlog()
    backlog.add("short", prompt(10), 0.0)
    backlog.add("long", prompt(4000), 0.0)
    backlog.progressed(3500, 0.5, 3.0)
    backlog.remove("short")

    assert backlog.wait(1000, 3.0).num_delayed == 0


def test_progress_shortens_the_wait() -> None:
    backlog = Backlog()
    backlog.add("first", prompt(2000), 0.0)

    assert backlog.wait(3000, 0.5).seconds == pytest.approx(1.5)
    backlog.progressed(1000, 1.0, 1.0)
    assert backlog.wait(3000, 1.0).seconds == pytest.approx(1.0)
    assert backlog.wait(3000, 1.5).seconds == pytest.approx(0.5)


def test_what_was_computed_for_a_prompt_that_ended_is_not_taken_for_the_next_ones() -> None:
    backlog = Backlog()
    for key in ("first", "second"):
        backlog.add(key, prompt(1000), 0.0)

    backlog.remove("first", prefilled_at=1.0)
    before = backlog.wait(5000, 1.0).seconds
    backlog.progressed(1000, 1.0, 1.01)

    assert before == pytest.approx(1.0)
    assert backlog.wait(5000, 1.01).seconds == pytest.approx(1.0)


def test_the_running_step_is_not_interrupted() -> None:
    backlog = Backlog()
    backlog.add("long", prompt(90_000), 0.0)
    backlog.progressed(8000, 2.0, 2.0)

    assert wait(backlog, 10, 2.5) == (1.5, 1)


def test_what_was_added_and_removed_leaves_exactly_nothing() -> None:
    backlog = Backlog()
    for key in range(100):
        backlog.add(key, Prompt(10, 10, 0.1 * key), 0.0)
    for key in reversed(range(100)):
        backlog.remove(key)
        backlog.remove(key)

    assert (len(backlog), backlog.total_s) == (0, 0.0)
