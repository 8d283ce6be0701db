"""Two TAP devices joined by a delay, and losses: what `netem` does in kernels that have it.

`python -m loadtest.bench.delay_line TAP_A TAP_B DELAY_MS LOSS`, in the network namespace that is to have the devices.
Prints a line when they exist; ends with its standard input.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
IFF_TAP_NO_HEADER = 0x0002 | 0x1000
FRAME_BYTES_MAX = 65536
FRAMES_MAX = 20_000
"""Under way in one direction; what comes beyond is dropped, as a router would."""
BURST = 64


def open_tap(name: str) -> int:
    """Create a TAP device and return its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_HEADER))
    return fd


def carry(ends: tuple[int, int], delay_s: float, loss: float, stop_fd: int) -> None:
    """Hand each frame that comes out of one end into the other one, `delay_s` later, until `stop_fd` can be read.

    A share `loss` of them, drawn with the same seed each time, is forgotten.
    """
    rng = random.Random(17)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    while True:
        due = min((queue[0][0] for queue in under_way.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([*ends, stop_fd], [], [], wait)
        if stop_fd in ready:
            return
        now = time.monotonic()
        for end in ready:
            _take(end, under_way[end], now + delay_s, lambda: rng.random() < loss)
        for end, queue in under_way.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # the device's queue is full, or it is down: the frame is lost
                    os.write(other[end], queue.popleft()[1])


def _take(end: int, queue: deque[tuple[float, bytes]], due: float, is_lost: Callable[[], bool]) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(BURST):
            frame = os.read(end, FRAME_BYTES_MAX)
            if len(queue) < FRAMES_MAX and not is_lost():
                queue.append((due, frame))


def main() -> None:
    """Run until standard input ends."""
    taps = sys.argv[1], sys.argv[2]
    ends = open_tap(taps[0]), open_tap(taps[1])
    print("up", flush=True)  # noqa: T201  # to whoever started this process
    carry(ends, float(sys.argv[3]) / 1e3, float(sys.argv[4]), sys.stdin.fileno())


if __name__ == "__main__":
    main()
