"""The door of the gateway: each call of either face passes it before anything is done for it."""

from collections.abc import Mapping

from cluster.tenants.callers import CALLER
from cluster.tenants.key_store import Keys
from cluster.tenants.quotas import Uses
from common.errors import PermissionDeniedError, WorkerLostError

AUTHORIZATION = "authorization"
_SCHEME = "bearer "
_OPEN = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""Whether the gateway lives, and what its protocol is, is no secret."""
_OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version", "/is_sleeping", "/docs", "/openapi.json"})
_ADMIN = ("/baton.v1.Admin/",)
_ADMIN_PATHS = frozenset({"/metrics", "/load"})
_RETRY_AFTER_S = 1.0


def stopping() -> WorkerLostError:
    """Return what a gateway that stops tells its clients: another one may serve them, or this one after its restart."""
    return WorkerLostError("the gateway stops", _RETRY_AFTER_S)


class Door:
    """Finds out who calls and whether they may. Owned by the gateway's loop."""

    def __init__(self, keys: Keys, uses: Uses) -> None:
        self._keys = keys
        self._uses = uses
        self.is_shut = False
        """Nobody is let in any more."""

    def shut(self) -> None:
        """Let nobody in any more but administrators, who may watch the end."""
        self.is_shut = True

    def check_open(self) -> None:
        """Accept a request, unless the gateway stops.

        Raises:
            WorkerLostError: it does.
        """
        if self.is_shut:
            raise stopping()

    async def admit_rpc(self, method: str, metadata: Mapping[str, str]) -> None:
        """Let a gRPC call in; see `_admit`. For common/rpc_guard.py."""
        if not method.startswith(_OPEN):
            await self._admit(metadata.get(AUTHORIZATION, ""), method.startswith(_ADMIN), method)

    async def admit_http(self, path: str, headers: Mapping[str, str]) -> None:
        """Let an HTTP request in; see `_admit`."""
        if path not in _OPEN_PATHS:
            await self._admit(headers.get(AUTHORIZATION, ""), path in _ADMIN_PATHS, path)

    async def admit_next(self) -> None:
        """Let a further request of a call in that carries several, by the rules of now.

        Raises:
            UnauthenticatedError: the call's key was removed.
            QuotaError: the tenant asks too often.
            WorkerLostError: the gateway stops.
        """
        self.check_open()
        caller = await self._keys.again(CALLER.get())
        self._uses.of(caller).call(caller.rules)
        CALLER.set(caller)

    async def _admit(self, authorization: str, needs_admin: bool, what: str) -> None:
        """Note who calls, for all that runs for the call.

        Raises:
            UnauthenticatedError: no key, or a wrong one.
            PermissionDeniedError: the key is not an administrator's.
            QuotaError: the tenant calls too often.
            WorkerLostError: the gateway stops.
        """
        if not needs_admin:
            self.check_open()
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        caller = await self._keys.find(authorization[len(_SCHEME) :].strip() if is_bearer else None)
        if needs_admin and not caller.is_admin:
            raise PermissionDeniedError(f"{what} is for administrators: make a key with `baton key new --admin`")
        self._uses.of(caller).call(caller.rules)
        CALLER.set(caller)
