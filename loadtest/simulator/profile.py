"""The cost model of one kind of worker and link, as a YAML file whose numbers say where they come from."""

from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import Field

from common.config_node import Node, Positive
from common.errors import ConfigError
from common.wording import sentences

_FOLDER = Path(__file__).parent / "profiles"
Cost = Annotated[float, Field(ge=0)]


class StepCost(Node):
    """Seconds of one step: the sum of its parts."""

    base_s: Annotated[float, Field(gt=0)]
    """Whatever is in the batch: reading the weights, launching."""
    token_s: Cost
    """For each prompt token."""
    attention_s: Cost
    """For each prompt token and each token of context before it."""
    sequence_s: Cost
    """For each decoding sequence."""
    context_s: Cost
    """For each token of context of each decoding sequence."""

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Return what a chunk adds to its step.

        Args:
            num_tokens: of the chunk.
            num_before: tokens of the prompt before the chunk.
        """
        return num_tokens * (self.token_s + self.attention_s * (num_before + num_tokens / 2))

    def decode_s(self, num_sequences: int, num_context: int) -> float:
        """Return what decoding sequences add to a step; `num_context` is the sum of their contexts."""
        return num_sequences * self.sequence_s + num_context * self.context_s


class LinkCost(Node):
    """One worker's link; a transfer occupies the sender's and the receiver's."""

    bytes_per_s: Annotated[float, Field(gt=0)]
    """Of KV."""
    latency_s: Cost
    """From the last byte to the receiver's word that all has landed."""


class Profile(Node):
    """One kind of worker."""

    name: str
    """Of the profile."""
    sources: str
    """Where each number comes from."""
    step: StepCost
    """Compute."""
    link: LinkCost
    """Transfer."""
    hop_s: Cost
    """One message between two processes, handling included."""
    kv_bytes_per_token: Positive
    """All layers, K and V."""
    block_tokens: Positive
    """Tokens in a block."""
    pool_blocks: Positive
    """Blocks of one worker."""
    context_tokens: Positive
    """The model's window."""
    prefill_token_budget: Positive
    """Most prompt tokens in a step of a prefill worker."""
    decode_token_budget: Positive
    """Most tokens in a step of a decode worker when prompts ride along."""
    itl_target_s: Cost = 0.0
    """Longest that a step of a decode worker with prompts beside decodes should take; 0: no such target."""
    running_max: Positive
    """Most sequences on one decode worker."""
    waiting_max: Positive
    """Most requests waiting on one worker; beyond it one is refused."""


def shipped() -> list[str]:
    """Return the names of the profiles that come with the program."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Read a shipped profile by name, or a file.

    Raises:
        ConfigError: there is none, or it is not a profile; one line.
    """
    path = _FOLDER / f"{name}.yaml" if name in shipped() else Path(name)
    try:
        tree: Any = yaml.safe_load(path.read_text())
        return Profile.model_validate(tree)
    except OSError as error:
        trouble = (error.strerror or str(error)).lower()
        raise ConfigError(f"profile {name!r} is no file ({trouble}), nor one of {', '.join(shipped())}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {name!r} is no YAML: {' '.join(str(error).split())}") from error
    except pydantic.ValidationError as error:
        raise ConfigError(f"profile {name!r}: {sentences(error, 'the file')}") from error
