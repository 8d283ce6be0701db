"""Reading the configuration: a YAML file and `a.b=c` overrides become the tree of config.py."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pydantic
import yaml

from common.config import ClusterConfig
from common.errors import ConfigError
from common.wording import sentence


def load(path: Path | None, overrides: list[str]) -> ClusterConfig:
    """Read the config file, if any, and apply `a.b=c` overrides in order.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, value out of range; the message is one line.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read config file {path}: {' '.join(str(error).split())}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"config file {path} must hold a mapping, not a {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    try:
        return ClusterConfig.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_describe(item) for item in error.errors())) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set wants a.b=c, got {override!r}")
    *parents, leaf = path.split(".")
    node: Any = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {parent} is not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML") from error


def _describe(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "config"
    if item["type"] == "extra_forbidden":
        return f"unknown config key {where}{_meant(item['loc'])}"
    given = item["input"]
    if not item["loc"]:
        return sentence("config", item)
    words = sentence(f"config key {where}", item)
    return words if isinstance(given, dict) or ", got " in words else f"{words}, got {given!r}"


def _meant(place: tuple[str | int, ...]) -> str:
    """Return a guess at what a key should have been, to be put behind it; empty if nothing is like it."""
    *parents, leaf = map(str, place)
    section: Any = ClusterConfig
    for parent in parents:
        field = getattr(section, "model_fields", {}).get(parent)
        section = None if field is None else field.annotation
    near = get_close_matches(leaf, getattr(section, "model_fields", {}), n=1)
    return f"; did you mean {'.'.join([*parents, *near])}?" if near else ""
