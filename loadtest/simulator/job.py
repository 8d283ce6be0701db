"""One request on its way through the simulated cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.service_level import ORDINARY, ServiceLevel
from loadtest.content import Segment


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
    num_answered: int = 0
    """Tokens that it was answered with: fewer than asked where it filled a pool."""

    @property
    def num_output(self) -> int:
        """Tokens to generate, at least 1."""
        return self.answer.num_tokens

    def prompt_names(self, block_tokens: int) -> Sequence[bytes]:
        """Return the names of the prompt's full blocks."""
        return self.names[: self.num_prompt // block_tokens]
