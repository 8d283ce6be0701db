"""`make bench-grammars`: llguidance, which we use, beside xgrammar: compiling JSON schemas, and masks under them.

One thread. Each answer is tokenized as it stands, so both see the same tokens. Libraries are warm, and keep nothing of
a schema that they compiled before.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import llguidance
import llguidance.torch
import torch
import transformers
import typer

from cluster.model_store import prepare
from common.config_file import load

ROUNDS = 7
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "two fields": (PERSON, {"name": "Ada Lovelace", "age": 36}),
    "list of objects": (
        {"type": "array", "items": PERSON, "maxItems": 20},
        [{"name": f"Person number {i}", "age": i} for i in range(12)],
    ),
    "enum of 500": (
        {
            "type": "object",
            "properties": {"code": {"enum": [f"item-{i:04d}" for i in range(500)]}},
            "required": ["code"],
        },
        {"code": "item-0317"},
    ),
    "patterns": (
        {
            "type": "object",
            "properties": {
                "mail": {"type": "string", "pattern": r"^[a-z0-9.]{1,40}@[a-z]{2,20}\.(com|org|net)$"},
                "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$"},
            },
            "required": ["mail", "date"],
        },
        {"mail": "ada.lovelace@example.org", "date": "1843-09-05T10:30:00Z"},
    ),
    "60 optional fields": (
        {
            "type": "object",
            "properties": {f"field_{i}": {"type": ["string", "number", "null"]} for i in range(60)},
            "additionalProperties": False,
        },
        {f"field_{i}": "some text" for i in range(0, 60, 3)},
    ),
}


class Library(Protocol):
    """One of the two."""

    name: str

    def compile(self, schema: str) -> Callable[[Sequence[int]], list[float]]:
        """Compile; return what obeys tokens one by one and says the seconds of each mask."""


class Llguidance:
    """As engine/grammar.py uses it."""

    name = "llguidance"

    def __init__(self, model: Path, vocab: int) -> None:
        self._tokenizer = llguidance.LLTokenizer(str(model / "tokenizer.json"), n_vocab=vocab)
        self._mask = llguidance.torch.allocate_token_bitmask(1, vocab)

    def compile(self, schema: str) -> Callable[[Sequence[int]], list[float]]:
        """See `Library`."""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
        compiled = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)

        def obey(tokens: Sequence[int]) -> list[float]:
            state, times = compiled.deep_copy(), []
            for token in tokens:
                start = time.perf_counter()
                llguidance.torch.fill_next_token_bitmask(state, self._mask)
                times.append(time.perf_counter() - start)
                if not state.consume_token(token):
                    raise SystemExit(f"{self.name} refuses token {token}: {state.get_error()}")
            return times

        return obey


class Xgrammar:
    """One thread, nothing kept of earlier schemas."""

    name = "xgrammar"

    def __init__(self, model: Path, vocab: int) -> None:
        import xgrammar  # type: ignore[import-not-found]  # it lies in a folder of its own

        self._library = xgrammar
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab)

    def compile(self, schema: str) -> Callable[[Sequence[int]], list[float]]:
        """See `Library`."""
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        compiled = compiler.compile_json_schema(schema, any_whitespace=False, separators=(", ", ": "))

        def obey(tokens: Sequence[int]) -> list[float]:
            state, times = self._library.GrammarMatcher(compiled), []
            for token in tokens:
                start = time.perf_counter()
                state.fill_next_token_bitmask(self._mask)
                times.append(time.perf_counter() - start)
                if not state.accept_token(token):
                    raise SystemExit(f"{self.name} refuses token {token}")
            return times

        return obey


def main(
    model: Annotated[Path | None, typer.Argument(help="A folder with tokenizer.json; none: the demo model.")] = None,
) -> None:
    """Print a row for each schema and library: milliseconds to compile, microseconds a mask, medians of the rounds."""
    torch.set_num_threads(1)
    model = model or asyncio.run(prepare(load(None, []).model, lambda *_: None)).path
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    libraries: list[Library] = [Llguidance(model, vocab), Xgrammar(model, vocab)]
    typer.echo(
        f"{'schema':20}{'library':12}{'compile, ms':>14}{'spread':>8}{'mask, us: p50':>15}{'p99':>9}{'largest':>9}"
    )
    for case, (schema, answer) in CASES.items():
        tokens = tokenizer.encode(json.dumps(answer), add_special_tokens=False)
        compiling: dict[str, list[float]] = {library.name: [] for library in libraries}
        masks: dict[str, list[list[float]]] = {library.name: [] for library in libraries}
        for _ in range(ROUNDS):
            for library in libraries:  # in turn, so that a disturbance meets both
                start = time.perf_counter()
                obey = library.compile(json.dumps(schema))
                compiling[library.name].append(time.perf_counter() - start)
                masks[library.name].append(obey(tokens))
        for library in libraries:
            times = compiling[library.name]
            each = sorted(median(position) for position in zip(*masks[library.name], strict=True))
            p50, p99, most = (1e6 * each[int(share * (len(each) - 1))] for share in (0.5, 0.99, 1.0))
            spread = (max(times) - min(times)) / median(times)
            typer.echo(
                f"{case:20}{library.name:12}{1e3 * median(times):14.2f}{spread:8.0%}{p50:15.1f}{p99:9.1f}{most:9.1f}"
            )


if __name__ == "__main__":
    typer.run(main)
