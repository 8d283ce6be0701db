"""A config is complete, frozen, and a mistake in it ends in one line that names the key."""

import re
from pathlib import Path

import pydantic
import pytest

from common.config import ClusterConfig
from common.config_file import load
from common.config_node import Node
from common.errors import ConfigError


def test_the_defaults_are_a_config() -> None:
    assert load(None, []) == ClusterConfig()


def test_overrides_win_over_the_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("gateway:\n  grpc_port: 1\n  running_max: 2000\n")

    config = load(path, ["gateway.grpc_port=2", "gateway.grpc_port=3", "router.policy=round_robin"])

    assert config.gateway.grpc_port == 3
    assert config.gateway.running_max == 2000
    assert config.router.policy == "round_robin"


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("")

    assert load(path, []) == ClusterConfig()


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        pytest.param(["gateway.port=1"], "unknown config key gateway.port", id="unknown key"),
        pytest.param(["gateway.grpcport=1"], "gateway.grpcport; did you mean gateway.grpc_port?", id="a typing error"),
        pytest.param(["gatway.grpc_port=1"], "gatway; did you mean gateway?", id="a typing error in a section"),
        pytest.param(
            ["gateway.grpc_port=9", "gateway.http_port=9"], "gateway: each of 1 gateways takes a port", id="one port"
        ),
        pytest.param(["gateway.grpc_port=70000"], "config key gateway.grpc_port", id="out of range"),
        pytest.param(["log_level=LOUD"], "config key log_level", id="not in the set"),
        pytest.param(["gateway.running_max=many"], "got 'many'", id="not a number"),
        pytest.param(["gateway.running_max=7"], "must be above router.queue_max, 1024", id="two queues"),
        pytest.param(["gateway.grpc_port"], "--set wants a.b=c", id="no value"),
        pytest.param(["=1"], "--set wants a.b=c", id="no key"),
        pytest.param(["gateway.host=[1"], "not YAML", id="bad YAML"),
        pytest.param(["log_level=INFO", "log_level.x=1"], "log_level is not a section", id="a leaf with children"),
        pytest.param(["decode.workers=0"], "nobody could decode", id="no decoder"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)

    assert part in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"cluster\.yaml"):
        load(path, [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml", [])


def test_nothing_changes_a_config() -> None:
    with pytest.raises(pydantic.ValidationError):
        load(None, []).gateway.grpc_port = 1


def test_every_field_has_a_default_and_says_what_it_is() -> None:
    nodes = [cls for cls in Node.__subclasses__() if cls.__module__.startswith("common.config")]
    assert ClusterConfig in nodes

    for node in nodes:
        for name, field in node.model_fields.items():
            assert field.description, f"{node.__name__}.{name} has no docstring"
            assert not field.is_required(), f"{node.__name__}.{name} has no default"


def test_the_configurations_in_the_documents_are_ours(tmp_path: Path) -> None:
    documents = (Path(__file__).parents[2] / "docs").glob("*.md")
    blocks = [block for document in documents for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.S)]
    assert blocks

    for block in blocks:
        path = tmp_path / "cluster.yaml"
        path.write_text(block)
        load(path, [])


@pytest.mark.parametrize("overrides", [[], ["gateway.grpc_port=0"], ["gateway.grpc_port=0", "gateway.http_port=0"]])
def test_ports_may_be_left_to_the_system(overrides: list[str]) -> None:
    config = load(None, [*overrides, "gateway.count=3"])

    assert config.gateway.of(2).grpc_port == (0 if overrides else config.gateway.grpc_port + 2)
