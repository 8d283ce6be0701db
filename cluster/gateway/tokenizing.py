"""Prompts -> token ids and chain hashes; long ones on a thread of their own, so that streams go on meanwhile."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cluster.gateway.chat import ChatPrompt
from cluster.gateway.parsing.formats import Formats
from cluster.gateway.rendering import Rendering
from cluster.gateway.request import Prompt, TextPrompt, TokenPrompt
from common.chain_hash import chain_hashes
from common.fair_thread import FairThread
from common.text import Text

_INLINE_CHARACTERS_MAX = 4000
"""About 1 ms of tokenizing on this project's 2-core machine; a hop to the thread and back costs 0.1 ms."""
_INLINE_TOKENS_MAX = 4000
"""About 0.5 ms of hashing."""

T = TypeVar("T")


class Tokenizing:
    """Works on the gateway's one thread for long work, at which tenants take turns."""

    def __init__(self, text: Text, formats: Formats, thread: FairThread) -> None:
        self._text = text
        self._rendering = Rendering(text, formats)
        self._thread = thread

    async def token_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return a prompt's ids.

        Raises:
            InvalidRequestError: the chat template refuses it.
        """
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text, add_special_tokens):
                return await self._run(len(text), lambda: self._text.encode(text, add_special_tokens))
            case ChatPrompt():
                return await self._run(prompt.num_characters, lambda: self._rendering.token_ids(prompt))

    async def hashes(self, token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
        """Return the chain hashes of the full blocks, keyed with the tenant's salt."""
        if len(token_ids) <= _INLINE_TOKENS_MAX:
            return chain_hashes(token_ids, block_tokens, salt)
        return await self._thread.run(lambda: chain_hashes(token_ids, block_tokens, salt))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread, when it is the caller's turn."""
        return await self._thread.run(work)

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        return work() if num_characters <= _INLINE_CHARACTERS_MAX else await self.on_thread(work)
