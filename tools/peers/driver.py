"""How a benchmark talks to an engine: a process for each engine, one JSON object a line in each direction.

Standard library alone: the drivers run in virtual environments of their own. The engine's own chatter goes to standard
error, so that standard output carries replies only.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Protocol

FIRST_TOKEN, LAST_TOKEN = 100, 49_000
"""Random token ids of prompts, inside every vocabulary that is measured."""


class TimedEngine(Protocol):
    """One loaded engine. Prompts of equal seed and length are equal in all engines."""

    def prefill(self, num_tokens: int, seed: int) -> float:
        """Compute a prompt that was not seen before, up to its first token; return seconds."""
        ...

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Decode greedily `steps` tokens for each of `batch` sequences after `context` tokens.

        Returns:
            Each step's seconds. The context's KV may be kept from call to call.
        """
        ...


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Return the token ids that `seed` stands for."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]


def context_prompt(num_tokens: int, row: int) -> list[int]:
    """Return what row `row` of a decode batch has before its first step."""
    return prompt(num_tokens, 1_000_000 + row)


def intervals(stamps: list[float]) -> list[float]:
    """Return the times between neighbouring stamps."""
    return [b - a for a, b in itertools.pairwise(stamps)]


def run(load: Callable[[list[str]], TimedEngine]) -> None:
    """Load the engine that the command line describes and answer commands until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    begun = time.perf_counter()
    try:
        engine = load(sys.argv[1:])
    except Exception as error:  # a foreign engine: whatever it is, the benchmark goes on without it
        _reply(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    _reply(replies, {"ready_s": time.perf_counter() - begun})
    for line in sys.stdin:
        try:
            _reply(replies, _answer(engine, json.loads(line)))
        except Exception as error:  # the same
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _answer(engine: TimedEngine, command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "prefill":
            return {"seconds": [engine.prefill(command["tokens"], command["seed"])]}
        case "decode":
            return {"seconds": engine.decode(command["batch"], command["context"], command["steps"])}
        case other:
            return {"error": f"unknown command {other!r}"}


def _reply(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
