"""What is asked: sessions of one or more turns, made from a few numbers and a seed, or from a trace."""

from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
import yaml
from pydantic import Field, TypeAdapter

from common.config_node import Count, Node, Positive
from common.errors import ConfigError
from common.wording import sentences
from loadtest import trace
from loadtest.arrivals import Arrival
from loadtest.content import ChatPrompt, Message, Prompt, Segment, TextPrompt, TokenPrompt, content_id, words

_T = TypeVar("_T")
Spread = Annotated[float, Field(ge=0, lt=1)]


class Turn(NamedTuple):
    """One request of a session. From the second turn on, `prompt` is only what the user adds."""

    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    """From the end of the previous answer to this turn."""


class Session(NamedTuple):
    """What one user asks, turn after turn; each turn waits for the answer before it."""

    number: int
    turns: tuple[Turn, ...]
    at_s: float | None = None
    """When a trace says that it arrived."""


class SyntheticWorkload(Node):
    """Random prompts, some of whose beginnings are shared."""

    kind: Literal["synthetic"] = "synthetic"
    prompt_tokens: Positive = 512
    """Mean length of a prompt, shared prefix included."""
    output_tokens: Positive = 64
    """Mean length of an answer."""
    spread: Spread = 0.0
    """Lengths are uniform within +- this share of the mean."""
    prefixes: Count = 0
    """How many different shared prefixes there are; 0: no prompt shares anything."""
    prefix_tokens: Count = 0
    """Length of each shared prefix."""

    @pydantic.model_validator(mode="after")
    def _prefix_is_shorter_than_the_prompt(self) -> "SyntheticWorkload":
        if self.prefixes and self.prefix_tokens >= self.prompt_tokens * (1 - self.spread):
            raise ValueError("prefix_tokens must be less than the shortest prompt")
        return self

    def sessions(self, seed: int, window: int) -> Iterator[Session]:  # noqa: ARG002 - all workloads have one signature
        """Yield endless sessions of one turn."""
        rng = Random(f"synthetic/{seed}")
        number = 0
        prefix_id = cache(partial(content_id, "prefix", seed))
        while True:
            length = _around(rng, self.prompt_tokens, self.spread)
            parts: tuple[Segment, ...] = ()
            if self.prefixes and self.prefix_tokens:
                parts = (Segment(prefix_id(rng.randrange(self.prefixes)), self.prefix_tokens),)
            unique = max(1, length - sum(part.num_tokens for part in parts))
            prompt = TokenPrompt((*parts, Segment(content_id("unique", seed, number), unique)))
            yield Session(number, (Turn(prompt, _around(rng, self.output_tokens, self.spread)),))
            number += 1


class ConversationWorkload(Node):
    """Conversations: each turn sends all that was said before, the real answers included."""

    kind: Literal["conversation"] = "conversation"
    turns: Positive = 4
    """Requests in one conversation."""
    systems: Positive = 1
    """How many different system prompts there are."""
    system_tokens: Count = 128
    """Length of a system prompt, in tokens (in words, for a chat)."""
    user_tokens: Positive = 64
    """Mean length of what the user says in one turn."""
    output_tokens: Positive = 64
    """Mean length of an answer."""
    think_s: Annotated[float, Field(ge=0)] = 0.0
    """Mean pause of the user before the next turn (exponential)."""
    spread: Spread = 0.0
    """Lengths are uniform within +- this share of the mean."""
    form: Literal["ids", "chat"] = "ids"
    """Token ids (exact lengths, no template), or chat messages (any server)."""

    def sessions(self, seed: int, window: int) -> Iterator[Session]:  # noqa: ARG002 - all workloads have one signature
        """Yield endless sessions of `turns` turns."""
        rng = Random(f"conversation/{seed}")
        number = 0
        while True:
            system = content_id("system", seed, rng.randrange(self.systems))
            turns = tuple(self._turn(rng, seed, number, turn, system) for turn in range(self.turns))
            yield Session(number, turns)
            number += 1

    def _turn(self, rng: Random, seed: int, session: int, turn: int, system: int) -> Turn:
        user, length = content_id("user", seed, session, turn), _around(rng, self.user_tokens, self.spread)
        prompt: Prompt
        if self.form == "chat":
            message = Message("user", words(user, length))
            first = (Message("system", words(system, self.system_tokens)),) if not turn and self.system_tokens else ()
            prompt = ChatPrompt((*first, message))
        else:
            head = (Segment(system, self.system_tokens),) if not turn and self.system_tokens else ()
            prompt = TokenPrompt((*head, Segment(user, length)))
        think = rng.expovariate(1 / self.think_s) if turn and self.think_s else 0.0
        return Turn(prompt, _around(rng, self.output_tokens, self.spread), think)


