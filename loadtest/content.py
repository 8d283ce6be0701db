"""What prompts are made of: runs of tokens that follow from a number, so that equal numbers mean an equal prefix.

A prompt is kept as its parts. The load test turns them into token ids for the model at hand; the simulator compares
the parts themselves and never makes a token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np

_ID_BITS = 64
_MIX_A, _MIX_B, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body information back parent face level
office door health person art war history party result change morning reason research girl guy moment air
teacher force
"""
_WORDS = _WORD_LIST.split()


class Segment(NamedTuple):
    """The first `num_tokens` tokens of the endless run that `content_id` (0 to 2**64 - 1) names."""

    content_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Token ids as they are: an answer that came back."""

    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Return the length."""
        return len(self.token_ids)


class TokenPrompt(NamedTuple):
    """A prompt by token ids."""

    parts: tuple[Segment | TokenRun, ...]

    @property
    def num_tokens(self) -> int:
        """Return the length of all parts together."""
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt that is completed as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that the server renders with its chat template."""

    messages: tuple[Message, ...]


Prompt = TokenPrompt | TextPrompt | ChatPrompt


def content_id(*names: str | int) -> int:
    """Return the number of the content with these names; other names, another number."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def header_tokens(vocab_tokens: int) -> int:
    """Return within how many tokens two contents are sure to differ, for a vocabulary of that size."""
    return -(-_ID_BITS // _bits(vocab_tokens)[1])


def token_ids(prompt: TokenPrompt, vocab_tokens: int) -> list[int]:
    """Return the prompt's token ids.

    Args:
        prompt: what to spell out.
        vocab_tokens: size of the model's vocabulary, at least 32. The lowest and highest sixteenth, where special
            tokens live, are not used.
    """
    ids: list[int] = []
    for part in prompt.parts:
        match part:
            case Segment(content, num_tokens):
                ids += _run(content, num_tokens, vocab_tokens)
            case TokenRun(run):
                ids += run
    return ids


def words(content: int, count: int) -> str:
    """Return `count` common English words that follow from `content`: about one token each."""
    rng = Random(content)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def as_text(prompt: TokenPrompt) -> TextPrompt:
    """Return words in place of token ids, for servers that take no ids: sharing is kept, lengths are approximate."""
    runs = [
        words(part.content_id, part.num_tokens)
        if isinstance(part, Segment)
        else " ".join(_WORDS[token % len(_WORDS)] for token in part.token_ids)
        for part in prompt.parts
    ]
    return TextPrompt(" ".join(runs))


def continued(prompt: Prompt, answer_ids: Sequence[int], answer_text: str, following: Prompt) -> Prompt:
    """Return the next turn's prompt: all that was said, the real answer, and what the user says next."""
    match prompt, following:
        case TokenPrompt(parts), TokenPrompt(more):
            return TokenPrompt((*parts, TokenRun(tuple(answer_ids)), *more))
        case ChatPrompt(messages), ChatPrompt(more_messages):
            return ChatPrompt((*messages, Message("assistant", answer_text), *more_messages))
        case TextPrompt(text), TextPrompt(more_text):
            return TextPrompt(text + answer_text + more_text)
    raise AssertionError("the turns of one session are of one kind")


def _bits(vocab_tokens: int) -> tuple[int, int]:
    """Return the lowest token id in use, and how many bits one token can spell."""
    assert vocab_tokens >= 32
    low = vocab_tokens // 16
    return low, (vocab_tokens - 2 * low).bit_length() - 1


@lru_cache(maxsize=8192)
def _run(content: int, num_tokens: int, vocab_tokens: int) -> tuple[int, ...]:
    # The number itself is spelled first, so that two contents differ within header_tokens(); then splitmix64.
    low, bits = _bits(vocab_tokens)
    mask = (1 << bits) - 1
    header = [low + ((content >> shift) & mask) for shift in range(0, _ID_BITS, bits)][:num_tokens]
    with np.errstate(over="ignore"):
        x = np.arange(num_tokens - len(header), dtype=np.uint64) * _GOLDEN + np.uint64(content)
        x = (x ^ (x >> np.uint64(30))) * _MIX_A
        x = (x ^ (x >> np.uint64(27))) * _MIX_B
        x = x ^ (x >> np.uint64(31))
    body = low + x % np.uint64(vocab_tokens - 2 * low)
    return (*header, *(int(token) for token in body))
