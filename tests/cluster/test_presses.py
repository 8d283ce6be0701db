"""What counts as one press of Ctrl-C."""

from cluster.commands.presses import Presses


def test_signals_that_come_together_are_one_press() -> None:
    presses = Presses()

    assert [presses.signal(at) for at in (10.0, 10.0, 10.2, 12.0, 12.1)] == [1, 0, 0, 2, 0]


def test_hammering_is_heard_although_each_blow_follows_soon_after_another() -> None:
    presses = Presses()

    counted = [presses.signal(tenth / 10) for tenth in range(0, 25, 5)]

    assert counted == [1, 0, 2, 0, 3]
