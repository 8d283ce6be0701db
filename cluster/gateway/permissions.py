"""What a tenant's rules mean for one request."""

from dataclasses import replace

from cluster.gateway.request import Request
from cluster.service_level import Priority
from cluster.tenants.callers import Caller
from common.errors import InvalidRequestError, PermissionDeniedError

_CLASSES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}


def may_use(model: str, caller: Caller) -> bool:
    """Whether a caller's tenant may use a model."""
    return caller.rules.models is None or model in caller.rules.models


def check_may_use(model: str, caller: Caller) -> None:
    """Let a caller use a model.

    Raises:
        PermissionDeniedError: the tenant may not.
    """
    if not may_use(model, caller):
        raise PermissionDeniedError(f"tenant {caller.name} may not use model {model!r}")


def for_caller(request: Request, caller: Caller, names_class: bool) -> Request:
    """Return a request as its tenant may make it.

    Args:
        request: as it was asked.
        caller: who asked.
        names_class: whether the request names a class; one that names none has the tenant's.

    Raises:
        InvalidRequestError: the answer could be longer than the tenant's may be.
    """
    allowed = _CLASSES[caller.rules.priority]
    if names_class:
        priority = max(request.level.priority, allowed)
    else:
        priority = allowed if caller.tenant else request.level.priority
    most, asked = caller.rules.output_tokens_max, request.sampling.max_tokens
    if most is not None and asked > most:
        raise InvalidRequestError(f"max_tokens must be at most {most} for tenant {caller.name}, got {asked}")
    if caller.tenant != request.tenant:
        request = replace(request, tenant=caller.tenant)
    return (
        request
        if priority == request.level.priority
        else replace(request, level=replace(request.level, priority=priority))
    )


def longest_answer(room: int, caller: Caller) -> int:
    """Return the most tokens that an answer of a request may have which does not say how many it wants."""
    return room if caller.rules.output_tokens_max is None else min(room, caller.rules.output_tokens_max)
