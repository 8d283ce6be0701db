"""One request on its way through the simulated cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.service_level import ORDINARY, ServiceLevel
from loadtest.content import Segment
from loadtest.simulator.pool import Lease


@dataclass(slots=True, eq=False)
class Job:
    """What the workers know of a request, and when what happened to it. Changed by the worker that has it."""

    number: int
    session: int
    turn: int
    parts: tuple[Segment, ...]
    """The prompt."""
    answer: Segment
    """What it will be answered with."""
    names: Sequence[bytes]
    """Of all full blocks that will hold prompt or computed output, in order."""
    num_prompt: int
    intended: float
    sent: float
    level: ServiceLevel = ORDINARY
    """What the client asks of the service."""
    is_remote: bool = False
    """It has a prefill worker; otherwise the decode worker prefills."""
    prefill_worker: str = ""
    decode_worker: str = ""
    num_computed: int = 0
    num_sent: int = 0
    """Tokens whose KV the decode worker holds or is being sent."""
    num_cached: int = 0
    fetched_blocks: int = 0
    """Leading blocks that another worker pushes to the one that prefills, as far as that one lacks them."""
    holder: str = ""
    """Which one."""
    prefill_started: float | None = None
    first_token: float = 0.0
    landed: float | None = None
    joined: float = 0.0
    second_token: float = 0.0
    first_step: int = 0
    """The decode worker's step that made the second token."""
    prefill_lease: Lease | None = None
    decode_lease: Lease | None = None

    @property
    def num_output(self) -> int:
        """Tokens to generate, at least 1."""
        return self.answer.num_tokens

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens still to prefill."""
        return self.num_prompt - self.num_computed

    def prompt_names(self, block_tokens: int) -> Sequence[bytes]:
        """Return the names of the prompt's full blocks."""
        return self.names[: self.num_prompt // block_tokens]

    def computed_names(self, block_tokens: int) -> Sequence[bytes]:
        """Return the names of the prompt's full blocks that are computed."""
        return self.names[: self.num_computed // block_tokens]

    def reusable_names(self, block_tokens: int) -> Sequence[bytes]:
        """Return the names of which a cache may be used: the last token is always computed, for its logits."""
        return self.names[: (self.num_prompt - 1) // block_tokens]
