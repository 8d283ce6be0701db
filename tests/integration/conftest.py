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
    """English prose of some thousand tokens: the project's own documents."""
    documents = [REPOSITORY / "README.md", REPOSITORY / "docs/ARCHITECTURE.md", REPOSITORY / "LICENSE"]
    text = "\n\n".join(document.read_text() for document in documents)
    tokens = Text.load(demo_model_dir).encode(text)
    assert len(tokens) > 3000
    return tokens
