"""The whole config tree. config_file.py reads it, once; each component gets its own node and never the root."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from common.config_doors import GatewayConfig, SecurityConfig
from common.config_node import Count, Node, Positive, Seconds

Transport = Literal["auto", "shm", "ucx", "tcp", "nccl"]

DEMO_MODEL = "smollm2-135m-instruct"


class ModelConfig(Node):
    """What is served."""

    source: str = DEMO_MODEL
    """The demo model's name, a folder with safetensors, a `.gguf` file, or a Hugging Face hub id."""
    name: str | None = None
    """Name that clients ask for; None: derived from the source."""
    cache_dir: Path = Path("~/.cache/baton/models")
    """Where converted and downloaded models are kept."""


class EngineConfig(Node):
    """One model in one process."""

    backend: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """Forward pass; `auto` takes the fastest that this machine and the model allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto`: what the backend is made for, and the CPU for `reference`, which takes both."""
    weights: Literal["auto", "fp32", "bf16", "fp16", "w8", "q4"] = "auto"
    """Weight format; a format that the backend lacks is refused."""
    activations: Literal["int16", "int8"] = "int16"
    """What activations are rounded to in front of 4-bit weights (backend `cpu`): int8 prefills 1.5 times as fast on one
    thread, but its rounding differs between prefill and decode, so that greedy tokens can depend on scheduling."""
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    """Element type of the KV pool; `auto` takes the backend's own choice. int8 (backend `cpu`) has a scale for each
    token and kv head and takes half the memory of float16; docs/measured.md says what it costs in quality."""
    block_tokens: Annotated[int, Field(ge=1, le=512)] = 16
    """Tokens in a block."""
    pool_mib: Positive | None = None
    """Memory of one worker's KV pool, MiB; None: `pool_share` of what is free."""
    pool_blocks: Positive | None = None
    """Blocks in the pool; overrides pool_mib."""
    pool_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the memory that is free at start (on the machine, and within the limits of its control groups; with
    backend `cuda`, on the GPU behind the weights) which one worker's pool may take; two workers take it twice. At most
    64 full context windows."""
    threads: Count = 0
    """Compute threads of one worker; 0: an even share of the cores of its host, or of those that its role is pinned to
    (a model that is loaded without a cluster takes all)."""
    context_tokens: Positive | None = None
    """Most tokens of prompt and output together; None: the model's own window."""
    host_tier_mib: Count = 0
    """Host memory of one worker for blocks that its pool evicts, preempted sequences included, MiB; 0: none."""
    disk_tier_mib: Count = 0
    """Disk space of one worker for blocks that leave the host tier, MiB; 0: none."""
    disk_tier_dir: Path = Path("~/.cache/baton/blocks")
    """Where they are; each worker has its own folder in it, which survives a restart."""
    tier_codec: Literal["int8", "raw", "lossless"] = "int8"
    """How blocks are kept in these tiers: `int8` takes half the space of 16-bit KV and is not exact, the others are. A
    sequence that was preempted gets its blocks back from exact ones only."""


class PrefillConfig(Node):
    """Prefill workers."""

    workers: Count = 1
    """How many."""
    ray_resources: dict[str, float] = {}
    """Custom Ray resources that each of these workers takes: pins them to the nodes that offer them."""
    cores: tuple[Count, ...] = ()
    """Cores that the compute threads are pinned to: each worker of a host takes as many as it has threads, of those
    that no other worker there is pinned to, and is refused where too few are left. Empty: any."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Added to the priority number of a prefill worker's compute threads: on a contended core decode steps, tokens and
    KV on their way go first, and a prompt still gets about a tenth of it."""
    token_budget: Positive = 512
    """Most prompt tokens in one step."""
    waiting_max: Positive = 256
    """Most requests queued on one worker; beyond it a request is refused at once."""
    layer_groups: Positive = 4
    """Parts in which the layers of a prompt's last chunk are pushed while its further layers are computed; earlier
    chunks travel as a whole while the next one is computed."""


