"""Who makes a call, from the door to the last token."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field

from cluster.tenants.key_file import KeyEntry, TenantRules

_SALT_BYTES = 32
_OPEN_RULES = TenantRules(cache="shared", priority="high", queued_max=None)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and what they may do."""

    tenant: str
    """Empty: nobody was asked for a key."""
    key_id: str
    is_admin: bool
    rules: TenantRules
    cache_salt: bytes = field(default=b"", repr=False)
    """Keys the chain hashes of this caller's prompts."""

    @property
    def name(self) -> str:
        """Return what messages and metrics call the tenant."""
        return self.tenant or "anonymous"


ANONYMOUS = Caller("", "", True, _OPEN_RULES)
"""Everybody, where no keys are configured."""

CALLER: ContextVar[Caller] = ContextVar("CALLER")
"""Set at the door of both faces; what runs for the call inherits it. Without it nothing is served."""


def current_tenant() -> str:
    """Return whose call this runs for; empty for nobody's, and where nobody is asked for a key."""
    caller = CALLER.get(None)
    return "" if caller is None else caller.tenant


def holder_at(address: str) -> str:
    """Return who holds what a call takes: its tenant, or whoever calls from its address where no tenant is known."""
    tenant = current_tenant()
    return f"tenant {tenant}" if tenant else f"address {address}"


def caller_of(entry: KeyEntry, rules: TenantRules) -> Caller:
    """Return who shows a key."""
    return Caller(entry.tenant, entry.id, entry.role == "admin", rules, _salt(entry, rules))


def _salt(entry: KeyEntry, rules: TenantRules) -> bytes:
    """Return what keys the chain hashes: callers with different salts cannot name each other's prefixes."""
    if rules.cache == "shared":
        return b""
    assert rules.cache_secret is not None, "the file was checked"
    whose = b"" if rules.cache == "tenant" else entry.id.encode()
    return hashlib.blake2b(whose, key=bytes.fromhex(rules.cache_secret), digest_size=_SALT_BYTES).digest()
