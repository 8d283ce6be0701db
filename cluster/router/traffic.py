"""What traffic is like, on average and of late: what the cost of a placement is reckoned with."""

from cluster.router.question import Outlook

_GAIN = 0.02
"""Weight of one more request: the last fifty count."""
_FIRST_OUTPUT_TOKENS = 256.0


class Traffic:
    """Moving averages over requests. Owned by the router's loop; plain functions."""

    def __init__(self) -> None:
        self.prompts_waiting = 0
        """Requests placed whose first token was not seen."""
        self.output_tokens = _FIRST_OUTPUT_TOKENS
        """Of an answer."""
        self._reuse_share = 0.0

    def placed(self, num_blocks: int, num_cached: int) -> None:
        """Take note of how much of a prompt's blocks was expected to be cached."""
        if num_blocks:
            self._reuse_share += _GAIN * (num_cached / num_blocks - self._reuse_share)

    def finished(self, output_tokens: int) -> None:
        """Take note of an answer's length."""
        self.output_tokens += _GAIN * (output_tokens - self.output_tokens)

    def outlook(self, now: float, num_prefillers: int) -> Outlook:
        """Return what is expected, for `num_prefillers` workers that prefill."""
        waiting = self.prompts_waiting / max(1, num_prefillers)
        return Outlook(now, self.output_tokens, self._reuse_share, waiting)
