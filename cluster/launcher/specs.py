"""From the configuration to the processes of a cluster: what each hosts, how it is started, what Ray reserves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.launcher import processes
from cluster.model_store import ModelFolder
from cluster.supervisor.fleet import Launch, Member, Role
from common.config import ClusterConfig, EngineConfig, PrefillConfig

# Entry strings: imported inside the actors only.
_ROUTER = "cluster.launcher.router_actor:open_router"
_GATEWAY = "cluster.launcher.gateway_actor:open_gateway"
_WORKER = "cluster.launcher.worker_actor:open_worker"
_PREFILL_WORKER = "prefill.worker:PrefillWorker"
_DECODE_WORKER = "decode.worker:DecodeWorker"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process: a member of the fleet, and how to start it."""

    member: Member
    entry: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def arguments_for(self, launch: Launch) -> dict[str, Any]:
        """Return the entry's arguments for one life, which has to listen where the last one did."""
        port = _port(launch.address)
        match self.member.role:
            case Role.ROUTER:
                return {**self.arguments, "port": port or 0}
            case Role.GATEWAY:
                ports = {"grpc_port": port, "http_port": _port(launch.extra.get("http"))}
                known = {name: value for name, value in ports.items() if value is not None}
                config = self.arguments["config"].model_copy(update=known)
                return {**self.arguments, "config": config, "router_address": launch.router_address}
            case _:
                return dict(self.arguments)


def _port(address: str | None) -> int | None:
    return None if address is None else int(address.rpartition(":")[2])


def service_specs(config: ClusterConfig, model: ModelFolder, threads: Mapping[Role, int]) -> list[ServiceSpec]:
    """Return one spec for each process of the cluster: router, gateways, then the workers.

    Args:
        config: the whole tree.
        model: what the workers load.
        threads: compute threads of a worker of each role, see cluster/launcher/threads.py.
    """
    control = processes.control_environment()
    heartbeat_s = config.supervisor.heartbeat_s
    router = ServiceSpec(
        Member("router", Role.ROUTER), _ROUTER, {"config": config.router, "heartbeat_s": heartbeat_s}, control
    )
    gateways = [
        ServiceSpec(
            Member(f"gateway-{number}", Role.GATEWAY),
            _GATEWAY,
            {"config": config.gateway.of(number), "model_dir": model.path, "model_id": model.model_id},
            control,
        )
        for number in range(config.gateway.count)
    ]
    counts = {Role.PREFILL: config.prefill.workers, Role.DECODE: config.decode.workers, Role.BOTH: config.both.workers}
    engines = {role: config.engine.model_copy(update={"threads": each}) for role, each in threads.items()}
    workers = [
        _worker(config, model, engines[role], role, number) for role, count in counts.items() for number in range(count)
    ]
    return [router, *gateways, *workers]


def _worker(config: ClusterConfig, model: ModelFolder, engine: EngineConfig, role: Role, number: int) -> ServiceSpec:
    member = Member(f"{role.value}-{number}", role)
    settings = config.prefill if role is Role.PREFILL else config.decode
    arguments: dict[str, Any] = {
        "worker_class": _PREFILL_WORKER if isinstance(settings, PrefillConfig) else _DECODE_WORKER,
        "worker_id": member.name,
        "model_dir": model.path,
        "model_id": model.model_id,
        "engine": engine,
        "role": settings,
        "transfer": config.transfer,
        "heartbeat_s": config.supervisor.heartbeat_s,
    }
    if role is Role.BOTH:
        arguments["is_colocated"] = True
    environment = processes.worker_environment(engine)
    return ServiceSpec(
        member,
        _WORKER,
        arguments,
        environment,
        config.ray.cpus_per_worker,
        config.ray.gpus_per_worker,
        settings.ray_resources,
    )
