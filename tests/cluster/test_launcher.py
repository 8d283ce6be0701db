"""What is started has the right arguments and environment, and nothing that was started outlives its owner."""

import os
import select
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.launcher import processes
from cluster.launcher.reaper import Reaper
from cluster.launcher.specs import ServiceSpec, service_specs
from cluster.launcher.threads import Host, crowded, require_own_cores, threads_of_roles
from cluster.model_store import ModelFolder
from cluster.supervisor.fleet import Launch, Role
from common.config import ClusterConfig, EngineConfig
from common.errors import ConfigError

MODEL = ModelFolder(Path("/models/tiny"), "tiny", "tiny", "safetensors")
SLEEP = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]


def config(**nodes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(nodes)


def specs_of(*hosts: Host, **nodes: object) -> list[ServiceSpec]:
    """Return the specs of a cluster on these hosts; on one of two cores if none is given."""
    whole = config(**nodes)
    return service_specs(whole, MODEL, threads_of_roles(whole, hosts or [Host(2)]))


def threads_on(*hosts: Host, **nodes: object) -> dict[str, int]:
    """Return how many compute threads each worker is started with."""
    specs = [spec for spec in specs_of(*hosts, **nodes) if spec.member.role.is_worker]
    return {spec.member.name: spec.arguments["engine"].threads for spec in specs}


def test_each_configured_worker_has_a_spec_and_a_name_of_its_own() -> None:
    specs = specs_of(prefill={"workers": 2}, decode={"workers": 1}, both={"workers": 1})

    names = [spec.member.name for spec in specs]
    assert names == ["router", "gateway-0", "prefill-0", "prefill-1", "decode-0", "both-0"]


def test_a_colocated_worker_runs_the_decode_code_and_says_so() -> None:
    [both] = [s for s in specs_of(both={"workers": 1}) if s.member.role is Role.BOTH]

    assert both.arguments["worker_class"] == "decode.worker:DecodeWorker"
    assert both.arguments["is_colocated"] is True


def test_each_gateway_listens_at_ports_of_its_own() -> None:
    specs = specs_of(gateway={"count": 3, "grpc_port": 6000, "http_port": 0})

    gateways = [spec for spec in specs if spec.member.role is Role.GATEWAY]
    assert [spec.member.name for spec in gateways] == ["gateway-0", "gateway-1", "gateway-2"]
    assert [spec.arguments["config"].grpc_port for spec in gateways] == [6000, 6001, 6002]
    assert {spec.arguments["config"].http_port for spec in gateways} == {0}
    assert config(gateway={"grpc_port": 0, "http_port": 0}).gateway.of(1).http_port == 0


@pytest.mark.parametrize("ports", [{"grpc_port": 8000, "http_port": 8002}, {"grpc_port": 65534, "http_port": 8000}])
def test_gateways_whose_ports_would_meet_are_refused(ports: dict[str, int]) -> None:
    config(gateway={"count": 2, **ports})
    with pytest.raises(ValueError, match="each of 3 gateways"):
        config(gateway={"count": 3, **ports})


def test_router_and_gateway_listen_where_their_last_life_did() -> None:
    router, gateway, *_ = specs_of()

    first = router.arguments_for(Launch(router.member, 1, None, None))
    second = router.arguments_for(Launch(router.member, 2, "127.0.0.1:4001", None))
    extra = {"http": "127.0.0.1:4003"}
    again = gateway.arguments_for(Launch(gateway.member, 2, "127.0.0.1:4002", "127.0.0.1:4001", extra))

    assert (first["port"], second["port"]) == (0, 4001)
    assert (again["config"].grpc_port, again["router_address"]) == (4002, "127.0.0.1:4001")
    assert again["config"].http_port == 4003


@pytest.mark.parametrize(
    ("cores", "nodes", "expected"),
    [
        (2, {}, {"prefill-0": 1, "decode-0": 1}),
        (9, {}, {"prefill-0": 4, "decode-0": 4}),
        (8, {"prefill": {"workers": 0}, "decode": {"workers": 0}, "both": {"workers": 1}}, {"both-0": 8}),
        (8, {"prefill": {"workers": 2}}, {"prefill-0": 2, "prefill-1": 2, "decode-0": 2}),
        (1, {}, {"prefill-0": 1, "decode-0": 1}),
        (8, {"prefill": {"cores": [0, 1, 2]}}, {"prefill-0": 3, "decode-0": 5}),
        (8, {"prefill": {"cores": [0, 1]}, "decode": {"cores": [0, 1]}}, {"prefill-0": 1, "decode-0": 1}),
        (8, {"engine": {"threads": 3}}, {"prefill-0": 3, "decode-0": 3}),
    ],
)
def test_workers_share_the_cores_of_a_host_unless_told_otherwise(
    cores: int, nodes: dict[str, Any], expected: dict[str, int]
) -> None:
    assert threads_on(Host(cores), **nodes) == expected


def test_workers_that_are_pinned_to_hosts_share_those() -> None:
    hosts = [Host(16, frozenset({"CPU", "big"})), Host(4, frozenset({"small"})), Host(8, frozenset({"small"}))]
    nodes = {"prefill": {"ray_resources": {"big": 1}}, "decode": {"workers": 3, "ray_resources": {"small": 1}}}

    assert threads_on(*hosts, **nodes) == {"prefill-0": 16, "decode-0": 2, "decode-1": 2, "decode-2": 2}
    assert set(threads_on(Host(4), **nodes).values()) == {1}  # no host that is known has what they take


@settings(max_examples=200, deadline=None)
@given(
    cores=st.integers(1, 64),
    workers=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5)),
    pinned=st.tuples(st.sets(st.integers(0, 63)), st.sets(st.integers(0, 63))),
)
def test_there_are_never_more_threads_than_cores_while_there_are_no_more_workers_than_cores(
    cores: int, workers: tuple[int, int, int], pinned: tuple[set[int], set[int]]
) -> None:
    prefill, decode, both = workers
    own = [sorted(core for core in each if core < cores) for each in (pinned[0] - pinned[1], pinned[1])]
    whole = config(
        prefill={"workers": prefill, "cores": own[0]},
        decode={"workers": decode, "cores": own[1]},
        both={"workers": both},
    )
    threads = threads_of_roles(whole, [Host(cores)])
    given = prefill * threads.get(Role.PREFILL, 0)
    given += decode * threads.get(Role.DECODE, 0) + both * threads.get(Role.BOTH, 0)

    assert (crowded(threads, whole, [Host(cores)]) is not None) == (given > cores)
    if not any(own) and sum(workers) <= cores:
        assert given <= cores
    assert all(each >= 1 for each in threads.values())


