"""Models for tests on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of the tiny model of a family."""
    return lambda family: make_tiny_model(tmp_path_factory.mktemp(family), family)
