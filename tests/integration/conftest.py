"""Models and texts that several integration tests use."""

from pathlib import Path

import pytest

from cluster.model_store import resolve
from common.config import ModelConfig
from common.text import Text

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's folder, fetched and converted if it is not there yet."""
    return resolve(ModelConfig()).path


@pytest.fixture(scope="session")
def demo_text_tokens(demo_model_dir: Path) -> list[int]:
    """Prose that never changes: the licence, twice over, the second time with its lines in reverse order."""
    lines = (REPOSITORY / "LICENSE").read_text().splitlines()
    tokens = Text.load(demo_model_dir).encode("\n".join([*lines, *reversed(lines)]))
    assert len(tokens) > 3000
    return tokens