class MooncakeWorkload(Node):
    """A Mooncake trace, fitted to the window by the rule in loadtest/trace.py."""

    kind: Literal["mooncake"] = "mooncake"
    path: Path
    """JSONL with timestamp, input_length, output_length, hash_ids."""
    granularity: Positive = 16
    """Scaled blocks are multiples of so many tokens: the cluster's block size."""
    tokens_per_block: Annotated[int, Field(gt=0, le=512)] | None = None
    """What a block of 512 becomes; None: the largest that fits."""
    longest: Positive | None = None
    """Leave out requests of more tokens than this (before scaling)."""

    def sessions(self, seed: int, window: int) -> Iterator[Session]:
        """Yield the trace's requests in order, each a session of one turn."""
        rows = [row for row in trace.read_mooncake(self.path) if self.longest is None or _total(row) <= self.longest]
        size = self.tokens_per_block
        scale = trace.fit_mooncake(rows, window, self.granularity) if size is None else trace.MooncakeScale(size)
        for number, row in enumerate(rows):
            yield Session(number, (Turn(scale.prompt(row, seed), scale.output_tokens(row)),), row.at_s)


class AzureWorkload(Node):
    """An Azure LLM inference trace: lengths and times; the prompts share nothing."""

    kind: Literal["azure"] = "azure"
    path: Path
    """CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""
    longest: Positive | None = None
    """Leave out requests of more tokens than this (before scaling)."""

    def sessions(self, seed: int, window: int) -> Iterator[Session]:
        """Yield the trace's requests in order, each a session of one turn."""
        rows = [row for row in trace.read_azure(self.path) if self.longest is None or _total(row) <= self.longest]
        factor = trace.fit_azure(rows, window)
        for number, row in enumerate(rows):
            prompt = TokenPrompt((Segment(content_id("azure", seed, number), _times(row.input_tokens, factor)),))
            yield Session(number, (Turn(prompt, _times(row.output_tokens, factor)),), row.at_s)


class PromptsWorkload(Node):
    """Prompts from a JSONL file."""

    kind: Literal["prompts"] = "prompts"
    path: Path
    """Lines with `prompt` or `messages`, optionally `output_tokens` and `at_s`."""
    output_tokens: Positive = 128
    """Most tokens of an answer where the line does not say."""

    def sessions(self, seed: int, window: int) -> Iterator[Session]:  # noqa: ARG002 - all workloads have one signature
        """Yield the file's prompts in order, each a session of one turn."""
        for number, row in enumerate(trace.read_prompts(self.path)):
            prompt: Prompt
            if row.text is None:
                prompt = ChatPrompt(tuple(Message(role, content) for role, content in row.messages))
            else:
                prompt = TextPrompt(row.text)
            yield Session(number, (Turn(prompt, row.output_tokens or self.output_tokens),), row.at_s)


Workload = Annotated[
    SyntheticWorkload | ConversationWorkload | MooncakeWorkload | AzureWorkload | PromptsWorkload,
    Field(discriminator="kind"),
]

_WORKLOAD: TypeAdapter[Workload] = TypeAdapter(Workload)
_ARRIVAL: TypeAdapter[Arrival] = TypeAdapter(Arrival)


def parse_workload(spec: str) -> Workload:
    """Read `kind:key=value,key=value`.

    Raises:
        ConfigError: unknown kind or key, value out of range; one line.
    """
    return _parse(_WORKLOAD, "workload", spec)


def parse_arrival(spec: str) -> Arrival:
    """Read `kind:key=value,key=value`.

    Raises:
        ConfigError: unknown kind or key, value out of range; one line.
    """
    return _parse(_ARRIVAL, "arrival", spec)


def take(workload: Workload, seed: int, window: int, count: int | None) -> Iterator[Session]:
    """Return the first `count` sessions (None: all; synthetic workloads never end)."""
    return islice(workload.sessions(seed, window), count)


def _parse(adapter: TypeAdapter[_T], what: str, spec: str) -> _T:
    kind, _, rest = spec.partition(":")
    fields: dict[str, Any] = {"kind": kind.strip()}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{what} {spec!r}: want key=value, got {item!r}")
        fields[key.strip()] = yaml.safe_load(value)
    try:
        return adapter.validate_python(fields)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{what} {spec!r}: {sentences(error, 'its kind', begin=1)}") from error


def _around(rng: Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread))) if spread else mean


def _total(row: trace.MooncakeRow | trace.AzureRow) -> int:
    return row.input_tokens + row.output_tokens


def _times(tokens: int, factor: float) -> int:
    return max(1, -int(-tokens * factor // 1))
