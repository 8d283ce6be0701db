"""Which tokens may come next, when a request says what its output must look like.

The state of a grammar is a function of the output's tokens: a `Matcher` counts how many it has taken and takes each of
them once, when the next token is about to be chosen. So nothing has to be handed over: not from the prefill worker,
which chose the first token with a matcher of its own, nor when a sequence moves or loses its blocks.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import llguidance
import numpy as np
from numpy.typing import NDArray

from common.errors import BatonError, InvalidRequestError, OverloadedError
from common.grammar import parser_limits
from engine.sequence import Sequence

CACHED_MAX = 64
"""Compiled grammars kept; one of 500 properties takes 2 MB."""
WAITING_MAX = 64
"""Grammars that wait for the thread; beyond it a request is refused."""
COMPILE_S = 10.0
"""Longest wait for a compiled grammar. Within its limits the library takes milliseconds."""
RETRY_AFTER_S = 1.0
_DISOBEYS = "doesn't satisfy the grammar"
"""The library's words for a wrong token; what else it refuses was too much for its limits."""


class Matcher:
    """A grammar's state in one sequence. Used by the steps that choose its tokens, and by nobody else."""

    def __init__(self, state: llguidance.LLMatcher, vocab_tokens: int) -> None:
        self._state = state
        self._num_words = -(-vocab_tokens // 32)
        self._num_taken = 0

    def allowed(self, output: Seq[int]) -> NDArray[np.int32]:
        """Return which tokens may follow.

        Args:
            output: all tokens of the output so far.

        Returns:
            [ceil(V / 32)] words with a bit for each token, lowest first; at least one is set.

        Raises:
            InvalidRequestError: the grammar is too complex to go on with.
            BatonError: the output does not obey the grammar.
        """
        for token_id in output[self._num_taken :]:
            if not self._state.consume_token(token_id):
                if _DISOBEYS in (trouble := self._trouble()):
                    raise BatonError(f"token {self._num_taken} of the output does not obey its grammar")
                raise InvalidRequestError(f"grammar is too complex at token {self._num_taken}: {trouble}")
            self._num_taken += 1
        words = np.zeros(self._num_words, dtype=np.int32)
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._state.is_error() or not words.any():
            raise InvalidRequestError(f"grammar is too complex after {self._num_taken} tokens: {self._trouble()}")
        return words

    def _trouble(self) -> str:
        return " ".join(self._state.get_error().split()) or "no token can follow"


class Masks(NamedTuple):
    """What the grammars of a batch allow."""

    rows: list[int]
    """Those of sequences with a grammar, in order."""
    excluded: NDArray[np.bool_]
    """[len(rows), V]: the tokens that may not follow."""
    failed: dict[int, BatonError]
    """By row: no token can be chosen."""


def masks_of(sequences: Seq[Sequence], vocab_tokens: int) -> Masks:
    """Return which tokens may follow in each sequence that has a grammar.

    Args:
        sequences: of the batch; those with a constraint are ready.
        vocab_tokens: V.
    """
    rows, words, failed = list[int](), list[NDArray[np.int32]](), dict[int, BatonError]()
    for row, sequence in enumerate(sequences):
        if sequence.matcher is None:
            assert sequence.is_ready
            continue
        try:
            words.append(sequence.matcher.allowed(sequence.token_ids[sequence.num_prompt_tokens :]))
            rows.append(row)
        except BatonError as error:
            failed[row] = error
    if not rows:
        return Masks(rows, np.empty((0, vocab_tokens), dtype=np.bool_), failed)
    bits = np.unpackbits((~np.stack(words)).view(np.uint8), axis=1, count=vocab_tokens, bitorder="little")
    return Masks(rows, bits.view(np.bool_), failed)


class Grammars:
    """Compiles one model's grammars on a thread of its own and keeps the last ones. Owned by the worker's loop."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, limits: llguidance.LLParserLimits | None = None) -> None:
        """Begin with nothing compiled.

        Args:
            tokenizer: of the model, as large as its vocabulary.
            limits: of each grammar; those of common.grammar unless given.
        """
        self._tokenizer = tokenizer
        self._limits = limits or parser_limits()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, asyncio.Future[llguidance.LLMatcher]] = OrderedDict()
        self._num_waiting = 0

    @classmethod
    def load(cls, model_dir: Path, vocab_tokens: int, eos_token_ids: frozenset[int]) -> Self | None:
        """Read the model's tokenizer; None if it has none, or no token that could end an output. Takes up to 0.5 s."""
        path = model_dir / "tokenizer.json"
        eos = sorted(token_id for token_id in eos_token_ids if token_id < vocab_tokens)
        if not path.is_file() or not eos:
            return None
        return cls(llguidance.LLTokenizer(str(path), n_vocab=vocab_tokens, eos_token=eos))

    async def matcher(self, constraint: str) -> Matcher:
        """Return the state before the first token of an output.

        Args:
            constraint: a grammar in llguidance's JSON form, see common/grammar.py.

        Raises:
            InvalidRequestError: it is no grammar, or too large a one.
            OverloadedError: too many wait to be compiled.
        """
        compiled = self._compiled.get(constraint)
        if compiled is None:
            compiled = self._compiled[constraint] = self._start(constraint)
        self._compiled.move_to_end(constraint)
        try:
            async with asyncio.timeout(COMPILE_S):
                state = await asyncio.shield(compiled)
        except TimeoutError as error:
            raise InvalidRequestError(f"grammar is not compiled after {COMPILE_S:g} s") from error
        return Matcher(state.deep_copy(), self._tokenizer.vocab_size)

    def close(self) -> None:
        """Give the thread back; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, constraint: str) -> "asyncio.Future[llguidance.LLMatcher]":
        if self._num_waiting >= WAITING_MAX:
            raise OverloadedError(f"{self._num_waiting} grammars wait to be compiled already", RETRY_AFTER_S)
        while len(self._compiled) >= CACHED_MAX:
            self._compiled.popitem(last=False)
        self._num_waiting += 1
        compiled = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, constraint)

        def done(future: "asyncio.Future[llguidance.LLMatcher]") -> None:
            self._num_waiting -= 1
            is_failed = future.cancelled() or future.exception() is not None
            if is_failed and self._compiled.get(constraint) is future:
                del self._compiled[constraint]

        compiled.add_done_callback(done)
        return compiled

    def _compile(self, constraint: str) -> llguidance.LLMatcher:
        state = llguidance.LLMatcher(self._tokenizer, constraint, log_level=0, limits=self._limits)
        if state.is_error():
            raise InvalidRequestError(f"grammar is not valid: {' '.join(state.get_error().split())}")
        return state
