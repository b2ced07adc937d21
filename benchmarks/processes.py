"""The CPU time of the processes of a server."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SESSION, _USER, _SYSTEM = 3, 11, 12  # fields of /proc/PID/stat behind the name; see proc(5)


def session_seconds(session: int) -> float:
    """Return the CPU time so far, in seconds, of all processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[_USER]) + int(fields[_SYSTEM]) if int(fields[_SESSION]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")
