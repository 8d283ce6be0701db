"""A pool in the memory of an NVIDIA GPU, by CuPy, whose context is the one that torch uses too."""

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from common.logs import log
from kvtransfer.cuda.kernel import NAME, OPTIONS, SOURCE, THREADS, Launch
from kvtransfer.device import Communicators, DeviceBuffer
from kvtransfer.pieces import Runs

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger(__name__)


class CudaBuffer:
    """Implements `DeviceBuffer` out of CuPy's memory pool, which keeps what is given back."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.num_bytes = int(array.nbytes)
        self.address = int(array.data.ptr)

    def part(self, begin: int, num_bytes: int) -> "CudaBuffer":
        """See `DeviceBuffer.part`."""
        return CudaBuffer(self.array[begin : begin + num_bytes])


def _communicators(gpu: Any) -> Communicators | None:
    """Return NCCL, or None where CuPy does not find it."""
    try:
        module = importlib.import_module("kvtransfer.cuda.communicator")
    except ImportError as error:
        log(logger, logging.WARNING, f"SLOW PATH: no NCCL, KV goes from GPU to GPU through host memory: {error}")
        return None
    communicators: Communicators = module.CudaCommunicators(gpu)
    return communicators


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
        self.identity = f"{BOOT_ID.read_text().strip()}/{self._gpu.pci_bus_id}"
        self.communicators: Communicators | None = _communicators(self._gpu)
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
            return CudaBuffer(cupy.empty(num_bytes, dtype=cupy.uint8))

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
            grid = Launch.of(runs)
            # CuPy takes plain tuples only; a Python int is passed as 64 bits, which is what an address is.
            self._copy((grid.grid_x, grid.grid_y), (THREADS,), (source, target, table, np.int32(len(runs))))
            stream.synchronize()

    def _copy_bytes(self, target: int, source: int, num_bytes: int, direction: str) -> None:
        kind = getattr(cupy.cuda.runtime, f"memcpy{direction}")
        with self._gpu, self.stream() as stream:
            cupy.cuda.runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)
            stream.synchronize()
