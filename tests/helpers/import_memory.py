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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    directory = parser.parse_args().directory
    jax.numpy.zeros(1)  # the runtime's own memory belongs to the baseline
    before = peak = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(INTERVAL_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        decoder = load_checkpoint(directory)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        done.set()
        watcher.join()
    seconds = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))
    print(
        f"{size / 2**20:.1f} MiB of weights, peak {(peak - before) / size:.2f} times that, "
        f"{seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
