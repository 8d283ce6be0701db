"""A browser lets a page from elsewhere use the API only where the operator has named its origin."""

from pathlib import Path

import pytest

from cluster.tenants import key_file
from tests.cluster.fake_cluster import fake_cluster, run
from tests.cluster.gateway.http.wire import get, post

BODY = {"prompt": "hello", "max_tokens": 2}
PAGE = "https://chat.example"


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [((), PAGE, False), ((PAGE,), PAGE, True), ((PAGE,), "https://evil.example", False), (("*",), "null", True)],
    ids=["by default", "named", "not named", "all"],
)
def test_only_pages_of_allowed_origins_may_use_it(
    model_dir: Path, tmp_path: Path, origins: tuple[str, ...], origin: str, is_allowed: bool
) -> None:
    path = tmp_path / "keys.yaml"
    admin = key_file.add_key(path, "ops", "admin", {}).key

    async def scenario() -> None:
        http = {"cors_origins": origins}
        async with fake_cluster(model_dir, http=http, keys_file=path, admin_key=admin) as cluster:
            asked = await get(
                cluster, "/v1/completions", "OPTIONS", origin=origin, access_control_request_headers="authorization,x-a"
            )
            answers = [
                await post(cluster, "/v1/completions", BODY, origin=origin, authorization=f"Bearer {admin}"),
                await post(cluster, "/v1/completions", BODY, origin=origin),  # a refusal must be readable too
            ]

            assert asked.status == (200 if is_allowed else 405)
            assert asked.headers.get("access-control-allow-headers") == ("authorization,x-a" if is_allowed else None)
            assert [answer.status for answer in answers] == [200, 401]
            for answer in (asked, *answers):
                assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
            plain = await post(cluster, "/v1/completions", BODY, authorization=f"Bearer {admin}")
            assert "access-control-allow-origin" not in plain.headers

    run(scenario())
