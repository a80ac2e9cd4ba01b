"""Whether other programs kept the processor busy while something was timed: such times say little about quiet hours.

A kernel that uses all cores loses most where they are shared, so what wins there is not what wins when they are free again.
"""

from __future__ import annotations

import os
import time

SHARE = 0.1  # of the cores in use may be missing before a time counts as disturbed


class Load:
    """From its making on: how many cores other programs use. `pid`: the process that does the timing, this one if None."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self.began = self._now()

    def _now(self) -> tuple[float, float, float]:
        """(clock, seconds that the cores worked for anybody, seconds of them for the process itself)"""
        return time.perf_counter(), _worked(), time.process_time() if self.pid is None else _of(self.pid)

    def others(self) -> float:
        """Cores in use by others on the average; 0 where the system does not say."""
        (t0, all0, own0), (t1, all1, own1) = self.began, self._now()
        return max(0.0, (all1 - all0) - (own1 - own0)) / max(t1 - t0, 1e-3)

    def disturbed(self, threads: int) -> bool:
        """Did others leave fewer cores than `threads` need?"""
        return cores() - self.others() < threads * (1 - SHARE)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _worked() -> float:
    """Seconds that the cores of this process have worked since the system started (Linux's proc(5)); 0 elsewhere."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        own = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        total = 0
        with open("/proc/stat") as f:
            for line in f:
                name, *fields = line.split()
                if name in own:
                    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, fields[:7])
                    total += user + nice + system + irq + soft
        return total / ticks
    except (OSError, ValueError, AttributeError):
        return 0.0


def _of(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
