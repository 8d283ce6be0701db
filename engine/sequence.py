"""One request inside one worker: its tokens, its place in the pool, and what names its prefixes.

No torch here: the loops and their schedulers work on sequences without a model.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.chain_hash import chain_hashes, extend_chain, root_hash
from common.errors import InvalidRequestError
from engine.sampling_params import SamplingParams


class TokenMatcher(Protocol):
    """Says which tokens may come next in one sequence. Used by the step alone."""

    def allowed(self, output: Seq[int]) -> NDArray[np.int32]:
        """Return which tokens may follow all tokens of the output so far; see engine.grammar.Matcher."""
        ...


@dataclass(slots=True)
class Sequence:
    """Token ids and block table of one request. Owned by the worker's loop.

        token_ids   prompt ................ | output ......... last
        pool        num_computed tokens have KV in block_table | not yet

    Between steps of a decoding sequence exactly the last token has no KV yet.
    """

    request_id: str
    token_ids: list[int]
    """The prompt and what was generated since."""
    num_prompt_tokens: int
    sampling: SamplingParams
    hashes: list[bytes]
    """Chain hash of each full block of token_ids."""
    block_table: list[int]
    """Ids of the blocks that hold (or will hold) the tokens, in token order."""
    num_computed: int = 0
    """Leading tokens whose KV is in the pool."""
    num_cached: int = 0
    """Leading prompt tokens that were found in the prefix cache."""
    prefill_device_s: float = 0.0
    """Its share of the steps' seconds: of those that computed prompts, and of those that decoded."""
    decode_device_s: float = 0.0
    cache_salt: bytes = b""
    matcher: TokenMatcher | None = None
    """Of its constraint, once that is compiled."""

    @classmethod
    def start(
        cls,
        request_id: str,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        block_tokens: int,
        cache_salt: bytes = b"",
    ) -> "Sequence":
        """Make a sequence that holds no block yet.

        Args:
            request_id: names it in logs and messages.
            token_ids: the prompt, followed by tokens that were generated before the sequence came here.
            num_prompt_tokens: how many of them are the prompt.
            sampling: how further tokens are chosen.
            block_tokens: tokens in a block of the pool it will live in.
            cache_salt: keys the chain hashes when tenants are isolated, at most 64 bytes.

        Raises:
            InvalidRequestError: an empty prompt, a prompt longer than the tokens, or a salt that is too long.
        """
        if not 1 <= num_prompt_tokens <= len(token_ids):
            raise InvalidRequestError(f"the prompt has {num_prompt_tokens} of {len(token_ids)} tokens: need at least 1")
        if len(cache_salt) > 64:
            raise InvalidRequestError(f"cache_salt must have at most 64 bytes, got {len(cache_salt)}")
        hashes = chain_hashes(token_ids, block_tokens, cache_salt)
        return cls(request_id, list(token_ids), num_prompt_tokens, sampling, hashes, [], cache_salt=cache_salt)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, here or elsewhere."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it: a constraint must be compiled first."""
        return self.sampling.constraint is None or self.matcher is not None

    @property
    def needs_logits(self) -> bool:
        """Whether its next token takes more than to know which logit is the greatest."""
        return not self.sampling.is_plain or self.num_output_tokens < self.sampling.min_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV has still to be computed (or received)."""
        return len(self.token_ids) - self.num_computed

    def reusable_hashes(self, block_tokens: int) -> list[bytes]:
        """Return the hashes worth looking up in a prefix cache.

        The last token always has to be computed, since its logits choose the next one; so a block that ends with it
        is left out.
        """
        return self.hashes[: (len(self.token_ids) - 1) // block_tokens]

    def append(self, token_id: int, block_tokens: int) -> None:
        """Add a generated token and, when it fills a block, that block's hash."""
        self.token_ids.append(token_id)
        num_full = len(self.token_ids) // block_tokens
        if num_full > len(self.hashes):
            parent = self.hashes[-1] if self.hashes else root_hash(block_tokens, self.cache_salt)
            self.hashes.append(extend_chain(parent, self.token_ids[(num_full - 1) * block_tokens :][:block_tokens]))
