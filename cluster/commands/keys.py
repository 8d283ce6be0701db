"""`baton key`: making, listing and showing API keys."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from cluster.tenants import key_file
from common.errors import ConfigError


def new(path: Path, tenant: str, is_admin: bool, rules: list[str]) -> None:
    """Make a key and print it on standard output; all else goes to standard error.

    Raises:
        ConfigError: a rule or the file is wrong; nothing was changed.
    """
    made = key_file.add_key(path, tenant, "admin" if is_admin else "user", dict(_rule(rule) for rule in rules))
    sys.stderr.write(
        f"key {made.entry.id} of tenant {tenant}, shown this once; serve with --set gateway.keys_file={path}\n"
    )
    sys.stdout.write(f"{made.key}\n")


def show(path: Path, as_json: bool) -> None:
    """Print keys and rules; neither hashes nor secrets.

    Raises:
        ConfigError: the file is wrong.
    """
    file = key_file.read(path)
    rules = {
        name: tenant.model_dump(mode="json", exclude={"cache_secret"}, exclude_none=True)
        for name, tenant in file.tenants.items()
    }
    keys = [{"id": key.id, "tenant": key.tenant, "role": key.role} for key in file.keys]
    if as_json:
        sys.stdout.write(json.dumps({"tenants": rules, "keys": keys}) + "\n")
        return
    for key in keys:
        described = " ".join(f"{name}={value}" for name, value in rules[key["tenant"]].items())
        sys.stdout.write(f"{key['id']}\t{key['tenant']}\t{key['role']}\t{described}\n")


def _rule(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--rule wants NAME=VALUE, got {text!r}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--rule {text}: the value is not YAML") from error
