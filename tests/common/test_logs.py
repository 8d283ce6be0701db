"""A log line carries its fields."""

import logging

import pytest

from common.clock import ManualClock, MonotonicClock
from common.logs import log, set_up


def test_fields_follow_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up("router", "INFO")
        log(logging.getLogger("somewhere"), logging.INFO, "placed", request_id="r1", worker_id="d0")
        log(logging.getLogger("somewhere"), logging.DEBUG, "too fine")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

    line = capsys.readouterr().err
    assert "router somewhere: placed request_id=r1 worker_id=d0" in line
    assert "too fine" not in line


def test_clocks_do_not_go_back() -> None:
    clock, real = ManualClock(5.0), MonotonicClock()
    clock.advance(1.5)

    assert clock.now() == 6.5
    assert real.now() <= real.now()
