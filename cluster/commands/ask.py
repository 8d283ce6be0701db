"""`baton generate`, `chat` and `demo`: the cluster as a user meets it."""

import json
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.asking import chat_request, completion_request, fits_the_protocol
from cluster.client import Client
from cluster.commands import show

_LONG_TEXT = (
    "The lighthouse on the northern cape was built in 1871 by a crew of forty masons who lived in tents on the rocks. "
    "Its lamp burned whale oil for nine years, then paraffin, and since 1931 it has been electric. The keeper's log "
    "records every ship that passed, every storm, and every bird that struck the glass. "
)
QUESTIONS = (
    "Why is the sky blue?",
    f"{_LONG_TEXT * 12}\n\nWhen was the lighthouse built, and by whom?",
    "Explain what a relay race is in two sentences.",
)
DEMO_MAX_TOKENS = 64
_SHOWN_MAX = 120


def sampling(
    max_tokens: int | None, temperature: float | None, seed: int | None, stop: list[str]
) -> common_pb2.SamplingParams:
    """Return the sampling parameters; None leaves a choice to the cluster.

    Raises:
        InvalidRequestError: a number that the protocol cannot carry, a stop string that is not Unicode.
    """
    with fits_the_protocol("max_tokens, temperature, seed or stop"):
        return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop)


def generate(
    client: Client, prompt: str, system: str | None, params: common_pb2.SamplingParams, is_raw: bool, as_json: bool
) -> None:
    """Send one prompt and print the answer: as it comes, or as one JSON object when it is complete.

    Raises:
        BatonError: from the cluster.
    """
    with client:
        if is_raw:
            request = completion_request(prompt, params)
        else:
            turns = [] if system is None else [("system", system)]
            request = chat_request([*turns, ("user", prompt)], params)
        responses = client.generate(request)
        if as_json:
            sys.stdout.write(json.dumps(show.answer_json(responses)) + "\n")
        else:
            _stream(responses)


def chat(client: Client, system: str | None, params: common_pb2.SamplingParams) -> None:
    """Converse until end of input; every turn sends the whole conversation, of which the cluster kept the KV.

    Raises:
        BatonError: the cluster cannot be reached. An error of one turn is shown, and that turn forgotten.
    """
    console = Console(stderr=True, highlight=False)
    turns = [] if system is None else [("system", system)]
    with client:
        model = client.model_id()
        console.print(f"{model} on {client.address}; end with Ctrl-D", style="dim", markup=False)
        for line in _lines():
            turns.append(("user", line))
            turns.append(("assistant", _stream(client.generate(chat_request(turns, params)))))


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if line:
            yield line


def demo(address: str) -> None:
    """Ask the three questions and show the answers with timing and placement.

    Raises:
        BatonError: from the cluster.
    """
    console = Console(highlight=False, soft_wrap=True)
    with Client(address) as client:
        for question in QUESTIONS:
            shown = " ".join(question.split())
            if len(shown) > _SHOWN_MAX:
                shown = f"{shown[:60]} ... ({len(question)} characters) ... {shown[-48:]}"
            console.print(f"\n{shown}", style="bold", markup=False)
            _stream(client.generate(chat_request([("user", question)], sampling(DEMO_MAX_TOKENS, 0.0, None, []))))


def _stream(responses: Iterable[inference_pb2.GenerateResponse]) -> str:
    """Print text as it comes, then where the time went; return the text."""
    text = ""
    last: inference_pb2.GenerateResponse | None = None
    for response in responses:
        text += response.text
        sys.stdout.write(response.text)
        sys.stdout.flush()
        if response.HasField("finished"):
            last = response
    sys.stdout.write("\n")
    sys.stdout.flush()
    if last is not None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(show.finished_line(last), style="dim", markup=False)
    return text
