"""NCCL through CuPy: two ranks, each a GPU of another process or the same. Has not been run on a GPU yet."""

import threading
from typing import Any

import cupy
from cupy.cuda import nccl

from common.errors import TransferError
from kvtransfer.device import Communicator, DeviceBuffer

ABORT_PATIENCE_S = 5.0
"""How long an abort lets a call into NCCL return that is about to queue its work; then that is aborted as well."""


class CudaCommunicators:
    """Implements `Communicators` for one GPU."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def new_id(self) -> bytes:
        """See `Communicators.new_id`."""
        return bytes(char & 0xFF for char in nccl.get_unique_id())  # CuPy gives a tuple of signed numbers

    def join(self, name: bytes, rank: int) -> Communicator:
        """See `Communicators.join`."""
        chars = tuple(byte - 256 if byte > 127 else byte for byte in name)  # and takes one: never bytes
        with self._gpu:
            try:
                return CudaCommunicator(self._gpu, nccl.NcclCommunicator(2, chars, rank), 1 - rank)
            except nccl.NcclError as error:
                raise TransferError(f"nccl: {error}") from error


class CudaCommunicator:
    """Implements `Communicator`. One thread sends or receives, any may abort."""

    def __init__(self, gpu: Any, communicator: Any, peer: int) -> None:
        self._gpu = gpu
        self._nccl = communicator
        self._peer = peer
        self._is_aborted = False
        # Held while work is queued, not while it is waited for: aborting frees what queueing uses.
        self._queueing = threading.Lock()
        with gpu:
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def send(self, buffer: DeviceBuffer) -> None:
        """See `Communicator.send`."""
        self._do("send", buffer)

    def receive(self, buffer: DeviceBuffer) -> None:
        """See `Communicator.receive`."""
        self._do("recv", buffer)

    def abort(self) -> None:
        """See `Communicator.abort`."""
        has_lock = self._queueing.acquire(timeout=ABORT_PATIENCE_S)
        try:
            if not self._is_aborted:
                self._is_aborted = True
                self._nccl.abort()
        finally:
            if has_lock:
                self._queueing.release()

    def _do(self, what: str, buffer: DeviceBuffer) -> None:
        with self._gpu:
            try:
                with self._queueing:
                    self._require_whole()
                    act = getattr(self._nccl, what)
                    act(buffer.address, buffer.num_bytes, nccl.NCCL_UINT8, self._peer, self._stream.ptr)
                self._stream.synchronize()
            except (nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError) as error:
                raise TransferError(f"nccl: {error}") from error
            self._require_whole()  # what an abort ends looks like a success

    def _require_whole(self) -> None:
        if self._is_aborted:
            raise TransferError("the communicator was aborted")
