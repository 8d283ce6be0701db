"""The supervisor replaces processes that die or hang, tells the router, and stops in order."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import NoReturn

import grpc
import grpc.aio
import pytest

from baton_pb.v1 import router_pb2, router_pb2_grpc
from cluster.supervisor.fleet import Launch, Member, Place, Role
from cluster.supervisor.supervisor import Supervisor
from common.clock import MonotonicClock
from common.config import SupervisorConfig
from common.errors import BatonError, ConfigError

LIMIT_S = 10.0
MEMBERS = [Member("router", Role.ROUTER), Member("gateway", Role.GATEWAY), Member("decode-0", Role.DECODE)]


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Records the worker lists; refuses the first `num_refusals`."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.lists: asyncio.Queue[list[tuple[str, str]]] = asyncio.Queue()
        self.num_refusals = num_refusals
        self.absent: list[list[str]] = []

    async def SetWorkers(  # noqa: N802 - the protocol's name
        self,
        request: router_pb2.SetWorkersRequest,
        context: "grpc.aio.ServicerContext[router_pb2.SetWorkersRequest, router_pb2.SetWorkersReply]",
    ) -> router_pb2.SetWorkersReply:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        self.absent.append([worker.worker_id for worker in request.absent])
        self.lists.put_nowait([(worker.worker_id, worker.address) for worker in request.workers])
        return router_pb2.SetWorkersReply()

    def Session(self, request_iterator: object, context: object) -> NoReturn:  # noqa: N802
        raise NotImplementedError

    def GetRouterStatus(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise NotImplementedError

    def Explain(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise NotImplementedError


class FakeProcess:
    """A process that does what the test says."""

    def __init__(self, place: Place | BatonError, journal: list[str], name: str) -> None:
        self._place = place
        self._journal = journal
        self._name = name
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stop_takes: asyncio.Event | None = None
        self.hangs = False

    async def started(self) -> Place:
        if isinstance(self._place, BatonError):
            raise self._place
        return self._place

    async def failed(self) -> str:
        return await asyncio.shield(self.death)

    async def stop(self, drain_timeout_s: float) -> None:
        self._journal.append(f"stop {self._name} {drain_timeout_s:g}")
        if self.hangs:
            await asyncio.Event().wait()
        if self.stop_takes is not None and drain_timeout_s > 0:
            await self.stop_takes.wait()

    def kill(self) -> None:
        self._journal.append(f"kill {self._name}")


class FakeLauncher:
    """Remembers what was launched. `decode-0` gets another port in each life, as a real one would."""

    def __init__(self, router_address: str, errors: dict[str, BatonError] | None = None) -> None:
        self.launches: list[Launch] = []
        self.processes: dict[tuple[str, int], FakeProcess] = {}
        self.journal: list[str] = []
        self.launched = asyncio.Event()
        self._router_address = router_address
        self._errors = errors or {}

    async def launch(self, launch: Launch) -> FakeProcess:
        name = launch.member.name
        address = self._router_address if name == "router" else f"{name}:{launch.life}"
        place = self._errors.get(name) or Place(address, "node", 1000 + launch.life)
        process = FakeProcess(place, self.journal, name)
        self.launches.append(launch)
        self.processes[name, launch.life] = process
        self.launched.set()
        return process


class FakeProber:
    """Says that an address hangs when the test says so."""

    def __init__(self) -> None:
        self.hanging: dict[str, asyncio.Event] = {}

    async def hung(self, address: str) -> str:
        await self.hanging.setdefault(address, asyncio.Event()).wait()
        return "hangs"


class Stage:
    """A supervisor with fakes around it."""

    def __init__(self, router: FakeRouter, launcher: FakeLauncher, prober: FakeProber) -> None:
        self.router = router
        self.launcher = launcher
        self.prober = prober
        config = SupervisorConfig(restart_backoff_s=0.05, start_timeout_s=LIMIT_S)
        self.supervisor = Supervisor(MEMBERS, launcher, prober, config, MonotonicClock())
        self.running: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def next_list(self) -> list[tuple[str, str]]:
        return await asyncio.wait_for(self.router.lists.get(), LIMIT_S)


def on_stage(
    scenario: Callable[[Stage], Awaitable[None]],
    num_refusals: int = 0,
    errors: dict[str, BatonError] | None = None,
) -> None:
    """Run a scenario beside a running supervisor, and end with an orderly stop if the scenario did not."""

    async def run() -> None:
        router = FakeRouter(num_refusals)
        server = grpc.aio.server(futures.ThreadPoolExecutor(1))
        router_pb2_grpc.add_RouterServicer_to_server(router, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stage = Stage(router, FakeLauncher(f"127.0.0.1:{port}", errors), FakeProber())
        stage.running = running = asyncio.create_task(stage.supervisor.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(stage)
                stage.supervisor.stop(1.0)
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(None)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_ready_means_that_the_router_knows_all_workers() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()

        lists = [stage.router.lists.get_nowait() for _ in range(stage.router.lists.qsize())]
        assert lists[-1] == [("decode-0", "decode-0:1")]

    on_stage(scenario)


def test_a_worker_list_is_sent_until_the_router_takes_it() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()

        assert stage.router.num_refusals == 0

    on_stage(scenario, num_refusals=3)


def test_a_dead_worker_is_replaced_and_the_router_told() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        while await stage.next_list() != [("decode-0", "decode-0:1")]:
            pass

        stage.launcher.processes["decode-0", 1].death.set_result("killed")

        while await stage.next_list() != [("decode-0", "decode-0:2")]:
            pass
        assert "kill decode-0" in stage.launcher.journal
        assert ["decode-0"] in stage.router.absent  # the router was told whom to miss meanwhile
        assert stage.router.absent[-1] == []

    on_stage(scenario)


def test_a_hung_worker_is_killed_and_replaced() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()

        stage.prober.hanging["decode-0:1"].set()

        while await stage.next_list() != [("decode-0", "decode-0:2")]:
            pass
        assert stage.launcher.journal == ["kill decode-0"]

    on_stage(scenario)


def test_a_new_router_listens_where_the_old_one_did() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        stage.launcher.launched.clear()

        stage.launcher.processes["router", 1].death.set_result("killed")
        await stage.launcher.launched.wait()

        again = stage.launcher.launches[-1]
        assert (again.member.name, again.life) == ("router", 2)
        assert again.address == stage.launcher.launches[-2].router_address

    on_stage(scenario)


def test_the_end_comes_in_order_gateway_workers_router() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        stage.supervisor.stop(1.0)
        await stage.running

        stops = [line for line in stage.launcher.journal if line.startswith("stop")]
        assert stops == ["stop gateway 1", "stop decode-0 1", "stop router 1"]

    on_stage(scenario)


def test_workers_that_are_about_to_stop_are_withdrawn_from_the_router() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        stage.supervisor.stop(1.0)
        await stage.running

        lists = [stage.router.lists.get_nowait() for _ in range(stage.router.lists.qsize())]
        assert lists[-1] == []

    on_stage(scenario)


def test_a_second_stop_ends_the_drain_and_keeps_the_order() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        stage.launcher.processes["gateway", 1].stop_takes = asyncio.Event()

        stage.supervisor.stop(1000.0)
        stage.supervisor.stop(1000.0)
        await stage.running

        stops = ["stop gateway 1000", "stop gateway 0", "stop decode-0 0", "stop router 0"]
        assert stage.launcher.journal[: len(stops)] == stops

    on_stage(scenario)


def test_a_third_stop_does_not_wait_for_who_hangs() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.supervisor.wait_ready()
        stage.launcher.processes["gateway", 1].hangs = True

        stage.supervisor.stop(1000.0)
        stage.supervisor.stop(1000.0)
        stage.supervisor.stop(1000.0)
        await stage.running

        assert "kill gateway" in stage.launcher.journal

    on_stage(scenario)


def test_a_mistake_of_the_set_up_ends_the_start_with_its_own_words() -> None:
    async def run() -> None:
        errors: dict[str, BatonError] = {"decode-0": ConfigError("no such model")}
        stage = Stage(FakeRouter(), FakeLauncher("127.0.0.1:1", errors), FakeProber())
        await asyncio.wait_for(stage.supervisor.run(), LIMIT_S)

    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(run())
