"""Measure the peak memory of importing a Hugging Face checkpoint, as a multiple of its weights.

    python -m tests.helpers.import_memory DIRECTORY

Prints one line; resident memory counts, mapped files included. Linux only.
"""

import argparse
import sys
import threading
import time
from pathlib import Path

import jax
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.models.weights import load_checkpoint

INTERVAL_SECONDS = 0.002


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


class MemoryWatcher(threading.Thread):
    """Keeps the largest resident memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = resident_bytes()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            time.sleep(INTERVAL_SECONDS)

    def stop(self) -> None:
        self._done.set()
        self.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    directory = parser.parse_args().directory
    jax.numpy.zeros(1)  # the runtime's own memory belongs to the baseline
    before = resident_bytes()
    watcher = MemoryWatcher()
    watcher.start()
    start_time = time.perf_counter()
    try:
        decoder = load_checkpoint(directory)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        watcher.stop()
    seconds = time.perf_counter() - start_time
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))
    print(
        f"{size / 2**20:.1f} MiB of weights, peak {(watcher.peak_bytes - before) / size:.2f} times that, "
        f"{seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
