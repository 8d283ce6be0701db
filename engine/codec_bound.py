"""Which codecs a worker's blocks go through, and how much these may change. No torch."""

from typing import NamedTuple

from common.config import EngineConfig, TransferConfig
from kvtransfer.codecs.registry import is_lossy


class CodecBound(NamedTuple):
    """Lossy codecs that are to be used, and the most that each may change: mean KL divergence, nats."""

    codecs: frozenset[str]
    kl_max: float

    @classmethod
    def of(cls, engine: EngineConfig, transfer: TransferConfig) -> "CodecBound | None":
        """Return what a configuration asks for; None: every block stays as it was computed."""
        tiers = {engine.tier_codec} if engine.host_tier_mib or engine.disk_tier_mib else set()
        lossy = frozenset(name for name in {transfer.codec, *tiers} if is_lossy(name))
        return cls(lossy, transfer.codec_kl_max) if lossy else None
