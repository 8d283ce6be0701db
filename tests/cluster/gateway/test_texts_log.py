"""What clients ask and are answered is in the gateway's log if, and only if, the operator has switched it on."""

import ast
import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.gateway import texts_log
from common.errors import BatonError
from common.text import Text
from tests.cluster.fake_cluster import fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import get, post, wire

PROMPT = "swordfish\nis the \u001b[31mword"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24}


def written(caplog: pytest.LogCaptureFixture) -> str:
    """Return all that any logger wrote, arguments and fields included."""
    return "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)


def texts(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, Any]:
    """Return the fields of each such line by its request's id."""
    found = [r.__dict__["fields"] for r in caplog.records if r.name == texts_log.__name__ and r.getMessage() == event]
    return {fields["request_id"]: fields for fields in found}


@pytest.mark.parametrize("stage", ["whole", "stream", "refused", "fails", "leaves"])
def test_unless_switched_on_no_word_of_a_prompt_or_an_answer_is_written(
    model_dir: Path, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=1) as cluster:
            match stage:
                case "whole" | "stream":
                    body = {"prompt": PROMPT, "max_tokens": 24, "stream": stage == "stream"}
                    async with wire(cluster) as connection:
                        connection.send("/v1/completions", body)
                        assert (await connection.head())[0] == 200
                        if stage == "stream":
                            assert "".join(await connection.rest()).count("text_completion") > 10
                        else:
                            await connection.reader.readuntil(b"}]")
                case "refused":
                    assert (await post(cluster, "/v1/completions", {"prompt": PROMPT, PROMPT: 1})).status == 400
                    assert (await post(cluster, "/v1/completions", {"prompt": PROMPT * 1000})).status == 400
                case "fails":
                    cluster.worker("d0").refuse(BatonError("broken"), BatonError("broken"))
                    assert (await post(cluster, "/v1/chat/completions", CHAT)).status == 500
                case "leaves":
                    async with wire(cluster) as connection:
                        cluster.worker("d0").step_s = 0.01
                        connection.send("/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 400})
                        await connection.head()
                        await until(lambda: cluster.worker("d0").num_tokens > 30, "no tokens")
                    await until(lambda: cluster.worker("d0").num_running == 0, "still running")

    with caplog.at_level(logging.DEBUG):
        run(scenario())

    assert "gateway serves" in written(caplog)
    assert "swordfish" not in written(caplog)
    assert "ALL clients" not in written(caplog)


def test_switched_on_each_prompt_and_answer_is_one_line_with_the_requests_id(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[str, str]:
        async with fake_cluster(model_dir, log_texts_max=60) as cluster:
            asked = request(PROMPT, max_tokens=24)
            asked.request_id = "mine-1"
            said = (await cluster.ask(asked)).text
            await post(cluster, "/v1/chat/completions", {**CHAT, "n": 2}, x_request_id="mine-2")
            cluster.worker("d0").refuse(BatonError("broken"))
            await post(cluster, "/v1/completions", {"prompt": "x" * 400}, x_request_id="mine-3")
            page = (await get(cluster, "/metrics")).body.decode()
            return said, page + str(await cluster.status())

    with caplog.at_level(logging.DEBUG):
        said, shown = asyncio.run(scenario())

    prompts, answers = texts(caplog, "prompt"), texts(caplog, "answer")
    assert set(prompts) == set(answers) == {"mine-1", "mine-2.0", "mine-2.1", "mine-3"}
    assert ast.literal_eval(prompts["mine-1"]["text"]) == PROMPT
    assert ast.literal_eval(answers["mine-1"]["text"]) == said
    assert (prompts["mine-1"]["tokens"], answers["mine-1"]["tokens"]) == (len(Text.load(model_dir).encode(PROMPT)), 24)
    assert prompts["mine-2.0"]["text"].startswith("'<|im_start|>user\\nswordfish\\nis the \\x1b[31m")
    assert prompts["mine-3"]["text"] == f"'{'x' * 60}' ..."  # cut
    assert answers["mine-3"]["text"] == "''"  # it came to nothing
    assert all("\n" not in str(fields) for fields in prompts.values())
    [warning] = [record for record in caplog.records if "ALL clients" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    elsewhere = [record for record in caplog.records if record.name != texts_log.__name__]
    assert not any("swordfish" in f"{record.getMessage()} {record.__dict__}" for record in elsewhere)
    assert "swordfish" not in shown


def test_the_start_says_what_is_switched_on() -> None:
    assert texts_log.complaint(0) is None
    assert "gateway.log_texts_max=7" in str(texts_log.complaint(7))
