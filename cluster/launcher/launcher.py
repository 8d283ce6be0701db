"""Creates the Ray actors of a cluster and tells how they fare. The supervisor decides which and when."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from cluster.launcher import processes
from cluster.launcher.ray_cluster import RayCluster
from cluster.launcher.service_actor import ServiceActor, Started
from cluster.launcher.specs import ServiceSpec
from cluster.supervisor.fleet import Launch, Place
from common.errors import BatonError, WorkerLostError
from common.peers import Peers

_LOG = logging.getLogger(__name__)
# The name of a killed actor is free again after some 5 ms; one that is still taken after this belongs to somebody else.
_NAME_TRIES = 40
_NAME_PAUSE_S = 0.05
_RPC_CONCURRENCY = 100


class ActorProcess:
    """One life of one member: a Ray actor that hosts its service. Used by the supervisor's loop only."""

    def __init__(self, actor: Any, start: Any, name: str, is_local: bool) -> None:
        self._actor = actor  # Any: Ray's handles and references are untyped
        self._start = start
        self._name = name
        self._is_local = is_local
        self._pid: int | None = None
        self._is_leaving = False

    async def started(self) -> Place:
        """Wait until the service serves.

        Raises:
            BatonError: what the service raised when it started; `WorkerLostError` when the process died instead.
        """
        started: Started = await _typed(self._start, self._name)
        self._pid = started.pid
        return Place(started.address, started.node, started.pid, started.extra)

    async def failed(self) -> str:
        """Wait for the end of the service and return the reason. Notices a killed process within tens of ms."""
        try:
            await _typed(self._actor.wait_failed.remote(), self._name)
        except BatonError as error:
            return error.message
        return "the service ended"

    async def stop(self, drain_timeout_s: float) -> None:
        """Stop the service in order, then end the process. A process that is gone already is no error.

        Raises:
            TimeoutError: it did not stop within `drain_timeout_s` and some seconds; the process is killed all the same.
        """
        self._is_leaving = True
        try:
            async with asyncio.timeout(drain_timeout_s + 5.0):
                await _typed(self._actor.stop.remote(drain_timeout_s), self._name)
                await _typed(self._actor.leave.remote(), self._name)
        except WorkerLostError:
            return  # the end of leave(), or it was gone before
        except asyncio.CancelledError:
            self._is_leaving = False  # whoever lost patience stops it anew, or kills it
            raise
        except BaseException:
            self._is_leaving = False
            self.kill()
            raise

    def kill(self) -> None:
        """End the process at once, also one that hangs or was stopped by a signal."""
        import ray

        if self._is_leaving:
            return  # it is on its way out; a signal would only make Ray report a crash
        ray.kill(self._actor, no_restart=True)
        if self._is_local and self._pid is not None:
            processes.kill_process(self._pid)


class RayLauncher:
    """Starts the members' processes as named Ray actors, `baton-<member>`.

    Actors are owned by this process and die with it. `max_restarts` is 0: with Ray's own restarts a death is reported
    1.7 s later (measured) and the new process would have neither the old one's port nor a new name for its life.
    """

    def __init__(self, cluster: RayCluster, specs: Sequence[ServiceSpec], log_level: str, peers: Peers) -> None:
        self._cluster = cluster
        self._specs = {spec.member.name: spec for spec in specs}
        self._log_level = log_level
        self._peers = peers

    async def launch(self, launch: Launch) -> ActorProcess:
        """Create the actor and begin to start its service.

        Raises:
            WorkerLostError: the actor's name stays taken, e.g. by another Baton on the same Ray.
        """
        spec = self._specs[launch.member.name]
        for attempt in range(_NAME_TRIES):
            try:
                actor = self._create(spec)
                break
            except ValueError as error:  # the name of the life before is not free yet
                if attempt == _NAME_TRIES - 1:
                    raise WorkerLostError(f"cannot name the actor of {spec.member.name}: {error}") from error
                await asyncio.sleep(_NAME_PAUSE_S)
        start = actor.start.remote(spec.entry, self._cluster.host, spec.arguments_for(launch))
        return ActorProcess(actor, start, spec.member.name, self._cluster.is_local)

    def _create(self, spec: ServiceSpec) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Router and gateways stay on this node: its ports were checked, and its addresses printed.
        here = ray.get_runtime_context().get_node_id()
        strategy = "SPREAD" if spec.member.role.is_worker else NodeAffinitySchedulingStrategy(here, soft=False)
        options = {
            "name": f"baton-{spec.member.name}",
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "resources": dict(spec.resources),
            "max_restarts": 0,
            "max_concurrency": _RPC_CONCURRENCY,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": dict(spec.environment)},
        }
        return ray.remote(ServiceActor).options(**options).remote(spec.member.name, self._log_level, self._peers)


async def _typed(reference: Any, name: str) -> Any:
    """Await a Ray reference; what it raises becomes one of our errors, in one line."""
    import ray

    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, BatonError):
            raise cause from error
        raise BatonError(f"{name}: {type(cause).__name__}: {' '.join(str(cause).split())}") from error
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())
        if "worker process has died" in reason:  # killed or crashed: Ray's guesses at why are long
            raise WorkerLostError(f"the process of {name} died") from error
        raise WorkerLostError(f"the process of {name} is gone: {reason[:300]}") from error
