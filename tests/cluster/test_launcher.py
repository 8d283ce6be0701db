"""What is started has the right arguments and environment, and nothing that was started outlives its owner."""

import os
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launcher import processes
from cluster.launcher.reaper import Reaper
from cluster.launcher.specs import service_specs
from cluster.model_store import ModelFolder
from cluster.supervisor.fleet import Launch, Role
from common.config import ClusterConfig, EngineConfig
from common.errors import ConfigError

MODEL = ModelFolder(Path("/models/tiny"), "tiny", "tiny", "safetensors")
SLEEP = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]


def config(**nodes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(nodes)


def test_each_configured_worker_has_a_spec_and_a_name_of_its_own() -> None:
    specs = service_specs(config(prefill={"workers": 2}, decode={"workers": 1}, both={"workers": 1}), MODEL)

    names = [spec.member.name for spec in specs]
    assert names == ["router", "gateway-0", "prefill-0", "prefill-1", "decode-0", "both-0"]


def test_a_colocated_worker_runs_the_decode_code_and_says_so() -> None:
    [both] = [s for s in service_specs(config(both={"workers": 1}), MODEL) if s.member.role is Role.BOTH]

    assert both.arguments["worker_class"] == "decode.worker:DecodeWorker"
    assert both.arguments["is_colocated"] is True


def test_each_gateway_listens_at_ports_of_its_own() -> None:
    specs = service_specs(config(gateway={"count": 3, "grpc_port": 6000, "http_port": 0}), MODEL)

    gateways = [spec for spec in specs if spec.member.role is Role.GATEWAY]
    assert [spec.member.name for spec in gateways] == ["gateway-0", "gateway-1", "gateway-2"]
    assert [spec.arguments["config"].grpc_port for spec in gateways] == [6000, 6001, 6002]
    assert {spec.arguments["config"].http_port for spec in gateways} == {0}
    assert config(gateway={"grpc_port": 0, "http_port": 0}).gateway.of(1).http_port == 0


@pytest.mark.parametrize("ports", [{"grpc_port": 8000, "http_port": 8002}, {"grpc_port": 65534, "http_port": 8000}])
def test_gateways_whose_ports_would_meet_are_refused(ports: dict[str, int]) -> None:
    config(gateway={"count": 2, **ports})
    with pytest.raises(ValueError, match="count 3 needs"):
        config(gateway={"count": 3, **ports})


def test_router_and_gateway_listen_where_their_last_life_did() -> None:
    router, gateway, *_ = service_specs(config(), MODEL)

    first = router.arguments_for(Launch(router.member, 1, None, None))
    second = router.arguments_for(Launch(router.member, 2, "127.0.0.1:4001", None))
    extra = {"http": "127.0.0.1:4003"}
    again = gateway.arguments_for(Launch(gateway.member, 2, "127.0.0.1:4002", "127.0.0.1:4001", extra))

    assert (first["port"], second["port"]) == (0, 4001)
    assert (again["config"].grpc_port, again["router_address"]) == (4002, "127.0.0.1:4001")
    assert again["config"].http_port == 4003


@pytest.mark.parametrize(("threads", "expected"), [(1, "1"), (3, "3"), (0, None)])
def test_a_workers_threads_are_in_its_environment(threads: int, expected: str | None) -> None:
    assert processes.worker_environment(EngineConfig(threads=threads)).get("OMP_NUM_THREADS") == expected


def test_a_busy_port_is_refused_with_the_option_to_change() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: address already in use.*--set a\.port=PORT"):
            processes.check_port_free("127.0.0.1", port, "a.port")


def test_a_free_port_and_port_0_are_accepted() -> None:
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        port = once.getsockname()[1]

    processes.check_port_free("127.0.0.1", port, "a.port")
    processes.check_port_free("127.0.0.1", 0, "a.port")


def test_reaping_ends_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    marked = {**_environment(), "BATON_SESSION": str(folder)}
    other = {**_environment(), "BATON_SESSION": f"{folder}-other"}
    with (
        subprocess.Popen(SLEEP, env=marked, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ours,
        subprocess.Popen(SLEEP, env=other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs,
    ):
        for process in (ours, theirs):
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"

        Reaper(folder).reap()

        assert ours.wait(10) == -9
        assert theirs.poll() is None
        assert not folder.exists()


def test_the_reaper_acts_when_its_parent_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from cluster.launcher.reaper import Reaper\n"
        f"reaper = Reaper(Path({str(folder)!r})); print(reaper.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        reaper = int(parent.stdout.readline())
        reaper_end = os.pidfd_open(reaper)

        parent.kill()

    # A pidfd becomes readable when its process ends.
    assert select.select([reaper_end], [], [], 20)[0]
    os.close(reaper_end)
    assert not folder.exists()


def _environment() -> dict[str, str]:
    return {"PATH": str(Path(shutil.which("env") or "/usr/bin/env").parent)}
