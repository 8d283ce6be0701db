"""Whole sessions of processes brought to a standstill between their turns, so that nothing of theirs uses a core."""

import os
import signal
from collections.abc import Collection
from pathlib import Path


def stop(session_ids: Collection[int]) -> None:
    """Stop every process of these sessions, where it is."""
    _signal(session_ids, signal.SIGSTOP)


def go_on(session_ids: Collection[int]) -> None:
    """Let every process of these sessions go on; those that were not stopped notice nothing."""
    _signal(session_ids, signal.SIGCONT)


def _signal(session_ids: Collection[int], number: signal.Signals) -> None:
    for process_id in _processes_of(session_ids):
        try:
            os.kill(process_id, number)
        except ProcessLookupError:  # it has just ended
            continue


def _processes_of(session_ids: Collection[int]) -> list[int]:
    """Return the processes of these sessions: children have groups of their own in some libraries."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before it may hold spaces
        except OSError:
            continue
        if int(fields[3]) in session_ids:
            found.append(int(folder.name))
    return found
