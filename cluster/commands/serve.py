"""`baton serve`: brings a cluster up, announces it, and takes it down again without leaving anything behind."""

import asyncio
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton_pb.v1 import router_pb2, router_pb2_grpc
from cluster import model_store
from cluster.commands.presses import Presses
from cluster.commands.report import Report
from cluster.gateway import texts_log
from cluster.launcher import processes
from cluster.launcher.launcher import RayLauncher
from cluster.launcher.ray_cluster import RayCluster
from cluster.launcher.specs import service_specs
from cluster.launcher.threads import Host, crowded, require_own_cores, threads_of_roles
from cluster.model_store import ModelFolder
from cluster.router.policies.registry import check_policy
from cluster.supervisor.fleet import MemberState, Phase, Role
from cluster.supervisor.probe import HealthProber
from cluster.supervisor.supervisor import Supervisor
from common import logs, peers
from common.clock import MonotonicClock
from common.config import ClusterConfig
from common.errors import BatonError, DeadlineError
from common.rpc import open_channel

READY_WORD = "ready"
_ROUTER_RETRY_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(config: ClusterConfig, ready_file: Path | None, report: Report) -> None:
    """Run a cluster until SIGINT or SIGTERM, then drain and stop it. A second signal cuts the drain short.

    Args:
        config: the whole tree.
        ready_file: written with the addresses as JSON when the cluster is ready, kept up to date, removed at the end.
        report: shows progress.

    Raises:
        BatonError: the cluster did not come up; nothing is left of it.
    """
    logs.set_up("serve", config.log_level)
    check_policy(config.router.policy)
    for gateway in map(config.gateway.of, range(config.gateway.count)):
        processes.check_port_free(gateway.host, gateway.grpc_port, "gateway.grpc_port")
        processes.check_port_free(gateway.host, gateway.http_port, "gateway.http_port")
    asyncio.run(_Serving(config, ready_file, report).run())


class _Serving:
    """One cluster's life. Everything runs on one loop; `on_signal` is called by it."""

    def __init__(self, config: ClusterConfig, ready_file: Path | None, report: Report) -> None:
        self._config = config
        self._ready_file = ready_file
        self._report = report
        self._ray = RayCluster(config.ray)
        self._peers = peers.load(config.security)
        peers.set_up(self._peers)
        self._supervisor: Supervisor | None = None
        self._is_ready = False
        self._work: asyncio.Task[None] | None = None
        self._presses = Presses()
        self._started = time.monotonic()

    async def run(self) -> None:
        """Start, announce, wait for the end, clean up."""
        self._remove_ready_file()  # one that a killed predecessor left says nothing about us
        self._work = asyncio.create_task(self._lead())
        self._take_signals()
        try:
            await self._work
        except asyncio.CancelledError:
            self._report.step("stopped before the cluster was ready")
        finally:
            self._remove_ready_file()

    def _remove_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        press = self._presses.signal(time.monotonic())
        if press == 0:
            return
        if self._supervisor is None or not self._is_ready:
            assert self._work is not None
            self._work.cancel()
            return
        first = "stopping: running requests may finish (once more: stop at once)"
        self._report.step(first if press == 1 else "stopping at once")
        self._supervisor.stop(self._config.supervisor.drain_timeout_s)

    async def _lead(self) -> None:
        try:
            model = await self._prepare()
            self._supervisor = supervisor = self._make_supervisor(model, await self._ray.hosts())
            running = asyncio.create_task(supervisor.run())
            try:
                await _either(running, self._wait_ready(supervisor))
                self._announce(model)
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            await self._ray.stop()
        self._report.step("stopped")

    async def _prepare(self) -> ModelFolder:
        """Start Ray and bring the model at the same time: each takes seconds, and the first model half a minute."""
        self._report.doing("ray", "starting Ray")
        starting = asyncio.create_task(self._ray.start())
        resolving = asyncio.create_task(model_store.prepare(self._config.model, self._report.model_progress))
        try:
            await asyncio.wait([starting, resolving], return_when=asyncio.FIRST_EXCEPTION)
            if starting.done():
                starting.result()
                self._take_signals()  # Ray's native code has put its crash handler on SIGTERM
                self._report.done("ray", "Ray is up")
            model = await resolving
            self._report.done("model", f"model {model.model_id} in {model.path}")
            await starting
            self._take_signals()
            self._report.done("ray", "Ray is up")
            return model
        finally:
            resolving.cancel()
            await asyncio.gather(starting, resolving, return_exceptions=True)

    def _make_supervisor(self, model: ModelFolder, hosts: Sequence[Host]) -> Supervisor:
        threads = threads_of_roles(self._config, hosts)
        require_own_cores(threads, self._config, hosts)
        if (complaint := crowded(threads, self._config, hosts)) is not None:
            self._report.step(f"WARNING: {complaint}")
        if (warning := texts_log.complaint(self._config.gateway.log_texts_max)) is not None:
            self._report.step(f"WARNING: {warning}")
        specs = service_specs(self._config, model, threads)
        for spec in specs:
            self._report.doing(spec.member.name, f"starting {spec.member.name}")
        return Supervisor(
            [spec.member for spec in specs],
            RayLauncher(self._ray, specs, self._config.log_level, self._peers),
            HealthProber(self._config.supervisor),
            self._config.supervisor,
            MonotonicClock(),
            self._on_change,
        )

    async def _wait_ready(self, supervisor: Supervisor) -> None:
        await supervisor.wait_ready()
        states = supervisor.snapshot()
        router = next(s.place.address for s in states if s.member.role is Role.ROUTER and s.place is not None)
        names = {state.member.name for state in states if state.member.role.is_worker}
        await _router_sees(router, names, self._config.supervisor.start_timeout_s)

    def _on_change(self, states: list[MemberState]) -> None:
        for state in states:
            if state.phase is Phase.READY and state.place is not None:
                self._report.done(state.member.name, f"{state.member.name} on {state.place.address}")
        if self._is_ready:
            self._write_ready_file(states)

    def _announce(self, model: ModelFolder) -> None:
        assert self._supervisor is not None
        self._is_ready = True
        states = self._supervisor.snapshot()
        self._write_ready_file(states)
        (address, http), *others = _gateways(states)
        seconds = time.monotonic() - self._started
        gateway = self._config.gateway
        scheme, curl = ("https", "curl -N --cacert CA.pem") if gateway.tls.is_on else ("http", "curl -N")
        hint = "" if gateway.grpc_port == 50051 else f" --addr {address}"
        hint += " --ca CA.pem" if gateway.tls.is_on else ""
        if gateway.keys_file is not None:
            hint, curl = f"{hint} --key-file FILE", f"{curl} -H 'authorization: Bearer KEY'"
        self._report.close()
        self._report.say(
            f"{READY_WORD} after {seconds:.1f} s: {model.model_id} on grpc://{address} and {scheme}://{http}/v1"
        )
        for grpc_too, http_too in others:
            self._report.say(f"and on grpc://{grpc_too} and {scheme}://{http_too}/v1")
        self._report.say(f'try: {_command()} generate{hint} --max-tokens 100 "Why is the sky blue?"')
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"messages": messages, "max_tokens": 100, "stream": True})
        self._report.say(f" or: {curl} {scheme}://{http}/v1/chat/completions -d '{body}'")

    def _write_ready_file(self, states: list[MemberState]) -> None:
        if self._ready_file is None:
            return
        partial = self._ready_file.with_name(f"{self._ready_file.name}.partial")
        partial.write_text(json.dumps(_addresses(states), indent=1))
        partial.replace(self._ready_file)


