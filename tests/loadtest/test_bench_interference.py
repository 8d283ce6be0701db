"""The interference benchmark tells what long prompts did to streams, and who could not be measured and why."""

import sys
import urllib.request
from itertools import pairwise

import pytest

from common.errors import BatonError, WorkerLostError
from loadtest.bench.interference import LONG_FIRST_S, Result, ours, pauses, result_of, rows_of, sessions
from loadtest.bench.servers import Server, running
from loadtest.records import RequestRecord

LONG = 1_000_000


def stream(number: int, times: list[float], error: str | None = None) -> RequestRecord:
    gaps = tuple(b - a for a, b in pairwise(times))
    return RequestRecord(
        f"r{number}",
        number,
        0,
        times[0],
        times[0],
        times[0],
        times[-1],
        times[-1],
        64,
        len(times),
        0,
        gaps,
        error=error,
    )


def prompt(number: int, sent_s: float, first_s: float) -> RequestRecord:
    return RequestRecord(f"p{number}", LONG + number, 0, sent_s, sent_s, first_s, first_s, first_s, 2048, 1)


def steady(start: float, end: float, gap: float) -> list[float]:
    return [start + gap * i for i in range(round((end - start) / gap) + 1)]


def test_each_long_prompt_is_a_round_of_what_streams_saw_beside_and_before_it() -> None:
    times = [*steady(4, 7, 0.025), *steady(7.1, 9, 0.1), *steady(9.025, 21, 0.025), *steady(21.05, 23, 0.05)]

    result = result_of([stream(0, times), prompt(1, 21, 23), prompt(0, 7, 9)], 0.0)

    assert [round_.alone_s for round_ in result.rounds] == pytest.approx([0.025, 0.025])
    assert [round_.beside_s for round_ in result.rounds] == pytest.approx([0.1, 0.05])
    assert result.flowing == 1


def test_a_stream_that_stands_still_through_a_whole_prompt_counts_as_beside_it() -> None:
    result = result_of([stream(0, [*steady(4, 7, 0.025), *steady(12, 13, 0.025)]), prompt(0, 7.01, 11.9)], 0.0)

    assert result.rounds[0].beside_s == pytest.approx(5.0)
    assert result.flowing == 0


def test_goodput_counts_both_kinds_in_time_and_nothing_that_failed() -> None:
    streams = [stream(n, steady(n, n + 1, 0.025)) for n in range(4)]
    failed = stream(4, steady(4, 4.1, 0.025), error="DeadlineError")

    result = result_of([*streams, failed, prompt(0, 0, 3), prompt(1, 1, 30)], 0.0)

    assert result.goodput == pytest.approx(5 / 4)


def test_a_system_that_answers_nothing_is_an_error_with_its_words() -> None:
    nothing = RequestRecord("r", 0, 0, 0.0, 0.0, error="WorkerLostError", error_message="connection refused")

    with pytest.raises(BatonError, match="connection refused"):
        result_of([nothing], 0.0)


def test_the_table_has_every_figure_beside_every_other_system_and_says_who_failed() -> None:
    def result(gap: float) -> Result:
        times = [*steady(4, 7, 0.025), *steady(7 + gap, 9, gap)]
        return result_of([stream(0, times), prompt(0, 7, 9)], 0.0)

    results = {"apart": result(0.025), "together": result(0.25)}
    rows = rows_of(results, {"other": "it ended with code 1"})

    assert (rows[0].goal, rows[0].met) == (1.2, True)
    beside = next(row for row in rows if row.name == "ITL p99 beside a long prompt")
    assert [beside.ours, beside.peer] == pytest.approx([25, 250])
    assert beside.peer_name == "together"
    assert (rows[-1].peer, rows[-1].note) == (None, "it ended with code 1")
    assert "together" in pauses(results)
    del results["apart"]
    assert [row.name for row in rows_of(results, {"apart": "it did not start"})] == ["apart"]


def test_the_worst_round_is_judged_and_all_of_them_are_told() -> None:
    def result(gap: float) -> Result:
        times = [*steady(4, 7, 0.02), *steady(7 + gap, 9, gap), *steady(9.02, 21, 0.02), *steady(21.02, 30, 0.02)]
        return result_of([stream(0, times), prompt(0, 7, 9), prompt(1, 21, 23)], 0.0)

    goal, ratio, *_ = rows_of({"apart": result(0.03), "together, chunk 128": result(0.12)}, {})

    assert goal.ours == pytest.approx(1.5)
    assert goal.met is False
    assert goal.note.startswith("rounds 1.50, 1.00;")
    assert ratio.name == "ITL p99 beside long prompts, together, chunk 128 / apart, worst round"
    assert ratio.ours == pytest.approx(1.0)
    assert ratio.note == "rounds 4.00, 1.00"


def test_one_worker_as_it_is_shipped_is_among_the_systems() -> None:
    names = [system.name for system in ours([128], [])]

    assert names == ["apart", "together, chunk 128", "together, as shipped: chunks for steps of 0.1 s"]


def test_the_load_is_open_loop_and_in_order() -> None:
    load = list(sessions(38))

    times = [session.at_s or 0.0 for session in load]
    assert times == sorted(times)
    long = [session.at_s for session in load if session.number >= LONG]
    assert long == [LONG_FIRST_S + 14 * n for n in range(3)]


def test_a_server_is_ready_when_it_answers_and_gone_afterwards() -> None:
    program = "import http.server as h, sys; h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Ok).serve_forever()"
    handler = (
        "import http.server\nclass Ok(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200)\n        self.end_headers()\n"
    )
    with running(Server("stub", "stub", [sys.executable, "-c", handler + program, "{port}"])) as url:
        assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200

    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=10)


def test_a_server_that_ends_gives_its_last_words() -> None:
    with (
        pytest.raises(WorkerLostError, match="code 3: no such model"),
        running(Server("stub", "stub", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])),
    ):
        pass
