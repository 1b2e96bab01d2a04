"""The memory of the host: how much is free, how much was used, and a setting for speed.

The setting is one of the C library and decides how fast JAX trains on a CPU. XLA allocates a
program's temporaries at every call. glibc takes blocks of that size from the kernel and gives them
back at once, so each training step faults in and clears some 100 MB page by page. On a decoder of
width 64 with 16 rows of 256 tokens this took 80 of 160 ms of processor time. If the process keeps
the memory, it is touched once. Entry points that compute on a CPU call this first.
"""

import ctypes
import os
import pathlib
import resource
import sys

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
M_ARENA_MAX = -8
MAX_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc never to return freed memory to the kernel.

    Return False if the C library is another one; nothing is lost then.

    There is one arena, because the heaps of further ones cannot hold blocks above 64 MB. Call this
    before anything else: threads that any library started before have arenas of their own, and
    XLA's threads then share them. (In the tiny world 23,000 pages were then faulted in at every
    step, and none after a call at the start.)
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: MAX_INT, M_TOP_PAD: 256 << 20, M_ARENA_MAX: 1}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())


def available_bytes() -> int:
    """Return the memory that a process can still have without swapping.

    Return all memory if the system does not say.
    """
    file = pathlib.Path("/proc/meminfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
