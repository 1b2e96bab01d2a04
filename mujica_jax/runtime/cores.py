"""The number of cores that this process may use."""

import os
from pathlib import Path


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that the process is bound to, and that its container may use.

    `limit` is the file in which Linux states a container's share: microseconds of computing time,
    or "max", and the period in microseconds in which they may be spent.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    if not limit.exists():
        return cores

    allowed_microseconds, period_microseconds = limit.read_text().split()
    if allowed_microseconds == "max":
        return cores
    return max(1, min(cores, int(allowed_microseconds) // int(period_microseconds)))
