"""A pool in the memory of an NVIDIA GPU, by CuPy, whose context is the one that torch uses too."""

import threading
from typing import Any

import cupy
import numpy as np

from kvtransfer.cuda.kernel import NAME, OPTIONS, SOURCE, THREADS, Launch
from kvtransfer.device import DeviceBuffer
from kvtransfer.pieces import Runs


class CudaBuffer:
    """Implements `DeviceBuffer` out of CuPy's memory pool, which keeps what is given back."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.array: Any = cupy.empty(num_bytes, dtype=cupy.uint8)
        self.address = int(self.array.data.ptr)


class CudaDevice:
    """Implements `Device`. Has not been run on a GPU yet.

    Each thread has a stream of its own, so that copies neither wait for model steps nor hold them up; whoever announces
    blocks has made sure that they are written.

    Args:
        address: of the pool in the memory of GPU `index`.
        num_bytes: of the pool; whoever made it keeps it alive as long as transfers run.
        index: as CUDA counts the GPUs that this process sees.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC does not take the kernel.
    """

    def __init__(self, address: int, num_bytes: int, index: int) -> None:
        self.num_bytes = num_bytes
        self._address = address
        self._gpu = cupy.cuda.Device(index)
        self._own = threading.local()
        with self._gpu:
            self._copy: Any = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS).get_function(NAME)

    def pinned(self, num_bytes: int) -> memoryview:
        """Return page-locked memory out of CuPy's pool of it; see `Device.pinned`."""
        with self._gpu:
            memory = cupy.cuda.alloc_pinned_memory(num_bytes)
        return np.frombuffer(memory, dtype=np.uint8, count=num_bytes).data

    def buffer(self, num_bytes: int) -> CudaBuffer:
        """See `Device.buffer`."""
        with self._gpu, self.stream():
            return CudaBuffer(num_bytes)

    def gather(self, runs: Runs, target: DeviceBuffer) -> None:
        """See `Device.gather`."""
        self._launch(self._address, target.address, runs)

    def scatter(self, source: DeviceBuffer, runs: Runs) -> None:
        """See `Device.scatter`."""
        self._launch(source.address, self._address, runs)

    def download(self, source: DeviceBuffer, target: memoryview) -> None:
        """See `Device.download`."""
        assert source.num_bytes == target.nbytes
        self._copy_bytes(np.frombuffer(target, np.uint8).ctypes.data, source.address, target.nbytes, "DeviceToHost")

    def upload(self, source: memoryview, target: DeviceBuffer) -> None:
        """See `Device.upload`."""
        assert source.nbytes == target.num_bytes
        self._copy_bytes(target.address, np.frombuffer(source, np.uint8).ctypes.data, source.nbytes, "HostToDevice")

    def stream(self) -> Any:
        """Return the calling thread's stream."""
        if not hasattr(self._own, "stream"):
            with self._gpu:
                self._own.stream = cupy.cuda.Stream(non_blocking=True)
        return self._own.stream

    def _launch(self, source: int, target: int, runs: Runs) -> None:
        with self._gpu, self.stream() as stream:
            table = cupy.asarray(runs.table)
            self._copy(Launch.of(runs), (THREADS,), (source, target, table, np.int32(len(runs))))
            stream.synchronize()

    def _copy_bytes(self, target: int, source: int, num_bytes: int, direction: str) -> None:
        kind = getattr(cupy.cuda.runtime, f"memcpy{direction}")
        with self._gpu, self.stream() as stream:
            cupy.cuda.runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)
            stream.synchronize()
