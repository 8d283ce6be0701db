"""docs/openai.md names every field of the HTTP API's requests, with what the code does with it."""

import re
from pathlib import Path

import pytest

from cluster.gateway.http.base import Fields
from cluster.gateway.http.chat import ChatRequest
from cluster.gateway.http.completions import CompletionRequest

DOCUMENT = (Path(__file__).parents[2] / "docs/openai.md").read_text()
STATES = {"Not supported; accepted when it changes nothing.": "refused", "Accepted and ignored": "ignored"}


def _documented(column: int) -> dict[str, str]:
    """Return the state of each field in one column of the table."""
    rows = [line.strip("| ").split("|") for line in DOCUMENT.splitlines() if line.startswith("| `")]
    return {
        name: row[column].strip()
        for row in rows
        for name in re.findall(r"`(\w+)`", row[0])
        if row[column].strip() != "-"
    }


def _coded(model: type[Fields]) -> dict[str, str]:
    found = {}
    for name, schema in model.model_json_schema()["properties"].items():
        about = schema.get("description", "")
        found[name] = next((state for words, state in STATES.items() if about.startswith(words)), "supported")
    return found


@pytest.mark.parametrize(("model", "column"), [(ChatRequest, 1), (CompletionRequest, 2)])
def test_every_field_is_documented_as_it_is(model: type[Fields], column: int) -> None:
    assert _documented(column) == _coded(model)
