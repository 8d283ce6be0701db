"""What a prompt waits for is what its worker would do first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.backlog import Backlog, Prompt, Steps


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


@pytest.mark.parametrize(
    ("steps", "num_tokens", "riders"),
    [
        pytest.param(Steps(0, 300, 300, 9000), 100, 0, id="a budget that is unknown adds nothing"),
        pytest.param(Steps(512, 512, 512, 9000), 500, 12, id="the last step is filled up"),
        pytest.param(Steps(512, 512, 512, 5), 500, 5, id="with no more than there is"),
        pytest.param(Steps(512, 5000, 512, 9000), 1024, 0, id="whole steps have no room for others"),
        pytest.param(Steps(512, 5000, 812, 9000), 100, 112, id="those ahead share its last step"),
        pytest.param(Steps(512, 300, 300, 400), 100, 400, id="a running step that is not full is not joined"),
        pytest.param(Steps(512, 500, 100, 400), 100, 400, id="those behind that are in the running step end it"),
        pytest.param(Steps(512, 500, 0, 900), 12, 900, id="and others behind ride in the next"),
    ],
)
def test_a_prompt_waits_for_those_that_share_its_steps(steps: Steps, num_tokens: int, riders: int) -> None:
    assert steps.riders(num_tokens) == riders


@given(prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12), budget=st.integers(1, 30), data=st.data())
def test_the_riders_are_those_that_steps_in_order_take_along(
    prompts: list[int], budget: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(prompts) - 1), label="the prompt")
    ahead, behind = sum(prompts[:at]), sum(prompts[at + 1 :])
    end = ahead + prompts[at]
    computed = min(-(-end // budget) * budget, sum(prompts))  # whole steps, until the prompt is done

    # All of them were there when the first step began: then it is as if no step were running.
    assert Steps(budget, 0, ahead, behind).riders(prompts[at]) == computed - end


def test_the_rest_of_the_step_that_ends_a_prompt_is_part_of_its_wait() -> None:
    def seconds(token_budget: int) -> float:
        backlog = Backlog()
        backlog.token_budget = token_budget
        for key, num_tokens in enumerate((1000, 7000)):
            backlog.add(key, prompt(num_tokens), 0.0)
        return backlog.wait(1500, 0.0).seconds

    assert seconds(0) == pytest.approx(1.0)
    assert seconds(500) == pytest.approx(1.0)
    assert seconds(1000) == pytest.approx(1.5)
    assert seconds(2000) == pytest.approx(2.5)


def test_of_the_running_step_the_time_that_has_passed_is_waited_no_more() -> None:
    backlog = Backlog()
    backlog.token_budget = 1000
    for key, num_tokens in enumerate((200, 300, 5000)):
        backlog.add(key, prompt(num_tokens), 0.0)

    assert backlog.wait(1000, 0.4).seconds == pytest.approx(0.6), (
        "the long one fills the step that both short ones began"
    )
    assert backlog.wait(1000, 0.9).seconds == pytest.approx(0.1)
    assert backlog.wait(1000, 9.0).seconds == 0.0
