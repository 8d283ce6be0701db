"""A model source becomes a folder once, or one line that says what is wrong; nothing half done is taken for a model."""

import asyncio
import fcntl
import json
from pathlib import Path

import pytest

from cluster.model_store import cached_models, prepare, resolve
from common.config import DEMO_MODEL, ModelConfig
from common.errors import ConfigError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_served_as_it_is(model_dir: Path) -> None:
    model = resolve(ModelConfig(source=str(model_dir)))

    assert (model.path, model.model_id) == (model_dir, "tiny-llama")


def test_the_configured_name_wins(model_dir: Path) -> None:
    assert resolve(ModelConfig(source=str(model_dir), name="mine")).model_id == "mine"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/no/such/model.gguf", "no such file"),
        ("/no/such/folder", "not smollm2-135m-instruct, a folder"),
        ("neither-this-nor-that", "neither-this-nor-that"),
    ],
)
def test_a_missing_model_is_one_line(source: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        resolve(ModelConfig(source=source, cache_dir=tmp_path))

    assert "\n" not in raised.value.message


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(ModelConfig(source=str(tmp_path)))


def test_a_corrupt_gguf_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"not a gguf file")
    cache = tmp_path / "cache"

    with pytest.raises(ConfigError, match="cannot convert the model") as raised:
        resolve(ModelConfig(source=str(source), cache_dir=cache))

    assert "\n" not in raised.value.message
    assert cached_models(cache) == []
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_a_model_that_is_complete_is_not_made_again(tmp_path: Path) -> None:
    _put_in_cache(tmp_path, DEMO_MODEL)
    stages: list[str] = []

    model = resolve(ModelConfig(cache_dir=tmp_path), lambda stage, _: stages.append(stage))

    assert model.path == tmp_path / DEMO_MODEL
    assert stages == []


def test_who_comes_second_waits_and_finds_the_work_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        with (tmp_path / f".{DEMO_MODEL}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waits = asyncio.Event()
            stages: list[str] = []

            def progress(stage: str, _: float | None) -> None:
                stages.append(stage)
                waits.set()

            second = asyncio.create_task(prepare(ModelConfig(cache_dir=tmp_path), progress))
            await asyncio.wait_for(waits.wait(), 10)
            assert not second.done()
            _put_in_cache(tmp_path, DEMO_MODEL)
        model = await asyncio.wait_for(second, 10)

        assert model.path == tmp_path / DEMO_MODEL
        assert {stage.split()[0] for stage in stages} == {"waiting"}

    asyncio.run(scenario())


def test_the_list_names_what_is_complete(tmp_path: Path) -> None:
    _put_in_cache(tmp_path, "complete")
    (tmp_path / "half-done").mkdir()

    assert [(model.model_id, model.path) for model in cached_models(tmp_path)] == [("complete", tmp_path / "complete")]


def test_the_list_of_an_absent_cache_is_empty(tmp_path: Path) -> None:
    assert cached_models(tmp_path / "absent") == []


def _put_in_cache(cache: Path, name: str) -> None:
    (cache / name).mkdir()
    (cache / name / "baton-model.json").write_text(json.dumps({"name": name, "source": name, "format": "safetensors"}))
