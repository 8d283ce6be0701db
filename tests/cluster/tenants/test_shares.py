"""When places run out, each holder may have an equal share of them, and one is free for whoever comes next."""

import pytest

from cluster.tenants.shares import Shares
from common.errors import OverloadedError


def test_while_there_is_room_one_holder_may_have_most_of_it() -> None:
    shares = Shares("calls", 8)
    for _ in range(6):
        shares.take("a")

    with pytest.raises(OverloadedError, match="a may have 4 of 8 calls") as refused:
        shares.take("a")
    assert refused.value.retry_after_s > 0


def test_a_newcomer_finds_a_place_when_another_one_holds_nearly_all() -> None:
    shares = Shares("calls", 8)
    for _ in range(6):
        shares.take("a")

    shares.take("b")
    shares.take("c")

    assert shares.num_taken == 8
    with pytest.raises(OverloadedError, match="8 calls are open here, the most that may"):
        shares.take("d")


def test_a_place_that_was_given_back_can_be_had_again() -> None:
    shares = Shares("calls", 1)
    with shares.place("a"), pytest.raises(OverloadedError):
        shares.take("b")

    with shares.place("b"):
        assert shares.num_taken == 1
    assert shares.num_taken == 0
