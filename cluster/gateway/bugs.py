"""The outermost frame of a gRPC call: what nobody foresaw ends as INTERNAL, logged once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from common.errors import BatonError
from common.logs import log

_LOG = logging.getLogger(__name__)


@contextmanager
def bugs_to_errors(request_id: str) -> Iterator[None]:
    """Raise a BatonError for what nobody foresaw."""
    try:
        yield
    except (BatonError, grpc.aio.AbortError, grpc.aio.BaseError):
        raise
    except Exception as error:
        _LOG.exception("a request met a bug")
        log(_LOG, logging.ERROR, f"internal error: {type(error).__name__}", request_id=request_id)
        raise BatonError(f"internal error: {type(error).__name__}") from error