def test_more_threads_than_cores_are_warned_of_in_words() -> None:
    asked = config(engine={"threads": 2})
    complaint = crowded(threads_of_roles(asked, [Host(2)]), asked, [Host(2)])

    assert complaint is not None
    assert complaint.startswith("4 compute threads for the 2 cores of one host (1 prefill with 2 each, 1 decode with 2")
    assert complaint.endswith("engine.threads=0 shares the cores out")
    assert crowded(threads_of_roles(config(), [Host(2)]), config(), [Host(2)]) is None
    many = config(decode={"workers": 2})
    assert "fewer workers" in str(crowded(threads_of_roles(many, [Host(2)]), many, [Host(2)]))


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"decode": {"cores": [2, 3]}, "both": {"workers": 1}}, None),
        ({"decode": {"cores": [2, 3], "workers": 2}}, None),
        ({"decode": {"cores": [2, 3]}, "engine": {"threads": 8}}, None),  # one worker with more threads than cores
        (
            {"decode": {"cores": [2, 3]}, "both": {"workers": 2}},
            r"cores \[2, 3\] of one host .* the 3 threads .* \(1 decode with 1 each, 2 both with 1 each\)",
        ),
        ({"decode": {"cores": [2, 3]}, "both": {"workers": 1}, "engine": {"threads": 2}}, "the 4 threads"),
        ({"decode": {"cores": [0, 1, 2]}, "prefill": {"cores": [1], "workers": 4}}, r"cores \[1\] of one host"),
        ({"decode": {"cores": [1, 2]}, "prefill": {"cores": [1]}}, r"cores \[1, 2\] of one host"),
    ],
)
def test_pinned_workers_of_a_host_that_would_share_a_core_are_refused(nodes: dict[str, Any], words: str | None) -> None:
    whole, hosts = config(**nodes), [Host(8)]
    threads = threads_of_roles(whole, hosts)

    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        require_own_cores(threads, whole, hosts)


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
