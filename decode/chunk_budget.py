"""How much of a prompt may ride along with decodes so that running streams still get their tokens in time.

Pure: no clock, no I/O. What a step costs is learned from the steps themselves: the time of those without a prompt, the
further seconds for each prompt token, and how far off the sum of the two was. All three are averages that forget, since
batches grow, contexts deepen and neighbours on the machine come and go.
"""

WEIGHT = 0.2
"""Of the newest step in each average."""
TRIAL_TOKENS = 32
"""Chunk of the first mixed step, before anything is known of what a token costs."""
LEAST_TOKENS = 8
"""A prompt gets so much in every step, even where decoding alone misses the target: nobody starves."""
_DEVIATIONS = 2.0
"""Steps are planned so many average errors below the target."""


class ChunkBudget:
    """Prompt tokens of one mixed step. Owned by the decode loop."""

    def __init__(self, target_s: float) -> None:
        """`target_s` is the longest a step with decodes in it should take."""
        assert target_s > 0
        self._target_s = target_s
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._error_s = 0.0

    def tokens(self) -> int:
        """Return how many prompt tokens the next step with decodes may take; at least LEAST_TOKENS."""
        if self._token_s is None:
            return TRIAL_TOKENS
        left_s = self._target_s - (self._decode_s or 0.0) - _DEVIATIONS * self._error_s
        return max(LEAST_TOKENS, int(left_s / max(self._token_s, 1e-9)))

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take what a step held and how long it took."""
        if num_prompt_tokens == 0:
            self._decode_s = _mixed(self._decode_s, seconds)
            return
        decode_s = (self._decode_s or 0.0) if num_decodes else 0.0
        if num_decodes and self._token_s is not None:
            self._error_s = _mixed(self._error_s, abs(decode_s + self._token_s * num_prompt_tokens - seconds))
        self._token_s = _mixed(self._token_s, max(0.0, seconds - decode_s) / num_prompt_tokens)


def _mixed(average: float | None, newest: float) -> float:
    return newest if average is None else average + WEIGHT * (newest - average)
