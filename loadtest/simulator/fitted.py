"""`baton profile`: a profile made from what was observed of a running cluster, and its file."""

import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from baton_pb.v1 import worker_pb2
from loadtest.simulator.fit import fit_link, fit_step
from loadtest.simulator.probe import Observations, WorkerKind
from loadtest.simulator.profile import LinkCost, Profile

_UNLIMITED = 1 << 20
_INSTANT = LinkCost(bytes_per_s=1e12, latency_s=0.0)
"""Where nothing is transferred."""


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A profile, and how well it describes what it was made from."""

    profile: Profile
    error: float
    """Median relative error of the step times."""

    def save(self, path: Path) -> None:
        """Write the file that `baton simulate --profile` takes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.profile.model_dump(), sort_keys=False, width=118))


def fitted(seen: Observations, name: str, where: str) -> FittedProfile:
    """Return the profile that describes the observations.

    Args:
        seen: of a cluster that did nothing else.
        name: of the profile.
        where: what the cluster ran on, for people.

    Raises:
        ConfigError: too little was observed.
    """
    fit = fit_step(seen.prefills, seen.decodes)
    prefill = _kind(seen, worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_BOTH, worker_pb2.WORKER_ROLE_DECODE)
    decode = _kind(seen, worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH)
    profile = Profile(
        name=name,
        sources=_sources(seen, fit.error, where),
        step=fit.step,
        link=fit_link(seen.pushes) if seen.pushes else _INSTANT,
        hop_s=statistics.median(seen.hops_s),
        kv_bytes_per_token=seen.kv_bytes_per_token,
        block_tokens=seen.block_tokens,
        pool_blocks=decode.num_blocks,
        context_tokens=seen.context_tokens,
        prefill_token_budget=prefill.limits.token_budget or seen.context_tokens,
        decode_token_budget=decode.limits.token_budget or seen.context_tokens,
        itl_target_s=decode.limits.itl_target_s,
        running_max=decode.limits.running_max or _UNLIMITED,
        waiting_max=decode.limits.waiting_max or _UNLIMITED,
    )
    return FittedProfile(profile, fit.error)


def _kind(seen: Observations, *roles: worker_pb2.WorkerRole.ValueType) -> WorkerKind:
    """Return a worker of the first of these roles that there is."""
    return next((kind for role in roles for kind in seen.workers if kind.role == role), seen.workers[0])


def _sources(seen: Observations, error: float, where: str) -> str:
    link = f"Link: what was left to wait for after {len(seen.pushes)} first tokens."
    return (
        f"Fitted by `baton profile` on {datetime.now(UTC):%Y-%m-%d} to {seen.model_id} (backend {seen.backend}) "
        f"on {where}: {len(seen.prefills)} prompts alone and {len(seen.decodes)} batches, median error of a step "
        f"{error:.0%}. "
        f"{link if seen.pushes else 'Link: none was used.'} hop_s: TTFT less prefill of the shortest prompts, over its "
        "messages. All else: the workers' handshakes."
    )
