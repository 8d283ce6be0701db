"""What the model and the configuration allow one request."""

from dataclasses import dataclass, field

from common.config_doors import RequestLimitsConfig
from common.errors import InvalidRequestError

_CHARACTERS_PER_TOKEN_MAX = 256
"""No vocabulary has longer tokens in numbers that matter: a longer text cannot fit and is not worth tokenizing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the configuration allow."""

    model_id: str
    context_tokens: int
    vocab_tokens: int
    prompt_tokens_max: int
    """At most the window less one: there must be room for a token."""
    request: RequestLimitsConfig = field(default_factory=RequestLimitsConfig)
    """What else one request may hold."""

    @property
    def prompt_characters_max(self) -> int:
        """Characters beyond which a text need not be tokenized to know that it is too long."""
        return self.prompt_tokens_max * _CHARACTERS_PER_TOKEN_MAX

    def check_length(self, num_characters: int) -> None:
        """Refuse a text that is too long for any tokenizer.

        Raises:
            InvalidRequestError: with both numbers.
        """
        if num_characters > self.prompt_characters_max:
            raise InvalidRequestError(
                f"prompt has {num_characters} characters, more than a prompt of {self.prompt_tokens_max} tokens can "
                f"have (context window {self.context_tokens})"
            )
