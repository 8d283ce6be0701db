"""The tiny model whose text the gateway serves."""

from pathlib import Path

import pytest

from cluster.fake_model import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))
