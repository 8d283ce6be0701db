"""What traffic is like, on average and of late: what the cost of a placement is reckoned with."""

from cluster.router.question import Outlook

_GAIN = 0.02
"""Weight of one more request: the last fifty count."""
_FIRST_OUTPUT_TOKENS = 256.0
_FIRST_WAIT_S = 0.01
_WAIT_FACTOR_MAX = 3.0


class Traffic:
    """Moving averages over requests. Owned by the router's loop; plain functions."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_OUTPUT_TOKENS
        """Of an answer."""
        self._reuse_share = 0.0
        self._predicted_wait_s = self._observed_wait_s = _FIRST_WAIT_S

    def placed(self, num_blocks: int, num_cached: int) -> None:
        """Take note of how much of a prompt's blocks was expected to be cached."""
        if num_blocks:
            self._reuse_share += _GAIN * (num_cached / num_blocks - self._reuse_share)

    def finished(self, output_tokens: int) -> None:
        """Take note of an answer's length."""
        self.output_tokens += _GAIN * (output_tokens - self.output_tokens)

    def waited(self, predicted_s: float, observed_s: float) -> None:
        """Take note of how long a prompt waited that was predicted to wait so long."""
        self._predicted_wait_s += _GAIN * (predicted_s - self._predicted_wait_s)
        most_s = _WAIT_FACTOR_MAX * (predicted_s + self._predicted_wait_s)  # one that went astray teaches little
        self._observed_wait_s += _GAIN * (min(observed_s, most_s) - self._observed_wait_s)

    def outlook(self, now: float) -> Outlook:
        """Return what is expected."""
        factor = (self._observed_wait_s + _FIRST_WAIT_S) / (self._predicted_wait_s + _FIRST_WAIT_S)
        factor = min(_WAIT_FACTOR_MAX, max(1.0, factor))
        return Outlook(now, self.output_tokens, self._reuse_share, factor)
