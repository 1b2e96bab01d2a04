"""The number of cores that this process may use."""

import os
from pathlib import Path


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that both the process's affinity and its container allow.

    `limit` is the file in which Linux states the limit of a container. It holds two numbers: the
    computing time in microseconds (or "max"), and the period in microseconds in which the container
    may use that time.
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
