"""Two hosts, as two network namespaces with a Ray node in each: KV crosses the network by UCX and tokens are right."""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.tiny import make_tiny_model
from tests.integration.asking import Asker, Oracle, greedy, request

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 120
SUBNET = "10.77.9"


def run(*command: str) -> None:
    """Run a command of iproute2, and fail with its words."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def why_no_namespaces() -> str | None:
    """Return why this machine cannot make network namespaces, or None."""
    if shutil.which("ip") is None:
        return "iproute2's `ip` is not installed"
    name = f"baton-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if done.returncode:
        return f"no right to make network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)
    return None


class Hosts:
    """Two namespaces joined by a veth pair. Processes in them see their own network and their own /dev/shm."""

    def __init__(self, stack: ExitStack) -> None:
        tag = secrets.token_hex(2)
        self.names = [f"baton-{tag}-{number}" for number in range(2)]
        self.addresses = [f"{SUBNET}.{number + 1}" for number in range(2)]
        self._environment = {
            **os.environ,  # noqa: TID251  # the processes need this test's PATH
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        for name in self.names:
            run("ip", "netns", "add", name)
            stack.callback(self._delete, name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        links = [f"bv{tag}{number}" for number in range(2)]
        run(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            links[1],
            "netns",
            self.names[1],
        )
        for name, link, address in zip(self.names, links, self.addresses, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")

    def start(self, number: int, *command: str) -> "subprocess.Popen[str]":
        """Start a command on one of the hosts."""
        script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], "sh", "-c", script, "_", *command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @staticmethod
    def _delete(name: str) -> None:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30).stdout.split()
        if pids:
            subprocess.run(["kill", "-9", *pids], check=False, timeout=30)
        subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, gone afterwards with all that runs on them."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Hosts(stack)


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a process and return what it said."""
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def ray_start(hosts: Hosts, number: int, *arguments: str) -> None:
    """Start a Ray node on a host and wait until it is up."""
    ray = str(Path(sys.executable).with_name("ray"))
    address = hosts.addresses[number]
    resources = json.dumps({f"host{number}": 4})
    finish(
        hosts.start(
            number, ray, "start", *arguments, f"--node-ip-address={address}", "--num-cpus=4",
            f"--resources={resources}", "--object-store-memory=100000000", "--disable-usage-stats",
        )
    )  # fmt: skip


def test_a_request_is_served_across_two_hosts_over_ucx(hosts: Hosts, tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    prompt = [5 + number % 300 for number in range(77)]
    expected = Oracle(model_dir).generate(prompt, 20)
    head = f"{hosts.addresses[0]}:6379"
    with tempfile.TemporaryDirectory(prefix="bray-", ignore_cleanup_errors=True) as short:  # sockets: 107 bytes at most
        ray_start(hosts, 0, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={short}")
        answer, returncode = serve_and_ask(hosts, head, model_dir, prompt, tmp_path / "ready.json")

    assert answer["token_ids"] == expected
    assert answer["transport"] == "ucx"
    nodes = answer["nodes"]
    assert isinstance(nodes, dict)
    assert len(set(nodes.values())) == 2, "the two workers were on two hosts"
    assert returncode == 0


def serve_and_ask(
    hosts: Hosts, head: str, model_dir: Path, prompt: list[int], ready_file: Path
) -> tuple[dict[str, object], int]:
    """Join the second host, serve with one worker on each, ask once; return the answer and how serving ended."""
    ray_start(hosts, 1, f"--address={head}")
    settings = [
        f"ray.address={head}",
        f"model.source={model_dir}",
        "engine.backend=reference",
        "engine.block_tokens=8",
        "engine.pool_blocks=64",
        "gateway.grpc_port=0",
        "gateway.http_port=0",
        "prefill.ray_resources={host0: 1}",
        "decode.ray_resources={host1: 1}",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "cluster.cli", "serve", "--ready-file", str(ready_file), *options]
    serve = hosts.start(0, *command)
    try:
        assert serve.stdout is not None
        said = []
        for line in serve.stdout:
            said.append(line)
            if ready_file.exists():
                break
        assert ready_file.exists(), "".join(said)
        address = json.loads(ready_file.read_text())["grpc"]
        script = (
            "import sys, json, tests.integration.test_namespaces as t;"
            "print(json.dumps(t.ask_from_inside(sys.argv[1], json.loads(sys.argv[2]))))"
        )
        asked = finish(hosts.start(0, sys.executable, "-c", script, address, json.dumps(prompt)))
        answer: dict[str, object] = json.loads(asked.splitlines()[-1])
    finally:
        serve.terminate()
        serve.communicate(timeout=START_TIMEOUT_S)
    return answer, serve.returncode


def ask_from_inside(address: str, prompt: list[int]) -> dict[str, object]:
    """Ask the gateway from a process inside its namespace."""

    async def ask() -> dict[str, object]:
        async with Asker(address) as asker:
            answer = await asker.ask(request(prompt, greedy(20)))
            status = await asker.quiet_status()
            assert answer.finished is not None
            return {
                "token_ids": answer.token_ids,
                "transport": answer.finished.placement.transport,
                "nodes": {worker.worker_id: worker.node for worker in status.workers},
            }

    return asyncio.run(ask())
