"""What a request has produced: its text without stop tokens and stop strings, and times that sum to the whole."""

from pathlib import Path
from typing import Any

import pytest

from baton_pb.v1 import common_pb2, router_pb2, worker_pb2
from cluster.gateway.parsing.formats import Reading
from cluster.gateway.progress import Delta, Progress
from cluster.gateway.request import Request, TokenPrompt
from common.clock import ManualClock
from common.text import Text

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
PLACEMENT = router_pb2.WorkerPlacement(decode_worker_id="d0", reason="why")
EOS = 3


@pytest.fixture(scope="session")
def text(model_dir: Path) -> Text:
    return Text.load(model_dir)


def begin(text: Text, clock: ManualClock | None = None, stop: tuple[str, ...] = (), **sampling: Any) -> Progress:
    request = Request("r", TokenPrompt((1, 2)), common_pb2.SamplingParams(**sampling), stop)
    return Progress(request, [1, 2], 0.0, text, frozenset({EOS}), clock or ManualClock(), Reading())


def sampled(*token_ids: int) -> list[common_pb2.SampledToken]:
    return [common_pb2.SampledToken(token_id=token_id) for token_id in token_ids]


def summary(reason: "common_pb2.FinishReason.ValueType" = LENGTH, **fields: Any) -> worker_pb2.SequenceFinished:
    return worker_pb2.SequenceFinished(reason=reason, **fields)


def test_text_and_tokens_come_as_they_are_certain(text: Text) -> None:
    progress = begin(text)
    smile = text.encode("🙂")
    assert len(smile) > 1

    deltas = [progress.take(sampled(token_id)) for token_id in smile]

    assert [delta.text for delta in deltas] == [""] * (len(smile) - 1) + ["🙂"]
    assert [list(delta.token_ids) for delta in deltas] == [[token_id] for token_id in smile]


def test_half_a_character_at_the_end_is_not_lost(text: Text) -> None:
    progress = begin(text)
    progress.take(sampled(text.encode("🙂")[0]))

    last = progress.finish(summary(), PLACEMENT, Delta(""))

    assert last.text == "\N{REPLACEMENT CHARACTER}"
    assert last.finished is not None
    assert last.finished.reason == LENGTH


def test_a_stop_string_cuts_text_and_tokens_and_is_named(text: Text) -> None:
    progress = begin(text, stop=("lo w",))

    delta = progress.take(sampled(*text.encode("hello world and more")))

    assert delta.text == "hel"
    assert progress.stopped
    assert "lo w" in text.decode(progress.token_ids)
    assert "lo w" not in text.decode(progress.token_ids[:-1])
    last = progress.finish(summary(common_pb2.FINISH_REASON_CANCELLED, cached_tokens=1), PLACEMENT, Delta(""))
    assert last.finished is not None
    assert (last.finished.reason, last.finished.stop) == (STOP, "lo w")
    assert last.finished.usage == common_pb2.Usage(
        prompt_tokens=2, output_tokens=len(progress.token_ids), cached_tokens=1
    )


def test_the_token_that_ends_the_sequence_is_no_text(text: Text) -> None:
    stop_id = text.encode("!")[0]
    progress = begin(text, stop_token_ids=[stop_id])
    delta = progress.take(sampled(*text.encode("hi"), stop_id))

    last = progress.finish(summary(STOP), PLACEMENT, delta)

    assert last.text == "hi"
    assert last.token_ids[-1] == stop_id


def test_a_stop_token_before_min_tokens_is_text(text: Text) -> None:
    stop_id = text.encode("!")[0]
    progress = begin(text, stop_token_ids=[stop_id], min_tokens=9)

    first = progress.take(sampled(stop_id))
    second = progress.take(sampled(stop_id, *text.encode("hi")))

    assert (first.text, second.text) == ("", "!!hi")


def test_a_stop_token_at_the_very_end_of_the_length_is_text(text: Text) -> None:
    stop_id = text.encode("!")[0]
    progress = begin(text, stop_token_ids=[stop_id])
    delta = progress.take(sampled(stop_id))

    assert progress.finish(summary(LENGTH), PLACEMENT, delta).text == "!"


def test_logprobs_carry_the_texts_of_their_tokens(text: Text) -> None:
    token_id = text.encode("!")[0]
    token = common_pb2.SampledToken(
        token_id=token_id, logprob=-1.0, top=[common_pb2.TokenLogprob(token_id=token_id, logprob=-1.0)]
    )

    assert begin(text, logprobs=1).take([token]).logprobs[0].top[0].text == "!"
    assert list(begin(text).take([token]).logprobs) == []


def test_the_parts_of_the_time_sum_to_the_whole(text: Text) -> None:
    clock = ManualClock()
    progress = begin(text, clock)
    for pause in (2.0, 0.5, 0.25):
        clock.advance(pause)
        progress.take(sampled(100))

    finished = progress.finish(summary(prefill_s=1.5, transfer_exposed_s=0.125), PLACEMENT, Delta("")).finished

    assert finished is not None
    timing = finished.timing
    assert (timing.ttft_s, timing.queue_s, timing.prefill_s) == (2.0, 0.5, 1.5)
    assert timing.transfer_exposed_s == 0.125
    assert timing.tpot_s == (0.5 + 0.25) / 2
    assert timing.total_s == 2.75


def test_one_token_has_no_time_per_token_and_clocks_may_differ(text: Text) -> None:
    clock = ManualClock()
    progress = begin(text, clock)
    clock.advance(1.0)
    progress.take(sampled(100))

    finished = progress.finish(summary(prefill_s=1.1), PLACEMENT, Delta("")).finished

    assert finished is not None
    assert not finished.timing.HasField("tpot_s")
    assert (finished.timing.queue_s, finished.timing.prefill_s) == (0.0, 1.0)


def test_the_placement_is_told_as_it_was(text: Text) -> None:
    placement = router_pb2.WorkerPlacement(
        decode_worker_id="d0", prefill=worker_pb2.PrefillTarget(worker_id="p0"), reason="why"
    )

    remote = begin(text).finish(summary(transport="shm"), placement, Delta("")).finished
    local = begin(text).finish(summary(), PLACEMENT, Delta("")).finished

    assert remote is not None
    assert remote.placement == common_pb2.Placement(
        prefill_worker_id="p0", decode_worker_id="d0", transport="shm", reason="why"
    )
    assert local is not None
    assert local.placement == common_pb2.Placement(decode_worker_id="d0", transport="local", reason="why")
