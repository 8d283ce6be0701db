"""Tokenizers that several tests use."""

from pathlib import Path

import pytest

from common.text import Text
from common.tiny_text import write_tokenizer


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> Text:
    return Text.load(tiny_dir)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model's folder, if somebody has made it."""
    folder = Path("~/.cache/baton/models/smollm2-135m-instruct").expanduser()
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the demo model is not here: `baton model pull` makes it")
    return folder
