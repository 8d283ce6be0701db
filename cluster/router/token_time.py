"""What a token's KV takes to come to one worker, learned from what has come, and from what has not."""

import math

_GAIN, _SURPRISE, _SLACK_S = 0.1, 4.0, 1e-6
"""Weight of one more observation, the factor up to which its surprise counts, and seconds for each token beyond it."""
_HALF_LIFE_S = 30.0
"""Of what is known to be slow, while nothing comes: nobody asks for it, so nobody would see that it is no longer."""


class TokenTime:
    """Follows the seconds for each token; robust to a disturbed transfer.

    What comes at first is believed, and likewise after a failure or a long silence; later observations change little
    each. What is slow is forgotten by and by, down to the figure of the beginning: so it is tried again at times, and
    `tried` lets only one try while the outcome is not known.

    A worker to which nothing has come is taken to be like the others: `elders` learns from all workers.
    """

    def __init__(self, starting_s: float, elders: "TokenTime | None" = None) -> None:
        """Begin.

        Args:
            starting_s: seconds for each token, before anything is known.
            elders: what all workers have shown; None: this one goes by itself.
        """
        self._starting_s = self._known_s = starting_s
        self._elders = elders
        self._at = 0.0
        """When something came, failed or was tried; what is slow fades from then on."""
        self._is_fresh = self._believes_next = True

    def token_s(self, now: float) -> float:
        """Return what each token is expected to take."""
        if self._is_fresh and self._elders is not None:
            return self._elders.token_s(now)
        if self._known_s <= self._starting_s:
            return self._known_s
        return max(self._starting_s, self._known_s * math.exp2((self._at - now) / _HALF_LIFE_S))

    def came(self, num_tokens: int, seconds: float, now: float) -> None:
        """Learn from so many tokens that came, more than 0."""
        seen_s = max(0.0, seconds) / num_tokens
        if not (self._believes_next or self._has_faded(now)):
            before_s = self._known_s
            seen_s = before_s + _GAIN * (min(seen_s, _SURPRISE * before_s + _SLACK_S) - before_s)
        self._know(seen_s, now, believes_next=False)
        if self._elders is not None:
            self._elders.came(num_tokens, seconds, now)

    def failed(self, num_tokens: int, seconds: float, now: float) -> None:
        """Learn from so many tokens, more than 0, that have not come: they would have taken longer than this."""
        least_s = seconds / num_tokens
        if least_s > self.token_s(now):
            self._know(least_s, now, believes_next=True)
        if self._elders is not None:
            self._elders.failed(num_tokens, seconds, now)

    def tried(self, now: float) -> None:
        """Take note that tokens are asked for: what had faded counts again, until it is known how that ends."""
        if self._is_fresh and self._elders is not None:
            self._elders.tried(now)
            return
        self._believes_next = self._believes_next or self._has_faded(now)
        self._at = now

    def _has_faded(self, now: float) -> bool:
        """Whether what is known is so old that it counts for less than half."""
        return self.token_s(now) < self._known_s / 2

    def _know(self, token_s: float, now: float, *, believes_next: bool) -> None:
        self._known_s, self._at = token_s, now
        self._is_fresh, self._believes_next = False, believes_next
