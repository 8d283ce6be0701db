"""The engine's facade: one model, one pool, one step at a time. The loops of prefill and decode know nothing below it.

Imports no torch by itself; `Engine.load` brings it in.
"""

import math
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

from baton_pb.v1 import common_pb2, worker_pb2
from common.config import EngineConfig
from common.errors import InvalidRequestError
from engine.bookkeeping import Bookkeeping
from engine.codec_bound import CodecBound
from engine.grammar import Grammars
from engine.kv_cache import KVMemory
from engine.placement import Placement
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import LayerWatch, Limits, ScheduledChunk, TokenOutput
from engine.tiers import BlockTiers, make_tiers
from kvtransfer.layout import BlockLayout

FinishReason = common_pb2.FinishReason


class Runner(Protocol):
    """One forward pass and the sampling after it. Called from the loop's compute thread only."""

    @property
    def backend(self) -> str:
        """Name of the forward pass in use."""
        ...

    def run(self, batch: Seq[ScheduledChunk], watch: LayerWatch | None) -> list[TokenOutput | None]:
        """Write the chunks' KV to the pool; return a token for each chunk that reaches its sequence's end."""
        ...

    def close(self) -> None:
        """Let go of weights and of the pool's memory."""
        ...


class Engine(Bookkeeping):
    """One model and one pool.

    Everything but `step` is plain bookkeeping for the worker's loop. `step` blocks for one forward pass and runs on
    the loop's compute thread; meanwhile the loop must leave the scheduled sequences and their blocks alone.
    """

    def __init__(
        self, runner: Runner, kv: KVMemory, facts: Limits, grammars: Grammars | None = None, slow_paths: Seq[str] = ()
    ) -> None:
        super().__init__(kv.num_blocks, kv.layout.block_tokens, facts.context_tokens)
        self.kv = kv
        self.layout: BlockLayout = kv.layout
        self.vocab_tokens = facts.vocab_tokens
        self.eos_token_ids = facts.eos_token_ids
        self.tiers: BlockTiers | None = None
        self.block_s = math.inf
        """Seconds to compute a block of a prompt, as in the last step that computed one; infinite before the first."""
        self.placement = Placement()
        """Of the thread that will call `step`."""
        self.slow_paths = slow_paths
        """What computes more slowly than it could, each with its reason; empty: nothing."""
        self._runner = runner
        self._grammars = grammars

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig, model_id: str, bound: CodecBound | None = None) -> "Engine":
        """Load a model and make its pool. Blocks for seconds.

        Args:
            model_dir: folder with config.json, safetensors and tokenizer; or a `.gguf` file.
            config: backend, weight format, pool size, threads.
            model_id: name that handshakes compare.
            bound: codecs that this worker's blocks go through, and what these may change; None: none does.

        Raises:
            ConfigError: missing, corrupt or unsupported model or setting, or a codec that changes too much; the message
                names it.
        """
        # Loading needs torch, which takes a second to import; schedulers and fakes do without.
        from engine.loading import load_runner

        return cls(*load_runner(model_dir, config, model_id, bound))

    def open_tiers(self, config: EngineConfig, worker_id: str, model_dir: Path) -> None:
        """Keep what the pool evicts, if the config says so. Whoever owns the loop runs `tiers.run`.

        Raises:
            ConfigError: the disk tier's folder cannot be used.
        """
        self.tiers = make_tiers(self.kv, self.pool.log, config, worker_id, model_dir, self.backend)
        if self.tiers is not None:
            self.pool.on_evict = self.tiers.evicted

    @property
    def backend(self) -> str:
        """Name of the forward pass in use."""
        return self._runner.backend

    def num_below(self, hashes: Seq[bytes]) -> int:
        """Return how many of the leading `hashes` the tiers below the pool could bring back, exactly.

        For sequences that have begun: with other KV than it had, one would go on with other tokens.
        """
        return self.tiers.peek(list(hashes), self.block_s) if self.tiers is not None and self.tiers.is_exact else 0

    def sequence_from_pb(self, request: worker_pb2.StartRequest | worker_pb2.PrefillRequest) -> Sequence:
        """Return the sequence that a message asks for; it holds no block yet.

        Raises:
            InvalidRequestError: naming what is wrong with prompt or sampling.
        """
        return Sequence.start(
            request.request_id,
            request.token_ids[:],  # as a list, in a third of the time of list()
            request.num_prompt_tokens,
            SamplingParams.from_pb(request.sampling, self.vocab_tokens),
            self.block_tokens,
            request.cache_salt,
        )

    async def prepare(self, sequence: Sequence) -> None:
        """Compile a sequence's constraint, if it has one; then it `is_ready`.

        Raises:
            InvalidRequestError: it cannot be obeyed.
            OverloadedError: too many wait for the same.
        """
        if not sequence.is_ready:
            assert sequence.sampling.constraint is not None
            if self._grammars is None:
                raise InvalidRequestError("grammar is not possible: this model has no tokenizer.json or no stop token")
            sequence.matcher = await self._grammars.matcher(sequence.sampling.constraint)

    def check_request(self, token_ids: Seq[int], sampling: SamplingParams) -> None:
        """Refuse a request that this engine could never serve.

        Raises:
            InvalidRequestError: naming the limit and the value.
        """
        num_tokens = len(token_ids)
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty: need at least 1 token")
        if num_tokens >= self.context_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, no room in the context window of {self.context_tokens}"
            )
        self.check_prompt_fits(num_tokens)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_tokens:
            raise InvalidRequestError(f"token ids must be in [0, {self.vocab_tokens}), got {low if low < 0 else high}")
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            if ids and max(ids) >= self.vocab_tokens:
                raise InvalidRequestError(f"{name} must name tokens below {self.vocab_tokens}, got {max(ids)}")

    def step(self, batch: Seq[ScheduledChunk], watch: LayerWatch | None = None) -> list[TokenOutput | None]:
        """Run one forward pass over the ragged batch and sample.

        Changes no sequence: the loop applies the results with `complete`. The block tables must already have room for
        the chunks. `watch` is told when layers are final, before the step is over.

        Returns:
            For each chunk the sampled token (or its `error`) if it reaches the end of its sequence's tokens, else None.
        """
        for sequence, num_tokens in batch:
            end = sequence.num_computed + num_tokens
            assert 1 <= num_tokens <= sequence.num_uncomputed, f"{num_tokens} of {sequence.num_uncomputed} tokens"
            assert len(sequence.block_table) >= self.blocks_for(end), f"no block for token {end - 1}"
        if not batch:
            return []
        return self._runner.run(batch, watch)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step what a block of a prompt costs."""
        if num_tokens >= self.block_tokens:  # fewer say what a step costs, not what a token does
            self.block_s = seconds / num_tokens * self.block_tokens

    def complete(self, chunk: ScheduledChunk, output: TokenOutput | None) -> None:
        """Apply a step's result to its sequence: KV is there, full blocks are findable, the token is appended."""
        sequence = chunk.sequence
        assert (output is not None) == chunk.reaches_end
        assert output is None or output.error is None, "the sequence ends with an error instead"
        self.advance(sequence, sequence.num_computed + chunk.num_tokens)
        if output is not None:
            sequence.append(output.token_id, self.block_tokens)

    def finish_reason(self, sequence: Sequence) -> "common_pb2.FinishReason.ValueType | None":
        """Return why the sequence ends with its last token, or None if it goes on."""
        sampling, num_output = sequence.sampling, sequence.num_output_tokens
        if num_output == 0:
            return None
        last = sequence.token_ids[-1]
        # A grammar allows the model's own stop tokens only where it is complete, and then there may be nothing else.
        is_complete = sampling.constraint is not None and last in self.eos_token_ids
        if is_complete or (num_output >= sampling.min_tokens and last in self.stop_ids(sampling)):
            return common_pb2.FINISH_REASON_STOP
        is_long = sampling.max_tokens is not None and num_output >= sampling.max_tokens
        if is_long or sequence.num_tokens >= self.context_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return None

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the token ids that end a sequence with these rules."""
        return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | self.eos_token_ids

    def close(self) -> None:
        """Give back weights, pool memory and cores; no step may run any more. Idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        self._runner.close()
        self.kv.close()
        self.placement.release()
