"""How many compute threads each worker gets, so that those of one host never outnumber its cores. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.supervisor.fleet import Role
from common.config import ClusterConfig
from common.errors import ConfigError


class Host(NamedTuple):
    """A machine that workers may be placed on."""

    cores: int
    """That processes started there may use."""
    resources: frozenset[str] = frozenset()
    """Names of the custom Ray resources that it offers."""


class _Group(NamedTuple):
    """The workers of one role."""

    role: Role
    workers: int
    resources: frozenset[str]
    """That each of them takes."""
    cores: frozenset[int]
    """That they are pinned to; empty: any that no others are pinned to."""

    def fits(self, host: Host) -> bool:
        """Whether a host may have them."""
        return self.resources <= host.resources

    def on(self, host: Host, hosts: Sequence[Host]) -> int:
        """Return how many of them a host gets when they are spread over all that may have them."""
        return -(-self.workers // sum(map(self.fits, hosts))) if self.fits(host) else 0


def threads_of_roles(config: ClusterConfig, hosts: Sequence[Host]) -> dict[Role, int]:
    """Return the threads of one worker, by role.

    `engine.threads` where it is set. Else each worker gets an even share of the cores that its role is pinned to, or
    of those that nobody is pinned to: at least 1, and no more than the most crowded host has for it. 1 where no host is
    known yet.
    """
    groups = _groups(config)
    if config.engine.threads:
        return {group.role: config.engine.threads for group in groups}
    shares = {
        group.role: [_share(group, host, hosts, groups) for host in hosts if group.fits(host)] for group in groups
    }
    return {role: max(1, min(each, default=1)) for role, each in shares.items()}


def require_own_cores(threads: Mapping[Role, int], config: ClusterConfig, hosts: Sequence[Host]) -> None:
    """Refuse cores that more threads are pinned to than there are: each worker of a host needs its own.

    Which ones a worker gets is settled where it runs, see engine/placement.py.

    Raises:
        ConfigError: naming the cores and who wants them.
    """
    groups = [group for group in _groups(config) if group.cores]
    for host, cores in ((host, group.cores) for host in hosts for group in groups if group.fits(host)):
        sharing = [group for group in groups if group.fits(host) and group.cores <= cores]
        each = {group.role: min(threads[group.role], len(group.cores)) for group in sharing}
        numbers = {group.role: group.on(host, hosts) for group in sharing}
        wanted = sum(number * each[role] for role, number in numbers.items())
        if wanted > len(cores):
            parts = [f"{number} {role.value} with {each[role]} each" for role, number in numbers.items()]
            raise ConfigError(
                f"cores {sorted(cores)} of one host are too few for the {wanted} threads pinned to them "
                f"({', '.join(parts)}): list more, start fewer workers, or lower engine.threads"
            )


def crowded(threads: Mapping[Role, int], config: ClusterConfig, hosts: Sequence[Host]) -> str | None:
    """Return what to tell whoever gave a host more compute threads than it has cores; None: no host has."""
    groups = _groups(config)
    for host in hosts:
        here = {group.role: group.on(host, hosts) for group in groups}
        wanted = sum(number * threads[role] for role, number in here.items())
        if wanted > host.cores:
            parts = [f"{number} {role.value} with {threads[role]} each" for role, number in here.items() if number]
            advice = (
                "engine.threads=0 shares the cores out" if config.engine.threads else "fewer workers would do better"
            )
            return (
                f"{wanted} compute threads for the {host.cores} cores of one host ({', '.join(parts)}) will wait for "
                f"each other; {advice}"
            )
    return None


def _groups(config: ClusterConfig) -> list[_Group]:
    groups = []
    for role, node, workers in (
        (Role.PREFILL, config.prefill, config.prefill.workers),
        (Role.DECODE, config.decode, config.decode.workers),
        (Role.BOTH, config.decode, config.both.workers),
    ):
        if workers:
            groups.append(_Group(role, workers, frozenset(node.ray_resources), frozenset(node.cores)))
    return groups


def _share(group: _Group, host: Host, hosts: Sequence[Host], groups: Sequence[_Group]) -> int:
    here = [each for each in groups if each.fits(host)]
    pinned = frozenset[int]().union(*(each.cores for each in here))
    cores = len(group.cores) or host.cores - len(pinned)
    return cores // sum(each.on(host, hosts) for each in here if each.cores == group.cores)
