"""What a policy is asked: a request, who could take it, and what is known of each."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from cluster.router.backlog import Backlog
from cluster.router.fetch_model import STARTING_TOKEN_S
from cluster.router.hits import NO_HITS, Hits, Level
from cluster.router.hot_prefixes import NOT_HOT, Hot
from cluster.router.step_model import STARTING, StepModel

EXPOSED_TOKEN_S = 1e-6
"""Of Candidate.exposed_token_s, before anything was seen."""

_TOKEN_BYTES = 131072.0
"""Of Candidate.token_bytes, for a worker that does not say: 8 billion parameters, KV in 16 bits."""


@dataclass(slots=True, eq=False)
class Candidate:
    """What is known of one worker that could be chosen. Kept up to date by the WorkerTable; policies only read it."""

    worker_id: str
    prefills_itself: bool = False
    """Role `both`: a sequence that decodes here is prefilled here."""
    queued_tokens: int = 0
    """Prompt tokens waiting or being prefilled, reported or placed."""
    num_sequences: int = 0
    """Sequences waiting or running, reported or placed."""
    num_tokens: int = 0
    """Tokens whose KV it holds or will hold, of what is placed."""
    pool_tokens: int = 0
    """Tokens that its pool holds."""
    used_tokens: int = 0
    """Of these: used by sequences, reported or placed."""
    free_tokens: int = 0
    """Of these: hold nothing, by the last report. The rest is kept for later prompts."""
    token_bytes: float = _TOKEN_BYTES
    """Of a token's KV."""
    model: StepModel = STARTING
    """What its steps cost."""
    step_s: float = STARTING.base_s
    """A decode step's time with the present batch."""
    fetch_token_s: float = STARTING_TOKEN_S
    """Seconds that KV which another worker is asked for takes to come here, for each token."""
    exposed_token_s: float = EXPOSED_TOKEN_S
    """Seconds that a sequence waits here for its KV after its first token, for each token that is sent."""
    backlog: Backlog = field(default_factory=Backlog)
    """Prompts placed here that are not prefilled."""
    backlog_s: float = 0.0
    """Of these: predicted seconds of prefill."""
    token_s: float = STARTING.token_s
    """As in `model`."""
    is_full: bool = False
    """It has all that it can do at once and something ahead: nothing is placed here while another one has room."""

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Return what prefilling takes here, apart from other work, in as many steps as the token budget makes of it.

        Args:
            num_tokens: to compute.
            num_before: tokens of the prompt that are cached.
        """
        model, budget = self.model, self.backlog.token_budget
        further_steps = (num_tokens - 1) // budget if budget else 0
        return model.prefill_s(num_tokens, num_before) + further_steps * model.base_s


_is_full = attrgetter("is_full")


class Group:
    """Candidates for one part of a request."""

    __slots__ = ("_bits", "_num_known", "_whole", "by_id", "members")

    def __init__(self, members: list[Candidate], whole: "Group | None" = None) -> None:
        """Make a group.

        Args:
            members: of it.
            whole: a group that has at least these members; others may come of it and go again.
        """
        self.members = members
        self.by_id = {candidate.worker_id: candidate for candidate in members}
        self._whole = whole
        self._bits = self._num_known = 0

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def bits(self, bit_of: Mapping[str, int]) -> int:
        """Return a bit set with the members, and perhaps others of the whole group.

        Args:
            bit_of: as in Hits. While there is the group, workers are only added to it.
        """
        if self._whole is not None:
            return self._whole.bits(bit_of)
        if self._num_known != len(bit_of):
            self._num_known = len(bit_of)
            self._bits = sum(bit_of.get(worker_id, 0) for worker_id in self.by_id)
        return self._bits

    @property
    def has_room(self) -> bool:
        """Whether one of them is not full."""
        return not all(map(_is_full, self.members))

    def with_room(self) -> "Group":
        """Return those that are not full; all of them, if none is or all are."""
        if not any(map(_is_full, self.members)):
            return self
        return Group([candidate for candidate in self.members if not candidate.is_full] or self.members)


class TrackedGroup(Group):
    """A group that is told when one of its members fills up or drains: who has room is known without a look at all."""

    __slots__ = ("_place_of", "_places", "_roomy")

    def __init__(self, members: list[Candidate]) -> None:
        super().__init__(members)
        self._place_of = {candidate.worker_id: place for place, candidate in enumerate(members)}
        self._places = [place for place, candidate in enumerate(members) if not candidate.is_full]
        self._roomy = Group([members[place] for place in self._places], whole=self)

    @property
    def has_room(self) -> bool:
        """Whether one of them is not full."""
        return bool(self._places)

    def with_room(self) -> Group:
        """Return those that are not full, in their order; all of them, if none is or all are."""
        return self._roomy if 0 < len(self._places) < len(self.members) else self

    def changed(self, candidate: Candidate) -> None:
        """Take note that a candidate, which may be no member, is full now, or no longer."""
        worker_id, roomy = candidate.worker_id, self._roomy
        place = self._place_of.get(worker_id)
        if place is None or (worker_id not in roomy.by_id) == candidate.is_full:
            return
        at = bisect_left(self._places, place)
        if candidate.is_full:
            del self._places[at], roomy.members[at], roomy.by_id[worker_id]
        else:
            self._places.insert(at, place)
            roomy.members.insert(at, candidate)
            roomy.by_id[worker_id] = candidate


class Outlook(NamedTuple):
    """What is expected of traffic as a whole."""

    now: float = 0.0
    """By the router's clock, seconds."""
    output_tokens: float = 256.0
    """Of a request that may have as many as it likes."""
    reuse_share: float = 0.0
    """Share of prompt tokens that were found cached of late."""
    wait_factor: float = 1.0
    """By which prompts have waited longer than what was ahead of them: others came and overtook them."""


class Question(NamedTuple):
    """A request to place, and who could take it. `decode` is never empty; without `prefill` the decoder prefills."""

    num_tokens: int
    num_blocks: int
    """Full blocks of the prompt."""
    decode: Group
    prefill: Group
    hits: Hits = NO_HITS
    """Leading blocks of the prompt that each is expected to hold: `hits.of(candidate.worker_id)`."""
    deepest: Level | None = None
    """Who holds most of the prompt now, in the pool, and could push it to others; None: nothing is to be fetched."""
    hot: Hot = NOT_HOT
    """What many others of late had in common with the prompt."""
    block_tokens: int = 1
    max_output_tokens: int = 256
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    outlook: Outlook = Outlook()
