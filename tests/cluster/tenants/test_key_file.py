"""Keys come into the file without ever being in it, a wrong file ends in one line, and no line shows a secret."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.tenants import key_file
from cluster.tenants.callers import caller_of
from cluster.tenants.key_file import KeyFile, TenantRules
from common.errors import ConfigError, NotFoundError

SECRET = "5e" * 32


def test_a_new_key_is_in_the_file_by_its_hash_only_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.yaml"

    made = key_file.add_key(path, "acme", "user", {"concurrent_max": 3})

    assert path.stat().st_mode & 0o077 == 0
    assert made.key not in path.read_text()
    assert made.key.rpartition("-")[2] not in path.read_text()
    file = key_file.read(path)
    [entry] = file.keys
    assert bytes.fromhex(entry.sha256) == key_file.digest(made.key)
    assert entry.id == key_file.key_id(made.key)
    assert file.tenants["acme"].concurrent_max == 3


def test_a_second_key_leaves_the_tenants_secret_and_changes_only_the_rules_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key_file.add_key(path, "acme", "user", {"concurrent_max": 3})
    before = key_file.read(path).tenants["acme"]

    key_file.add_key(path, "acme", "admin", {"priority": "low"})

    file = key_file.read(path)
    assert file.tenants["acme"] == before.model_copy(update={"priority": "low"})
    assert [entry.role for entry in file.keys] == ["user", "admin"]


def test_a_revoked_key_is_gone_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = key_file.add_key(path, "acme", "user", {}).entry
    second = key_file.add_key(path, "acme", "user", {}).entry

    key_file.remove_key(path, first.id)

    assert key_file.read(path).keys == (second,)
    with pytest.raises(NotFoundError, match=first.id):
        key_file.remove_key(path, first.id)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("{", "no YAML, line [12]$", id="no YAML"),
        pytest.param("[1]", "key file", id="no mapping"),
        pytest.param({"people": {}}, "people", id="unknown section"),
        pytest.param({"tenants": {"a b": {"cache": "shared"}}}, "a b", id="odd name"),
        pytest.param({"tenants": {"a": {}}}, "tenants.a: .*needs a cache_secret", id="no secret"),
        pytest.param({"tenants": {"a": {"cache_secret": "5e5e"}}}, r"tenants\.a\.cache_secret", id="short secret"),
        pytest.param({"tenants": {"a": {"cache": "shared", "speed": 1}}}, r"tenants\.a\.speed", id="unknown rule"),
        pytest.param(
            {"keys": [{"id": "0" * 12, "tenant": "a", "sha256": SECRET}]}, "not among the tenants", id="no tenant"
        ),
        pytest.param(
            {"tenants": {"a": {"cache": "shared"}}, "keys": [{"id": "0" * 12, "tenant": "a", "sha256": SECRET}] * 2},
            "two keys have one id",
            id="twice",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_place_and_no_secret(
    tmp_path: Path, content: object, words: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))

    with pytest.raises(ConfigError, match=words) as raised:
        key_file.read(path)

    assert "\n" not in raised.value.message
    assert "5e5e" not in raised.value.message


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read key file"):
        key_file.read(tmp_path / "none.yaml")


def test_salts_are_shared_by_tenant_or_by_key_as_the_rules_say() -> None:
    def salts(cache: str, secret: str | None = SECRET) -> list[bytes]:
        rules = TenantRules.model_validate({"cache": cache, "cache_secret": secret})
        keys = [{"id": digit * 12, "tenant": "a", "sha256": SECRET} for digit in "01"]
        file = KeyFile.model_validate({"tenants": {"a": rules}, "keys": keys})
        return [caller_of(entry, rules).cache_salt for entry in file.keys]

    assert salts("shared", None) == [b"", b""]
    one, same = salts("tenant")
    assert one == same != b""
    assert salts("tenant", "ab" * 32)[0] != one
    first, second = salts("private")
    assert len({first, second, one}) == 3
    assert all(salt.hex() not in repr(caller_of) and len(salt) <= 64 for salt in (one, first, second))


def test_the_command_prints_the_key_alone_and_lists_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def baton(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "cluster.cli", "key", *arguments, "--file", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    made = baton("new", "--tenant", "acme", "--rule", "requests_per_s=2.5", "--rule", "models=[tiny]")
    key = made.stdout.strip()
    assert key_file.key_id(key) is not None
    assert key not in made.stderr
    shown = json.loads(baton("list", "--json").stdout)
    assert shown["keys"] == [{"id": key_file.key_id(key), "tenant": "acme", "role": "user"}]
    assert shown["tenants"]["acme"]["requests_per_s"] == 2.5
    assert "cache_secret" not in shown["tenants"]["acme"]

    wrong = baton("new", "--tenant", "acme", "--rule", "requests_per_s=-1")
    assert wrong.returncode == 2
    assert "requests_per_s" in wrong.stderr
