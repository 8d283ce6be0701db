"""What is remembered of each request, and the file that holds a whole run.

Times are seconds since the run began, on the client's monotonic clock (virtual seconds in a simulation).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError

FORMAT = 1


class ServerTiming(NamedTuple):
    """What the server said about its own part; seconds. See Timing in common.proto."""

    ttft_s: float
    queue_s: float
    prefill_s: float
    transfer_exposed_s: float
    first_decode_s: float


class RequestRecord(NamedTuple):
    """One request, seen from the client."""

    request_id: str
    session: int
    turn: int
    intended_s: float
    """When it should have been sent: a client that lags must not make the server look better."""
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    """Between consecutive tokens; tokens that came in one message have gaps of 0."""
    finish_reason: str = ""
    error: str | None = None
    """Class of the error; None: it was answered."""
    error_message: str = ""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    transport: str | None = None
    server: ServerTiming | None = None

    @property
    def ttft_s(self) -> float | None:
        """Return seconds from sending to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def ttft_intended_s(self) -> float | None:
        """Return seconds from the intended sending to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Return seconds for each token after the first; None for a single token."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Return seconds from sending to the end."""
        return self.end_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets that a request meets or misses."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: RequestRecord, scale: float = 1.0) -> bool:
        """Whether the request was answered in time on both counts; its TTFT is counted from the intended sending."""
        if record.error is not None or record.ttft_intended_s is None:
            return False
        if record.ttft_intended_s > self.ttft_s * scale:
            return False
        return record.tpot_s is None or record.tpot_s <= self.tpot_s * scale


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One measurement of a goodput search, or one run of a sweep."""

    rate: float
    """Offered sessions per second."""
    attainment: float
    goodput: float
    """Requests per second that met the SLO."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """One run: what was asked of whom, and every request."""

    meta: dict[str, Any]
    slo: Slo
    records: Sequence[RequestRecord]
    points: tuple[RatePoint, ...] = ()
    """Goodput against rate, when a search was made."""
    summary: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        tree = {
            "format": FORMAT,
            "meta": self.meta,
            "slo": asdict(self.slo),
            "summary": self.summary,
            "points": [asdict(point) for point in self.points],
            "requests": [_to_json(record) for record in self.records],
        }
        partial.write_text(json.dumps(tree))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "RunFile":
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or is something else.
        """
        try:
            tree = json.loads(path.read_text())
            if tree["format"] != FORMAT:
                raise ConfigError(f"{path}: format {tree['format']}, this program reads {FORMAT}")
            return cls(
                meta=tree["meta"],
                slo=Slo(**tree["slo"]),
                records=[_from_json(item) for item in tree["requests"]],
                points=tuple(RatePoint(**point) for point in tree["points"]),
                summary=tree["summary"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = error.strerror if isinstance(error, OSError) else f"{error!r}"
            raise ConfigError(f"cannot read run {path}: {said}") from error


def _to_json(record: RequestRecord) -> dict[str, Any]:
    tree = record._asdict()
    tree["server"] = None if record.server is None else record.server._asdict()
    tree["gaps_s"] = [round(gap, 6) for gap in record.gaps_s]
    return tree


def _from_json(tree: dict[str, Any]) -> RequestRecord:
    server = tree.pop("server")
    gaps = tuple(tree.pop("gaps_s"))
    return RequestRecord(**tree, gaps_s=gaps, server=None if server is None else ServerTiming(**server))
