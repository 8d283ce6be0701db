"""What the model and the configuration allow one request."""

from dataclasses import dataclass, field

from common.config_doors import RequestLimitsConfig
from common.errors import InvalidRequestError

_CHARACTERS_PER_TOKEN_MAX = 32
"""Of a whole prompt, on average: English has 4, and only runs of one character have more than 10. A longer text does
not fit and is not worth tokenizing: one of 2 MB took 5 to 17 s, and others wait for the thread."""


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
                f"prompt has {num_characters} characters, more than {self.prompt_characters_max}, as many as a "
                f"prompt of {self.prompt_tokens_max} tokens may have (context window {self.context_tokens})"
            )