class DecodeConfig(Node):
    """Decode workers, and workers of role `both`."""

    workers: Count = 1
    """How many."""
    ray_resources: dict[str, float] = {}
    """Custom Ray resources that each of these workers takes: pins them to the nodes that offer them."""
    cores: tuple[Count, ...] = ()
    """Cores that the compute threads are pinned to, as in `prefill.cores`; decode workers and those of role `both`
    take theirs from the same ones."""
    running_max: Positive = 64
    """Most sequences in one step."""
    token_budget: Positive = 256
    """Most tokens in one step when local prefill chunks ride along with decodes."""
    itl_target_s: Seconds | None = 0.1
    """Longest that a step with decodes in it should take: prompt chunks beside them are as long as the steps so far say
    is possible. None (`null`): `token_budget` alone bounds them."""
    waiting_max: Positive = 256
    """Most requests waiting for blocks on one worker; beyond it a request is refused at once."""
    unsent_max: Positive = 16384
    """Tokens kept for a gateway that does not read its stream; beyond it the gateway's session is ended."""


class BothConfig(Node):
    """Workers that prefill and decode: the colocated baseline. They take their settings from `decode`."""

    workers: Count = 0
    """How many."""


class TransferConfig(Node):
    """KV transfer between workers."""

    transport: Transport = "auto"
    """`auto`: NCCL between two GPUs; else shared memory on one host; between hosts UCX, or plain TCP where UCX cannot
    be used. Another value forces that one or fails."""
    expected_mb_s: Annotated[float, Field(ge=0)] = 0.0
    """Slowest rate that the probe of a new connection may show, MB/s; 0: any."""
    on_slow: Literal["warn", "refuse"] = "warn"
    """What becomes of a connection that is slower than expected_mb_s, or that `auto` could not make over the transport
    that belongs there: a warning and a count in status, or an error."""
    checksum: bool = True
    """Verify the bytes of every piece that came over a wire before they are believed."""
    checksum_shm: bool = False
    """Verify also what was copied out of a sender's memory on the same host, where no wire can damage it: doubles the
    cost of the copy."""
    lease_s: Seconds = 10.0
    """A receiver keeps a landing so long without progress; a sender gives up after half of it. Dead and frozen peers
    are found sooner, by the end of their connection or by missed pings."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for a peer to answer a connection."""
    codec: Literal["auto", "raw", "lossless", "int8", "fp8"] = "auto"
    """What blocks are coded in that come to this worker over a wire. `auto`: raw, or lossless where the link is what
    everybody waits for. int8 and fp8 change values; see transfer.codec_kl_max."""
    codec_kl_max: Annotated[float, Field(ge=0)] = 0.002
    """Most that a codec of transfers or tiers may change what the model says: mean KL divergence of the next token's
    distribution, nats, measured at each worker's start on the served model. A codec that changes more is refused."""
    sealed: bool = False
    """Encrypt what comes to this worker over a wire (AES-256-GCM, a key for each ticket). Memory of one host is shared
    as it is. The key travels with the request: the control plane has to be private for itself."""
    staging_bytes_max: Annotated[int, Field(ge=64 * 1024 * 1024)] = 1024 * 1024 * 1024
    """Memory of a receiver for pieces that are under way on all its wires; senders share it by their windows."""
    inflight_bytes_max: Positive = 64 * 1024 * 1024
    """Bytes that a sender has announced to one receiver and not seen acknowledged, before it waits."""


class StepConfig(Node):
    """Seconds of a worker's step: the sum of its parts, named as in the `step` of a file that `baton profile` wrote.

    The defaults may be wrong by a factor of ten.
    """

    base_s: Seconds = 0.007
    """Whatever is in the batch."""
    token_s: Seconds = 1e-4
    """For each prompt token."""
    attention_s: Seconds = 5e-9
    """For each prompt token and each token of context before it."""
    sequence_s: Seconds = 1e-4
    """For each decoding sequence."""
    context_s: Seconds = 1e-7
    """For each token of context of each decoding sequence."""


