"""A placement: what is asked for, where it goes, and what it occupies until it ends."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.router.backlog import Prompt
from cluster.router.worker import Worker, WorkerInfo


class PlacementRequest(NamedTuple):
    """What the router must know of a request."""

    request_id: str
    num_tokens: int
    """Of the prompt, and of output that exists already."""
    max_output_tokens: int
    hashes: Sequence[bytes] = ()
    """Chain hashes of the full blocks, in order."""
    excluded: frozenset[str] = frozenset()
    """Workers that failed this request already."""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    tenant: str = ""
    """Whose it is; placements do not depend on it."""


class Placement(NamedTuple):
    """Where a request goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker prefills."""
    decode_hit_blocks: int
    prefill_hit_blocks: int
    reason: str
    predicted_ttft_s: float = 0.0
    """From now on."""
    holder: WorkerInfo | None = None
    """Who is to push the prompt's beginning to the worker that prefills."""
    holder_blocks: int = 0
    """Its leading blocks, as far as that worker lacks them."""


class Size(NamedTuple):
    """What a request occupies, and leaves behind."""

    prompt: Prompt
    output_tokens: int
    """At most."""
    sent_tokens: int = 0
    """Whose KV goes to the decode worker."""
    blocks: int = 0
    """Full blocks of the prompt, which somebody must have cached at the end."""


class Outcome(Protocol):
    """Who is told what becomes of a reservation."""

    def prefilled(self, reservation: "Reservation", is_success: bool) -> None:
        """The first token was seen, or will not be."""
        ...

    def released(self, reservation: "Reservation", num_blocks: int) -> None:
        """It has ended and left so many blocks cached."""
        ...

    def now(self) -> float:
        """Return the time, seconds."""
        ...


class Reservation:
    """What one request occupies, on one decode and perhaps one prefill worker. `release` gives it back, once."""

    def __init__(
        self, outcome: Outcome, placement: Placement | None, decode: Worker, prefill: Worker | None, size: Size
    ) -> None:
        self.placement = placement
        """None for a reservation that `Router.hold` counted again."""
        self.size = size
        self.placed_at = outcome.now()
        self._outcome = outcome
        self._decode = decode
        self._prefill = prefill
        self._is_prefilled = False
        self._is_released = False
        decode.begin_decode(size.prompt.num_tokens, size.output_tokens)
        self._prefiller.begin_prefill(self, size.prompt, self.placed_at, is_remote=prefill is not None)

    @property
    def _prefiller(self) -> Worker:
        return self._decode if self._prefill is None else self._prefill

    def first_token(self) -> None:
        """The prefill part is over. Further calls do nothing."""
        self._end_prefill(is_success=True)

    def release(self, exposed_s: float | None = None) -> None:
        """The request is over, whatever its outcome. Further calls do nothing.

        Args:
            exposed_s: how long its sequence waited for KV after the first token; None: it did not come so far.
        """
        if self._is_released:
            return
        self._is_released = True
        was_prefilled = self._is_prefilled
        self._end_prefill(is_success=False)
        size = self.size
        self._decode.end_decode(size.prompt.num_tokens, size.output_tokens)
        if exposed_s is not None and self._prefill is not None:
            self._decode.saw_exposed(size.sent_tokens, exposed_s, self._outcome.now())
        self._outcome.released(self, size.blocks if was_prefilled else 0)

    def _end_prefill(self, is_success: bool) -> None:
        if self._is_prefilled:
            return
        self._is_prefilled = True
        prefilled_at = self._outcome.now() if is_success else None
        is_remote = self._prefill is not None
        self._prefiller.end_prefill(self, self.size.prompt, prefilled_at, is_remote=is_remote)
        self._decode.started()
        self._outcome.prefilled(self, is_success)
