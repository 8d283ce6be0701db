"""Options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

TargetArgument = Annotated[
    str, typer.Argument(help="HOST:PORT of Baton's gRPC API, or http(s)://... of any OpenAI-compatible server.")
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        help="KIND[:key=value,...]. synthetic: prompt_tokens output_tokens spread prefixes prefix_tokens. "
        "conversation: turns systems system_tokens user_tokens output_tokens think_s spread form(ids|chat). "
        "mooncake: path tokens_per_block granularity longest. azure: path longest. prompts: path output_tokens.",
    ),
]
ArrivalOption = Annotated[
    str,
    typer.Option(
        "--arrival",
        "-a",
        help="KIND[:key=value,...]. poisson: rate. constant: rate. gamma: rate burstiness. closed: users think_s. "
        "trace: speedup.",
    ),
]
SessionsOption = Annotated[
    int | None,
    typer.Option("--sessions", "-n", min=1, help="Most sessions (requests, or whole conversations)."),
]
DurationOption = Annotated[float | None, typer.Option(min=0.001, help="Start no session after so many seconds.")]
SeedOption = Annotated[int, typer.Option(help="Of content and arrivals: the same seed sends the same.")]
TtftOption = Annotated[float, typer.Option("--slo-ttft", min=0, help="Target for TTFT, seconds.")]
TpotOption = Annotated[float, typer.Option("--slo-tpot", min=0, help="Target for TPOT, seconds.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, help="Deadline of each request, seconds.")]
IgnoreEosOption = Annotated[bool, typer.Option(help="Generate exactly as many tokens as asked.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write every request and a summary (JSON).")]
ReportOption = Annotated[Path | None, typer.Option("--report", "-r", help="Write a self-contained HTML page.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
ModelOption = Annotated[str | None, typer.Option(help="Model to ask for (OpenAI targets).")]
ContextOption = Annotated[int, typer.Option(min=64, help="Window, where the server does not tell (OpenAI targets).")]
VocabOption = Annotated[
    int | None, typer.Option(min=32, help="Draw token ids below this; OpenAI targets do not tell theirs: 32000.")
]
WordsOption = Annotated[bool, typer.Option("--words", help="Send words in place of token ids (OpenAI targets).")]
KeyOption = Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="Holds the API key to show.")]
RateOption = Annotated[float, typer.Option("--first-rate", min=0.0001, help="Sessions per second to begin with.")]
PrecisionOption = Annotated[float, typer.Option(min=0.001, help="End of the search: relative width of the bracket.")]
TargetsOption = Annotated[
    bool, typer.Option("--targets", help="Each request asks for the SLO: one that would miss it is refused at once.")
]
