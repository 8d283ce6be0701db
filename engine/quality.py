"""How far each weight and KV format is from fp32 on a shipped text: KL divergence, and how often the same token wins.

`python -m engine.quality MODEL_DIR [TOKENS]` writes one JSON object a line: first the number of tokens, then a `Score`
for each format. The text (`quality.txt`: a story, explanations, lists, letters, code) is computed in chunks, each by
the reference backend in fp32 and by every format in turn, so that no more than one chunk's logits are kept.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from common.config import EngineConfig
from common.errors import BatonError, ConfigError
from engine.backend import Backend, load_backend
from engine.batch import Batch, make_batch
from engine.kv_cache import KVCache
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as TokenSequence
from engine.step import ScheduledChunk
from kvtransfer.layout import BlockLayout

TEXT = Path(__file__).parent / "quality.txt"
CHUNK_TOKENS = 256
WINDOW_TOKENS = 2048
"""The text is cut into windows of so many tokens that do not see each other."""
_BLOCK_TOKENS = 16


class Format(NamedTuple):
    """What is compared with fp32."""

    weights: str
    activations: str
    kv_dtype: str


FORMATS = tuple(
    Format(weights, activations, kv_dtype)
    for weights, activations in (("fp32", "int16"), ("w8", "int16"), ("q4", "int16"), ("q4", "int8"))
    for kv_dtype in ("float32", "float16", "bfloat16", "int8")
)


class Score(NamedTuple):
    """The result of one format, over all tokens.

    Attributes:
        format: what was compared.
        divergence: KL(fp32 || format), nats a token.
        agreement: share of the tokens after which both find the same token most likely.
    """

    format: Format
    divergence: float
    agreement: float


def load_text(folder: Path) -> list[int]:
    """Return the shipped text in the model's tokens.

    Raises:
        ConfigError: the model has no tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ConfigError(f"{folder} has no tokenizer.json")
    ids: list[int] = Tokenizer.from_file(str(file)).encode(TEXT.read_text(), add_special_tokens=False).ids
    return ids


def compare(folder: Path, token_ids: Sequence[int], formats: Sequence[Format], threads: int = 0) -> list[Score]:
    """Compare formats of the `cpu` backend with the reference in fp32.

    Args:
        folder: the model's.
        token_ids: the text.
        formats: what to compare.
        threads: of each forward pass; 0: all cores.

    Raises:
        ConfigError: a format that the model or the machine does not allow.
    """
    with contextlib.ExitStack() as stack:
        exact = stack.enter_context(_Reader.open(folder, Format("fp32", "int16", "float32"), threads, "reference"))
        readers = [stack.enter_context(_Reader.open(folder, format_, threads, "cpu")) for format_ in formats]
        divergences, agreements = [0.0] * len(formats), [0] * len(formats)
        for window in range(0, len(token_ids), WINDOW_TOKENS):
            for chunk in _chunks(token_ids[window : window + WINDOW_TOKENS]):
                wanted = exact.logits(chunk).double().log_softmax(-1)
                for i, reader in enumerate(readers):
                    got = reader.logits(chunk).double().log_softmax(-1)
                    divergences[i] += float((wanted.exp() * (wanted - got)).sum())
                    agreements[i] += int((wanted.argmax(-1) == got.argmax(-1)).sum())
    count = len(token_ids)
    return [Score(f, d / count, a / count) for f, d, a in zip(formats, divergences, agreements, strict=True)]


def _chunks(token_ids: Sequence[int]) -> Iterator[Batch]:
    """Yield batches over one window, in order, that ask for every row's logits."""
    sequence = TokenSequence.start("quality", list(token_ids), len(token_ids), SamplingParams(), _BLOCK_TOKENS)
    sequence.block_table = list(range(-(-len(token_ids) // _BLOCK_TOKENS)))
    while sequence.num_uncomputed:
        num_tokens = min(CHUNK_TOKENS, sequence.num_uncomputed)
        batch = make_batch([ScheduledChunk(sequence, num_tokens)], _BLOCK_TOKENS)
        yield batch.asking_all()
        sequence.num_computed += num_tokens


class _Reader:
    """A backend with a pool for one window."""

    def __init__(self, backend: Backend, kv: KVCache) -> None:
        self._backend = backend
        backend.attach(kv)

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, format_: Format, threads: int, backend_name: str) -> "Iterator[_Reader]":
        config = EngineConfig.model_validate(
            {
                "backend": backend_name,
                "weights": format_.weights,
                "activations": format_.activations,
                "kv_dtype": format_.kv_dtype,
                "threads": threads,
            }
        )
        with contextlib.ExitStack() as stack:
            backend = load_backend(folder, config).backend
            stack.callback(backend.close)
            facts = backend.facts
            if format_.kv_dtype not in facts.kv_dtypes:
                raise ConfigError(f"KV in {format_.kv_dtype} is not available with {format_.weights}")
            shape = (facts.num_layers, facts.num_kv_heads, facts.head_dim)
            layout = BlockLayout("quality", format_.kv_dtype, _BLOCK_TOKENS, *shape)
            kv = KVCache(layout, WINDOW_TOKENS // _BLOCK_TOKENS)
            stack.callback(kv.close)
            yield cls(backend, kv)

    def logits(self, batch: Batch) -> torch.Tensor:
        return self._backend.forward(batch).logits


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: python -m engine.quality MODEL_DIR [TOKENS]\n")
        return 2
    try:
        folder = Path(arguments[0]).expanduser()
        token_ids = load_text(folder)[: int(arguments[1]) if len(arguments) == 2 else None]
        sys.stdout.write(json.dumps({"tokens": len(token_ids)}) + "\n")
        for score in compare(folder, token_ids, FORMATS):
            tree = {**score.format._asdict(), "divergence": score.divergence, "agreement": score.agreement}
            sys.stdout.write(json.dumps(tree) + "\n")
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