def _addresses(states: list[MemberState]) -> dict[str, Any]:
    """Return what the ready file says: where everything listens, and the processes."""
    described = [
        {
            "id": state.member.name,
            "role": state.member.role.value,
            "state": state.phase.value,
            "life": state.life,
            "address": None if state.place is None else state.place.address,
            "node": None if state.place is None else state.place.node,
            "pid": None if state.place is None else state.place.pid,
        }
        for state in states
    ]
    (grpc, http), *_ = gateways = _gateways(states)
    return {
        "grpc": grpc,
        "http": http,
        "gateways": [{"grpc": grpc, "http": http} for grpc, http in gateways],
        "router": next((s.place.address for s in states if s.member.role is Role.ROUTER and s.place is not None), None),
        "processes": described,
        "workers": [entry for entry, state in zip(described, states, strict=True) if state.member.role.is_worker],
    }


def _gateways(states: list[MemberState]) -> list[tuple[str, str]]:
    """Return where each gateway listens: gRPC and HTTP."""
    places = [state.place for state in states if state.member.role is Role.GATEWAY]
    return [(place.address, place.extra["http"]) for place in places if place is not None]


def _command() -> str:
    """Return how this program was called, so that a line with it can be pasted."""
    path = Path(sys.argv[0]).absolute()
    if path.suffix == ".py" or shutil.which("baton") == str(path):
        return "baton"
    below = path.parent != Path.cwd() and path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if below else path))


async def _either(running: "asyncio.Task[None]", ready: Any) -> None:
    """Wait until the cluster is ready, or has failed to become so."""
    waiting = asyncio.create_task(ready)
    try:
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            raise BatonError("the supervisor ended before the cluster was ready")
        waiting.result()
    finally:
        waiting.cancel()


async def _router_sees(address: str, names: set[str], timeout_s: float) -> None:
    """Wait until the router has shaken hands with all workers: before that a first request could be refused."""
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status = await stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=timeout_s)
                    if names <= {worker.worker_id for worker in status.workers if worker.state == "ready"}:
                        return
                    await asyncio.sleep(_ROUTER_RETRY_S)  # the router has no call that waits for it
        except TimeoutError as error:
            raise DeadlineError(f"the router did not reach all of {sorted(names)} within {timeout_s:g} s") from error
