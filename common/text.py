"""Text <-> token ids of one model: its tokenizer, its chat template, text while tokens arrive. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import tokenizers

from common.chat_template import ChatTemplate
from common.detokenizer import ByteDecoder, Detokenizer, ShownDecoder, TokenDecoder, WindowDecoder
from common.errors import ConfigError, InvalidRequestError
from common.model_facts import read_json

_BYTES_CACHED_MAX = 1 << 18


class Text:
    """One model's text. Stateless after `load`, safe to use from any thread; `encode` lets other threads run."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        """Wrap a tokenizer; `load` is the usual way."""
        # A tokenizer file may carry the settings of its training: a prompt is never cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(tokenizer)
        self._token_bytes = lru_cache(_BYTES_CACHED_MAX)(self._bytes_of)

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder. Slow: up to a second.

        Raises:
            ConfigError: a file is missing or broken; the message names it.
        """
        path = model_dir / "tokenizer.json"
        read_json(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ConfigError(f"cannot read model file {path}: {error}") from error
        return cls(tokenizer, ChatTemplate.load(model_dir))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template's text; empty if there is none."""
        return "" if self._template is None else self._template.source

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads of what it is given."""
        return frozenset() if self._template is None else self._template.variables

    @property
    def vocab_tokens(self) -> int:
        """Tokens that the tokenizer knows; the model may have room for more."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with what the tokenizer adds by itself (a BOS, if it has one)."""
        # A batch of one: `encode` holds the interpreter for as long as it takes, seconds for a megabyte. The fast one
        # leaves out the offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids that the tokenizer does not know have none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return one token's own text, special or not; half a character becomes a replacement character."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its own text; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no text unless they are asked for."""
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of texts."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's own bytes, special or not: a part of a character stays a part."""
        if self._is_byte_level and token_id not in self._special_ids:
            return self._token_bytes(token_id)
        return self.token(token_id).encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **extra: Any) -> list[int]:
        """Return the prompt of a conversation, up to the beginning of the assistant's turn.

        Args:
            messages: see ChatTemplate.render.
            extra: as for ChatTemplate.render.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: send text or token ids")
        # The template writes the special tokens itself.
        return self.encode(self._template.render(messages, **extra), add_special_tokens=False)

    def detokenizer(
        self, stop: Sequence[str] = (), shown: frozenset[int] = frozenset(), keeps_stop: bool = False
    ) -> Detokenizer:
        """Begin the text of a sequence.

        Args:
            stop: strings that end it, none of them empty.
            shown: special tokens that are written out in it; `special_ids`: all.
            keeps_stop: it ends with the stop string, instead of before it.
        """
        decoder = ShownDecoder(self._decoder, {i: self.token(i) for i in shown}) if shown else self._decoder()
        return Detokenizer(decoder, stop, keeps_stop)

    def _decoder(self) -> TokenDecoder:
        if self._is_byte_level:
            return ByteDecoder(self._token_bytes)
        return WindowDecoder(self.decode, self._special_ids.__contains__)

    def _bytes_of(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token is written as it is
            return token.encode()


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the decoder does nothing but turn the 256 characters of GPT-2's alphabet back into bytes."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
