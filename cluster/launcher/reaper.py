"""Cleans up after a `baton serve` that was killed: `python -m cluster.launcher.reaper FOLDER`, started by ray_cluster.

It waits for the end of its standard input, which comes when its parent ends in whatever way, then kills what is left of
the parent's Ray and removes its folder. Ray's own processes notice too, but some take a minute.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from cluster.launcher import processes

_WAIT_S = 10.0


class Reaper:
    """The parent's side: one reaper process for one Ray folder."""

    def __init__(self, folder: Path) -> None:
        # In a session of its own, so that signals for the process group of its parent do not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """Of the reaper process."""
        return self._process.pid

    def reap(self) -> None:
        """Have it clean up now, and wait for it.

        Raises:
            subprocess.TimeoutExpired: it did not end.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_WAIT_S)


def main() -> None:
    """Wait for the parent's end and clean up."""
    folder = Path(sys.argv[1])
    sys.stdin.read()
    processes.kill_session(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
