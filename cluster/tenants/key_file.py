"""The file of API keys and tenants: what is in it, how it is read, how keys come into it.

The file holds no key, only each key's SHA-256. Keys have 256 random bits, so a slow hash would protect nothing more.
"""

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic
import yaml
from pydantic import Field

from common.config_node import Node, Positive
from common.errors import ConfigError, NotFoundError
from common.wording import sentence, sentences

FILE_BYTES_MAX = 16 * 1024 * 1024
_KEY = re.compile(r"bk-([0-9a-f]{12})-[0-9a-f]{64}")
_SECRET_PATTERN = r"^[0-9a-f]{64}$"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Field(gt=0)]


class TenantRules(Node):
    """What a tenant may do. None: no limit of the tenant's own; the gateway's and the model's remain."""

    models: tuple[str, ...] | None = None
    """Names of models; None: all."""
    priority: Literal["high", "normal", "low"] = "normal"
    """The class of requests that name none, and the best that they may name."""
    requests_per_s: Rate | None = None
    """Calls, of all kinds, on average; a burst of one second's is allowed."""
    tokens_per_min: Positive | None = None
    """Prompt and output tokens, on average; a burst of one minute's is allowed."""
    concurrent_max: Positive | None = None
    """Requests that run at once; each choice of `n` and each prompt of a batch counts."""
    queued_max: Positive | None = 256
    """Of these: not placed on a worker yet."""
    prompt_tokens_max: Positive | None = None
    """Longest prompt."""
    output_tokens_max: Positive | None = None
    """Longest answer; an answer of a request that says nothing about it ends there."""
    cache: Literal["shared", "tenant", "private"] = "tenant"
    """Whose prompts' KV is reused: of all tenants that share, of this tenant only, of the same key only."""
    cache_secret: Annotated[str | None, Field(pattern=_SECRET_PATTERN, repr=False)] = None
    """64 hexadecimal digits that salt the names of this tenant's prefixes; needed unless the cache is shared."""

    @pydantic.model_validator(mode="after")
    def _has_a_secret(self) -> Self:
        if self.cache != "shared" and self.cache_secret is None:
            raise ValueError(
                f"cache: {self.cache} needs a cache_secret of 64 hexadecimal digits (openssl rand -hex 32)"
            )
        return self


class KeyEntry(Node):
    """One key."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    """The part of the key that is no secret."""
    tenant: Name
    """Whose it is."""
    sha256: Annotated[str, Field(pattern=_SECRET_PATTERN)]
    """Of the whole key."""
    role: Literal["user", "admin"] = "user"
    """`admin`: may also see the cluster's state and all tenants' metrics."""


class KeyFile(Node):
    """The whole file."""

    tenants: dict[Name, TenantRules] = {}
    """By name."""
    keys: tuple[KeyEntry, ...] = ()
    """All of them."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        for key in self.keys:
            if key.tenant not in self.tenants:
                raise ValueError(f"key {key.id} is of tenant {key.tenant!r}, which is not among the tenants")
        if len({key.id for key in self.keys}) != len(self.keys):
            raise ValueError("two keys have one id")
        return self


class NewKey(NamedTuple):
    """A key that was just made."""

    key: str
    """Shown once; nobody can find it out later."""
    entry: KeyEntry


def key_id(key: str) -> str | None:
    """Return a key's id; None for what is no key."""
    found = _KEY.fullmatch(key)
    return None if found is None else found[1]


def digest(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def read(path: Path) -> KeyFile:
    """Read and check a file.

    Raises:
        ConfigError: it cannot be read, or is wrong; the message is one line that names the entry and no secret.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"key file {path} has more than {FILE_BYTES_MAX} bytes")
        tree = yaml.load(path.read_text("utf-8"), Loader=_Loader) or {}
        return KeyFile.model_validate(tree)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read key file {path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"key file {path} is no YAML{'' if mark is None else f', line {mark.line + 1}'}") from error
    except pydantic.ValidationError as error:
        raise ConfigError(f"key file {path}: {sentences(error, 'the file')}") from error


def add_key(path: Path, tenant: str, role: Literal["user", "admin"], rules: dict[str, Any]) -> NewKey:
    """Make a key, and its tenant if that is new, and write the file.

    Args:
        path: the file; made if there is none, for its owner's eyes only.
        tenant: whose key it is.
        role: the key's.
        rules: what to change in the tenant's rules.

    Raises:
        ConfigError: the file or a rule is wrong; nothing was written.
    """
    with _locked(path):
        tree = _tree(read(path)) if path.exists() else {"tenants": {}, "keys": []}
        known = tree["tenants"].get(tenant, {"cache_secret": secrets.token_hex(32)})
        tree["tenants"][tenant] = known | rules
        made = f"bk-{secrets.token_hex(6)}-{secrets.token_hex(32)}"
        entry = {"id": key_id(made), "tenant": tenant, "sha256": digest(made).hex(), "role": role}
        tree["keys"].append(entry)
        _write(path, tree)
        return NewKey(made, KeyEntry.model_validate(entry))


def remove_key(path: Path, unwanted: str) -> None:
    """Take a key out of the file.

    Raises:
        ConfigError: the file is wrong.
        NotFoundError: there is no key with this id.
    """
    with _locked(path):
        tree = _tree(read(path))
        left = [entry for entry in tree["keys"] if entry["id"] != unwanted]
        if len(left) == len(tree["keys"]):
            raise NotFoundError(f"no key {unwanted!r} in {path}")
        tree["keys"] = left
        _write(path, tree)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _tree(file: KeyFile) -> dict[str, Any]:
    tree: dict[str, Any] = file.model_dump(mode="json", exclude_defaults=True)
    return {"tenants": tree.get("tenants", {}), "keys": tree.get("keys", [])}


def _write(path: Path, tree: dict[str, Any]) -> None:
    """Check a tree and put it in the file's place, in one move: a gateway never reads half of it."""
    try:
        KeyFile.model_validate(tree)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(sentence(".".join(map(str, found["loc"])), found)) from error
    partial = path.with_name(f"{path.name}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        yaml.safe_dump(tree, out, sort_keys=False)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other writers out; readers need no lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write key file {path}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
