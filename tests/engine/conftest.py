"""Models that the engine's tests share: made once, never changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.tiny import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Keep tiny matrices on one thread: on busy cores several wait for each other more than they compute."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of the tiny model of a family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder
