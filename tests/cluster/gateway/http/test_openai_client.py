"""The `openai` package's client finds what it expects, unchanged but for its URL."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from cluster.fake_worker import FakeModel
from common.errors import BatonError, OverloadedError
from common.text import Text
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, run, until

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@asynccontextmanager
async def client_of(cluster: FakeCluster, timeout_s: float = 10.0) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{cluster.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=timeout_s) as client:
        yield client


def says(cluster: FakeCluster, model_dir: Path, words: str) -> None:
    """Let the decode worker answer with `words`, then its end."""
    ids = [*Text.load(model_dir).encode(words), 3]
    cluster.worker("d0").script = lambda prompt: iter([*ids, *repeat(0, 100)])


def test_a_chat_is_answered_with_text_usage_and_reason(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5)

            assert answer.object == "chat.completion"
            assert answer.id.startswith("chatcmpl-")
            assert answer.model == "fake"
            [choice] = answer.choices
            assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
            assert choice.message.content == "user\n"  # the echo of the rendered chat, special tokens skipped
            assert choice.logprobs is None
            prompt = Text.load(model_dir).encode(RENDERED, add_special_tokens=False)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompt)
            assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, len(prompt) + 5)
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 2
            assert list(cluster.worker("d0").started[0].token_ids) == prompt

    run(scenario())


def test_a_stream_begins_with_the_role_and_ends_with_reason_and_usage(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]

            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "user\n"
            assert [c.choices[0].finish_reason for c in chunks[:-1]] == [*repeat(None, len(chunks) - 2), "length"]
            assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].choices == []
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 5
            assert len({chunk.id for chunk in chunks}) == 1

    run(scenario())


def test_usage_so_far_is_in_every_event_when_asked_for(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            options: Any = {"include_usage": True, "continuous_usage_stats": True}
            stream = await client.completions.create(
                model="fake", prompt=[5, 6, 7], max_tokens=4, stream=True, stream_options=options
            )
            usages = [chunk.usage async for chunk in stream]

            assert all(usage is not None and usage.prompt_tokens == 3 for usage in usages)
            counts = [usage.completion_tokens for usage in usages if usage is not None]
            assert counts == sorted(counts)
            assert counts[-1] == 4

    run(scenario())


def test_each_choice_has_a_seed_of_its_own_and_the_first_one_the_given(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3, n=3, seed=-1)

            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert {start.sampling.seed for start in cluster.worker("d0").started} == {2**64 - 1, 0, 1}
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == cluster.worker("d0").started[0].num_prompt_tokens
            assert answer.usage.completion_tokens == 9

    run(scenario())


def test_each_prompt_of_a_batch_counts_once_whatever_n_is(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
            answer = await client.completions.create(model="fake", prompt=prompts, n=2, max_tokens=3)

            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 12)
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 4  # the fake worker says 2 of each

    run(scenario())


def test_every_choice_of_a_stream_is_complete(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            stream = await client.completions.create(
                model="fake", prompt=["hello", "world"], max_tokens=8, n=2, stream=True
            )
            texts, reasons = dict.fromkeys(range(4), ""), {}
            async for chunk in stream:
                choice = chunk.choices[0]
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason

            assert texts == {0: texts[1], 1: texts[1], 2: texts[3], 3: texts[3]}
            assert texts[0].startswith("hello")
            assert texts[2].startswith("world")
            assert reasons == dict.fromkeys(range(4), "length")

    run(scenario())


def test_sampling_fields_reach_the_worker(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            await client.chat.completions.create(
                model="fake",
                messages=HELLO,
                max_completion_tokens=7,
                temperature=0.5,
                top_p=0.25,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={"5": -100},
                stop="zzz",
                user="me",
                extra_body={
                    "top_k": -1,
                    "min_p": 0.125,
                    "repetition_penalty": 1.5,
                    "min_tokens": 2,
                    "ignore_eos": True,
                    "stop_token_ids": [9],
                },
            )

            sampling = cluster.worker("d0").started[0].sampling
            assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 0)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
            assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.125, 1.5, 2)
            assert (dict(sampling.logit_bias), list(sampling.stop_token_ids)) == ({5: -100.0}, [9])
            assert sampling.ignore_eos

    run(scenario())


@pytest.mark.parametrize("stop", ["wor", ["zzz", "wor"]], ids=["text", "list"])
def test_a_stop_string_ends_the_text_before_it(model_dir: Path, stop: Any) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, "hello world")
            answer = await client.completions.create(model="fake", prompt="x", stop=stop, max_tokens=50)

            assert answer.choices[0].text == "hello "
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].model_dump()["stop_reason"] == "wor"

    run(scenario())


def test_chat_logprobs_have_tokens_bytes_and_alternatives(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, "naïve 🙂")
            ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 99, "logprobs": True, "top_logprobs": 2}
            ask["extra_body"] = {"stop_token_ids": [3]}
            whole = await client.chat.completions.create(**ask)
            streamed = [e async for e in await client.chat.completions.create(**ask, stream=True)]

            assert whole.choices[0].logprobs is not None
            tokens = whole.choices[0].logprobs.content or []
            assert whole.usage is not None
            assert len(tokens) == whole.usage.completion_tokens
            assert bytes(b for t in tokens[:-1] for b in t.bytes or []).decode() == "naïve 🙂"
            assert tokens[-1].token == "<|im_end|>"
            assert all((t.logprob, len(t.top_logprobs)) == (-0.5, 2) for t in tokens)
            parts = [e.choices[0].logprobs.content or [] for e in streamed if e.choices[0].logprobs]
            assert [t for part in parts for t in part] == tokens

    run(scenario())


def test_completion_logprobs_have_offsets_into_the_text(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            ask: Any = {"model": "fake", "prompt": "hello world", "max_tokens": 6, "logprobs": 1}
            whole = (await client.completions.create(**ask)).choices[0]
            streamed = [e.choices[0] async for e in await client.completions.create(**ask, stream=True)]

            assert whole.logprobs is not None
            tokens, offsets = whole.logprobs.tokens or [], whole.logprobs.text_offset or []
            assert all(whole.text[at : at + len(token)] == token for token, at in zip(tokens, offsets, strict=True))
            assert whole.logprobs.token_logprobs == [-0.5] * 6
            assert whole.logprobs.top_logprobs == [{token: -0.5} for token in tokens]
            assert [at for c in streamed if c.logprobs for at in c.logprobs.text_offset or []] == offsets

    run(scenario())


def test_echo_begins_with_the_prompt(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            ids = Text.load(model_dir).encode("hello")
            by_text = await client.completions.create(model="fake", prompt="hello", echo=True, max_tokens=len(ids))
            by_ids = await client.completions.create(model="fake", prompt=[ids], echo=True, max_tokens=len(ids))
            stream = await client.completions.create(
                model="fake", prompt="hello", echo=True, max_tokens=len(ids), stream=True
            )
            texts = [chunk.choices[0].text async for chunk in stream]

            assert by_text.choices[0].text == by_ids.choices[0].text == "".join(texts) == "hellohello"

    run(scenario())


def test_timing_and_placement_are_told_when_asked_for(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 3}
            whole = await client.chat.completions.create(**ask, extra_body={"timing": True})
            by_header = await client.chat.completions.create(**ask, extra_headers={"x-baton-timing": "1"})
            last = [
                e async for e in await client.chat.completions.create(**ask, stream=True, extra_body={"timing": True})
            ]
            without = await client.chat.completions.create(**ask)

            for answer in (whole, by_header, last[-1]):
                timing = answer.model_dump()["timing"]
                assert timing["queue_s"] + timing["prefill_s"] == pytest.approx(timing["ttft_s"])
                assert timing["placement"]["prefill_worker_id"] == "p0"
                assert timing["placement"]["decode_worker_id"] == "d0"
            assert "timing" not in without.model_dump()

    run(scenario())


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ],
    ids=["model", "window", "range"],
)
def test_a_wrong_request_raises_the_clients_class_for_it(
    model_dir: Path, asked: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster) as client:
            with pytest.raises(error) as caught:
                await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **asked})

            assert caught.value.param == param
            assert caught.value.request_id

    run(scenario())


@pytest.mark.parametrize(
    ("cause", "error"),
    [(OverloadedError("full", 7.0), openai.RateLimitError), (BatonError("broken"), openai.InternalServerError)],
    ids=["overloaded", "bug"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_code_even_in_a_stream(
    model_dir: Path, cause: BatonError, error: type[openai.APIStatusError], stream: bool
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, retries_max=0) as cluster, client_of(cluster) as client:
            cluster.worker("p0").refuse(cause)

            with pytest.raises(error, match=cause.message) as caught:
                await client.chat.completions.create(model="fake", messages=HELLO, stream=stream)
            if cause.retry_after_s:
                assert caught.value.response.headers["retry-after"] == "7"

    run(scenario())


def test_a_client_that_gives_up_frees_its_request(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, client_of(cluster, timeout_s=0.2) as client:
            cluster.worker("d0").may_step.clear()

            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="fake", messages=HELLO)

            await until(lambda: cluster.worker("d0").num_running == 0, "still running")
            cluster.worker("d0").may_step.set()

    run(scenario())


def test_a_stream_that_is_closed_frees_its_request(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster, client_of(cluster) as client:
            cluster.worker("d0").step_s = 0.01
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=400, n=2, stream=True
            )
            await anext(aiter(stream))

            await stream.close()

            await until(lambda: cluster.worker("d0").num_running == 0, "still running")

    run(scenario())


def test_models_are_listed_and_found(model_dir: Path) -> None:
    async def scenario() -> None:
        async with (
            fake_cluster(model_dir, model=FakeModel(context_tokens=300)) as cluster,
            client_of(cluster) as client,
        ):
            [listed] = (await client.models.list()).data
            found = await client.models.retrieve("fake")

            assert listed.id == found.id == "fake"
            assert found.model_dump()["max_model_len"] == 300
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("org/other")

    run(scenario())


def test_many_requests_at_once_keep_apart(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_decode=2) as cluster, client_of(cluster) as client:
            words = ["hello", "world", "Paris", "block"] * 4
            answers = await asyncio.gather(
                *(client.completions.create(model="fake", prompt=word, max_tokens=6) for word in words)
            )

            for word, answer in zip(words, answers, strict=True):
                assert (word * 7).startswith(answer.choices[0].text)

    run(scenario())