class RouterConfig(Node):
    """Placement."""

    policy: str = "cost"
    """How a worker is chosen: the name of a class in a file of cluster/router/policies/."""
    step: StepConfig = StepConfig()
    """What workers' steps take, to begin with; their own reports replace it."""
    prefill_fallback: bool = True
    """Decode workers prefill when no prefill worker can. Off: a request fails then, and may be tried again."""
    prefill_ahead_s: Seconds = 2.0
    """Work that one worker is given ahead of what it prefills; further requests wait at the router, where their order
    is decided."""
    queue_max: Positive = 1024
    """Most requests that wait at the router; beyond it the lowest class is shed."""
    queue_patience_s: Seconds = 10.0
    """Longest time by which a request with a nearer target or deadline may overtake an earlier one of its tenant."""
    queue_wait_max_s: Seconds = 300.0
    """Nobody waits longer; who would have to is refused at once, with the time after which to try again."""


class SupervisorConfig(Node):
    """Keeping workers alive."""

    heartbeat_s: Seconds = 0.5
    """Workers report at least so often; three missed reports mean lost."""
    restart_backoff_s: Seconds = 1.0
    """Wait before the second restart in a row of the same worker; doubles up to 30 s."""
    start_timeout_s: Seconds = 300.0
    """How long a process may take from its creation to serving: loading weights, mostly."""
    probe_interval_s: Seconds = 1.0
    """Pause between two health checks of one process; a hung one is found by these, a dead one at once."""
    probe_timeout_s: Seconds = 2.0
    """How long a health check waits for its answer."""
    probe_misses_max: Positive = 3
    """Health checks in a row without an answer after which a process is killed and replaced."""
    drain_timeout_s: Seconds = 120.0
    """How long a worker may finish its running requests at an orderly stop."""


class RayConfig(Node):
    """The Ray cluster below."""

    address: str | None = None
    """An existing Ray cluster; None: start a local one for this command's life."""
    object_store_mib: Positive = 80
    """Object store of the local Ray; Baton does not use it for KV."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each worker; 0 lets a small machine hold all actors."""
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for each worker and makes visible to it."""


class ClusterConfig(Node):
    """The root."""

    model: ModelConfig = ModelConfig()
    """What is served."""
    engine: EngineConfig = EngineConfig()
    """One model in one process."""
    prefill: PrefillConfig = PrefillConfig()
    """Prefill workers."""
    decode: DecodeConfig = DecodeConfig()
    """Decode workers."""
    both: BothConfig = BothConfig()
    """Colocated workers."""
    transfer: TransferConfig = TransferConfig()
    """KV transfer."""
    router: RouterConfig = RouterConfig()
    """Placement."""
    gateway: GatewayConfig = GatewayConfig()
    """The clients' door."""
    supervisor: SupervisorConfig = SupervisorConfig()
    """Keeping workers alive."""
    security: SecurityConfig = SecurityConfig()
    """How the cluster's processes know each other."""
    ray: RayConfig = RayConfig()
    """The Ray cluster below."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of every process."""

    @pydantic.model_validator(mode="after")
    def _has_somebody_to_decode(self) -> "ClusterConfig":
        if self.decode.workers + self.both.workers == 0:
            raise ValueError("decode.workers and both.workers are both 0: nobody could decode")
        return self

    @pydantic.model_validator(mode="after")
    def _has_one_queue(self) -> "ClusterConfig":
        if self.gateway.running_max <= self.router.queue_max:
            raise ValueError(
                f"gateway.running_max, {self.gateway.running_max}, must be above router.queue_max, "
                f"{self.router.queue_max}: else the gateway refuses before the router can shed the lowest class"
            )
        return self
