"""`python -m engine.codec_report MODEL_DIR`: what each codec changes of a model's answers, one JSON line a codec."""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config import EngineConfig
from engine.codec_quality import CodecQuality, Copied, Scorer, measure, prose
from engine.loading import load_parts
from kvtransfer.codecs.registry import CODECS
from kvtransfer.pieces import Piece
from kvtransfer.seal import Seal

NUM_CONTEXTS = 4


SEALED_BYTES = 4 * 1024 * 1024
SEAL_ROUNDS = 9


class CodecReport(NamedTuple):
    """One codec on one model: what it changes, and what it costs on one core, on KV that the model computed."""

    codec: str
    kl_mean: float
    kl_max: float
    top_agreement: float
    greedy_agreement: float
    num_tokens: int
    ratio: float
    """Bytes in the pool / bytes on the wire."""
    encode_bytes_per_s: float
    """Of the pool's bytes; a median over blocks, as `decode_bytes_per_s`."""
    decode_bytes_per_s: float


def report(model_dir: Path, config: EngineConfig, codecs: Iterable[str]) -> Iterator[CodecReport]:
    """Load a model and yield what each codec changes and costs.

    Raises:
        ConfigError: the model cannot be loaded, or its pool is too small to measure.
    """
    parts = load_parts(model_dir, config, "quality")
    try:
        token_ids = prose(model_dir, parts.backend.facts.vocab_tokens)
        for name in codecs:
            scorer = Scorer(parts.backend, parts.kv, parts.context_tokens)
            quality = measure(scorer, name, token_ids, NUM_CONTEXTS, is_greedy_wanted=True)
            yield _with_costs(quality, scorer.copied)
    finally:
        parts.backend.close()
        parts.kv.close()


def seal_bytes_per_s() -> float:
    """Return the rate at which one core seals pieces."""
    seal, piece = Seal(bytes(16), bytes(32)), Piece(0, (0,), range(1))
    data = memoryview(bytes(SEALED_BYTES))
    seconds = []
    for number in range(SEAL_ROUNDS):
        started = time.monotonic()
        seal.close(data, piece, number)
        seconds.append(time.monotonic() - started)
    return SEALED_BYTES / statistics.median(seconds)


def _with_costs(quality: CodecQuality, copied: Sequence[Copied]) -> CodecReport:
    assert quality.greedy_agreement is not None
    ratio = sum(block.raw_bytes for block in copied) / sum(block.encoded_bytes for block in copied)
    rates = [
        statistics.median(block.raw_bytes / max(seconds, 1e-9) for block, seconds in times)
        for times in ([(b, b.encode_s) for b in copied], [(b, b.decode_s) for b in copied])
    ]
    return CodecReport(
        quality.codec,
        quality.kl_mean,
        quality.kl_max,
        quality.top_agreement,
        quality.greedy_agreement,
        quality.num_tokens,
        ratio,
        *rates,
    )


def main() -> None:
    """Print the report, and a last line with the rate of sealing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--engine", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--codecs", default=",".join(CODECS), help="which")
    arguments = parser.parse_args()
    config = EngineConfig.model_validate_json(arguments.engine)
    for line in report(arguments.model_dir, config, arguments.codecs.split(",")):
        print(json.dumps(line._asdict()), flush=True)  # noqa: T201  # the program's answer
    print(json.dumps({"seal_bytes_per_s": seal_bytes_per_s()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
