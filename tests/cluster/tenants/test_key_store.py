"""A key names its tenant as the file says now: changes count within a second, a broken file changes nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.tenants import key_file
from cluster.tenants.key_store import LOOK_S, KeyStore
from common.clock import ManualClock
from common.errors import ConfigError, UnauthenticatedError

Scenario = Callable[[KeyStore, ManualClock], Awaitable[None]]


def _with_store(path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        clock = ManualClock()
        await scenario(await KeyStore.load(path, clock), clock)

    asyncio.run(main())


def test_a_key_finds_its_tenant_with_its_rules_and_role(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    user = key_file.add_key(path, "acme", "user", {"concurrent_max": 3}).key
    admin = key_file.add_key(path, "ops", "admin", {"cache": "shared"}).key

    async def scenario(store: KeyStore, clock: ManualClock) -> None:
        found = await store.find(user)
        assert (found.tenant, found.is_admin, found.rules.concurrent_max) == ("acme", False, 3)
        assert found.key_id in user
        assert found.cache_salt
        found = await store.find(admin)
        assert (found.tenant, found.is_admin, found.cache_salt) == ("ops", True, b"")

    _with_store(path, scenario)


def test_whatever_is_not_exactly_a_known_key_is_refused_and_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = key_file.add_key(path, "acme", "user", {}).key
    wrong = [None, "", "bk-", key[:-1], key + "0", key.upper(), f"{key[:-1]}{'0' if key[-1] != '0' else '1'}", "é" * 80]

    async def scenario(store: KeyStore, clock: ManualClock) -> None:
        for one in wrong:
            with pytest.raises(UnauthenticatedError) as raised:
                await store.find(one)
            assert not one or one not in raised.value.message
        assert (await store.find(key)).tenant == "acme"

    _with_store(path, scenario)


def test_changes_of_the_file_count_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = key_file.add_key(path, "acme", "user", {})

    async def scenario(store: KeyStore, clock: ManualClock) -> None:
        second = key_file.add_key(path, "acme", "user", {"concurrent_max": 7}).key
        key_file.remove_key(path, first.entry.id)
        assert (await store.find(first.key)).rules.concurrent_max is None  # it was looked at just now

        clock.advance(LOOK_S)

        assert (await store.find(second)).rules.concurrent_max == 7
        with pytest.raises(UnauthenticatedError):
            await store.find(first.key)

    _with_store(path, scenario)


def test_a_file_that_breaks_or_goes_leaves_the_keys_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    key = key_file.add_key(path, "acme", "user", {}).key
    good = path.read_text()

    async def scenario(store: KeyStore, clock: ManualClock) -> None:
        path.write_text("{")
        for _ in range(3):
            clock.advance(LOOK_S)
            assert (await store.find(key)).tenant == "acme"
        path.unlink()
        clock.advance(LOOK_S)
        assert (await store.find(key)).tenant == "acme"
        path.write_text(good.replace("acme", "other"))
        clock.advance(LOOK_S)
        assert (await store.find(key)).tenant == "other"

    with caplog.at_level(logging.ERROR):
        _with_store(path, scenario)

    assert len(caplog.records) == 2


def test_a_gateway_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read key file"):
        asyncio.run(KeyStore.load(tmp_path / "none.yaml", ManualClock()))
