"""Walking through scattered memory with a socket, as long as bytes flow."""

import ctypes
import os
import socket

import numpy as np

from kvtransfer import native
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory
from kvtransfer.pieces import IntArray

IOV_MAX = 1024
WAKE_BYTES = 512 * 1024
"""A receiver is woken when so much has come, or all that is left: each time costs as much as copying 200 KB."""
PATIENCE_S = 0.0005
"""How long a thread waits for a socket before it leaves that to the loop: less than waking it again would take."""
_NOTHING = np.empty(64 * 1024, dtype=np.uint8)
_NEVER = Stop()
_ENDED = -1


class Cursor:
    """What is left of a list of buffers that a socket fills or empties from the beginning.

    Args:
        buffers: `[num_buffers, 2] int64`: address and bytes of each, as the kernel wants them (`iovec`).
        owner: kept, so that the memory stays where it is.
    """

    def __init__(self, buffers: IntArray, owner: object) -> None:
        self.num_bytes = int(buffers[:, 1].sum())
        self._buffers = np.ascontiguousarray(buffers, dtype=np.int64)
        self._owner = owner

    @classmethod
    def over(cls, memory: Memory, offsets: IntArray, sizes: IntArray) -> "Cursor":
        """Return a cursor over ranges of a pool."""
        return cls(np.stack([memory.address + offsets, sizes], axis=1), memory)

    @classmethod
    def of(cls, *buffers: memoryview) -> "Cursor":
        """Return a cursor over whole buffers."""
        memories = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        return cls(np.array([(memory.ctypes.data, memory.nbytes) for memory in memories]), memories)

    @classmethod
    def of_nothing(cls, num_bytes: int) -> "Cursor":
        """Return a cursor over memory of no meaning, where the bytes of a piece go that nobody wants any more."""
        sizes = np.full(-(-num_bytes // _NOTHING.nbytes), _NOTHING.nbytes)
        sizes[-1] = num_bytes - _NOTHING.nbytes * (len(sizes) - 1)
        return cls(np.stack([np.full(len(sizes), _NOTHING.ctypes.data), sizes], axis=1), _NOTHING)

    def before(self, cursor: "Cursor") -> "Cursor":
        """Return a cursor over what is left of this one, then of another."""
        return Cursor(np.concatenate([self._buffers, cursor._buffers]), (self, cursor))

    def send(self, sock: socket.socket) -> None:
        """Send for as long as the socket takes something within `PATIENCE_S`. Blocks; releases the GIL.

        Raises:
            OSError: the connection is broken.
        """
        self._flow(sock, _NEVER, is_sending=True)

    def receive(self, sock: socket.socket, stop: Stop) -> None:
        """Receive for as long as something comes within `PATIENCE_S`. Blocks; releases the GIL.

        Raises:
            EOFError: the peer has closed the connection.
            OSError: it is broken.
        """
        self._flow(sock, stop, is_sending=False)

    def _flow(self, sock: socket.socket, stop: Stop, is_sending: bool) -> None:
        if stop.is_set:
            return
        first = int(np.argmax(self._buffers[:, 1] > 0))
        left = self._buffers[first:]
        library = native.library()
        if library is None:
            moved = _flow_once(sock, left, is_sending)
        else:
            error = ctypes.c_int32()
            moved = library.baton_flow(
                sock.fileno(), is_sending, left.ctypes.data, len(left), WAKE_BYTES, round(PATIENCE_S * 1e6),
                stop.address, ctypes.byref(error),
            )  # fmt: skip
            if error.value == _ENDED:
                raise EOFError("it was closed")
            if error.value:
                raise OSError(error.value, os.strerror(error.value))
        self.num_bytes -= moved


def _flow_once(sock: socket.socket, buffers: IntArray, is_sending: bool) -> int:
    """Do what one turn of `baton_flow` does, where there is no compiler; return the bytes moved."""
    window = [(ctypes.c_char * size).from_address(address) for address, size in buffers[:IOV_MAX].tolist()]
    try:
        moved = sock.sendmsg(window) if is_sending else sock.recvmsg_into(window)[0]
    except BlockingIOError:
        return 0
    if not moved:
        raise EOFError("it was closed")
    ends = np.cumsum(buffers[:, 1])
    done = int(np.searchsorted(ends, moved, side="right"))
    if done < len(buffers):
        begin = int(ends[done]) - int(buffers[done, 1])
        buffers[done] += (moved - begin, begin - moved)
    buffers[:done, 1] = 0
    return moved
