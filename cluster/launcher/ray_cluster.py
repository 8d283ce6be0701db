"""The Ray below: a local one that lives exactly as long as this process, or an existing one that is joined."""

import asyncio
import fcntl
import logging
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cluster.launcher import processes
from cluster.launcher.reaper import Reaper
from cluster.launcher.threads import Host
from common.config import RayConfig
from common.control_groups import usable_cores
from common.errors import ConfigError

_LOG = logging.getLogger(__name__)
_NAMESPACE = "baton"
_PREFIX = "baton-ray-"
_NUM_CPUS = 256  # actors reserve fractions at will; Ray must never queue one for want of a CPU
_SYSTEM_CONFIG = {
    # Every actor needs a process with its own environment, so workers that Ray starts ahead would idle for ever:
    # ray.init took 5.5 s with them and 4.0 s without on two cores.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # How long a process that was told to die may ignore it (it may be stopped or hung) before SIGKILL.
    "kill_worker_timeout_milliseconds": 500,
}


class RayCluster:
    """This process's connection to Ray. `start` in one task, `stop` once, from one asyncio loop."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        # Ray's processes ask the kernel to kill them when the *thread* that started them ends. This thread is kept
        # until stop() has shut Ray down; a thread of asyncio's pool would take the cluster with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._folder: _SessionFolder | None = None

    @property
    def is_local(self) -> bool:
        """Whether Ray was started here, for this process's life."""
        return self._config.address is None

    @property
    def host(self) -> str | None:
        """Address for services to listen on: loopback on one machine; None: each node's own."""
        return "127.0.0.1" if self.is_local else None

    async def start(self) -> None:
        """Start or join Ray.

        Raises:
            ConfigError: the existing cluster cannot be reached, or a local one does not come up.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    def _start(self) -> None:
        self._folder = _SessionFolder() if self.is_local else None
        processes.prepare_ray(None if self._folder is None else self._folder.path)
        import ray

        arguments: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "namespace": _NAMESPACE}
        if self._folder is not None:
            arguments |= {
                "num_cpus": _NUM_CPUS,
                "include_dashboard": False,
                "object_store_memory": self._config.object_store_mib << 20,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self._folder.path),
                "_system_config": _SYSTEM_CONFIG,
            }
        else:
            arguments["address"] = self._config.address
        try:
            ray.init(**arguments)
        except Exception as error:  # the edge: Ray raises whatever its parts raise
            where = "start a local Ray" if self.is_local else f"join Ray at {self._config.address}"
            raise ConfigError(f"cannot {where}: {' '.join(str(error).split()) or type(error).__name__}") from error

    async def hosts(self) -> list[Host]:
        """Return the machines that actors may be placed on now."""
        if self.is_local:
            return [Host(usable_cores())]
        return await asyncio.get_running_loop().run_in_executor(self._thread, _joined_hosts)

    async def stop(self) -> None:
        """Leave Ray; a local one ends with all its processes. Safe when start failed or never ran."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stop)
        self._thread.shutdown()

    def _stop(self) -> None:
        import ray

        ray.shutdown()
        if self._folder is not None:
            self._folder.remove()


def _joined_hosts() -> list[Host]:
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return [Host(int(node["Resources"].get("CPU", 0)), frozenset(node["Resources"])) for node in nodes]


class _SessionFolder:
    """Ray's folder for sockets and logs, private to this process and removed with it.

    Of a process that was killed, the reaper removes it together with Ray's processes; were the reaper killed too, the
    next `serve` does: the folder's lock is free then.
    """

    def __init__(self) -> None:
        self._sweep()
        # Locked under a name that no sweep looks at, then shown: no moment exists in which it looks abandoned.
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = self._try_lock(hidden)
        self.path = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        self._reaper = Reaper(self.path)

    def remove(self) -> None:
        """End what is left of Ray and delete the folder with all its content."""
        self._reaper.reap()
        if self._lock is not None:
            self._lock.close()

    @classmethod
    def _sweep(cls) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if (lock := cls._try_lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()

    @staticmethod
    def _try_lock(folder: Path) -> TextIOWrapper | None:
        try:
            file = (folder / "lock").open("w")
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file
