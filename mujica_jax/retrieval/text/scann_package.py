"""The package ScaNN: its import, and two workarounds for what ScaNN 1.4.2 lacks.

The first workaround can be removed when ScaNN can add rows to an index in chunks. The second can be
removed when its wheels detect the vector instructions of the processor.
"""

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import read_json, write_json
from mujica_jax.retrieval.text.vectors import Embeddings
from mujica_jax.runtime.extras import how_to_install

CHUNK_ROWS = 32_768
MAX_REASON = 200  # characters of an import error that are shown


class ScannMissingError(UserError):
    """ScaNN cannot be imported here.

    `reason` names the platform and the error. `advice` says what to do to have ScaNN. `is_installed`
    is true for a ScaNN that does not fit the other packages.
    """

    def __init__(self, reason: str, *, is_installed: bool) -> None:
        advice = _where_scann_works(is_installed)
        super().__init__(
            f"{reason}: use --kind exact, which searches on any platform (approximately on an "
            f"accelerator with --recall-target 0.95), or {advice}"
        )
        self.reason = reason
        self.advice = advice


def package() -> Any:
    """Return the module with ScaNN's builder and searchers.

    Raises ScannMissingError if it cannot be imported.
    """
    # TensorFlow reports GPUs and instructions that it does not find.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        from scann.scann_ops.py import scann_ops_pybind
    # Not only ImportError: beside another TensorFlow it fails with an error of TensorFlow's own.
    except Exception as error:
        message = " ".join(str(error).split())[:MAX_REASON]
        raise ScannMissingError(
            f"ScaNN cannot be imported on {_platform()} ({message})",
            is_installed=not isinstance(error, ModuleNotFoundError),
        ) from error

    for kernels in usable_kernels():
        kernels_allowed(scann_ops_pybind, kernels).value = True
    return scann_ops_pybind


def serialize(searcher: Any, folder: Path) -> None:
    """Write a searcher's files. Raise OSError where ScaNN cannot write."""
    try:
        searcher.serialize(str(folder), relative_path=True)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _platform() -> str:
    """Return the name of the system, the processor and Python's version."""
    return (
        f"{platform.system()} {platform.machine()} with Python "
        f"{sys.version_info.major}.{sys.version_info.minor}"
    )


def _where_scann_works(is_installed: bool) -> str:
    """Return what the user can do to have ScaNN.

    A platform that has wheels needs the package, or releases of others that work with it. On any
    other platform there is no ScaNN.
    """
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        advice = how_to_install("scann")
        if is_installed:
            advice += ", with the TensorFlow of the extra `tfds` or with none"
        return advice
    return "build and search the index on Linux x86-64, for which ScaNN has wheels"


# ---- Workaround 1: an index written in chunks ----
#
# ScaNN's builder takes float32 of all rows and copies them. A large corpus needs more memory for that than
# a host has. So this section writes the files that ScaNN's loader reads, chunk after chunk. Their names,
# types and layout are private to ScaNN 1.4.2, and so is the list of assets that its loader is given. A
# test compares the files with those of ScaNN's own builder.

# Files with a row for each passage.
HASHES = "hashed_dataset.npy"
PARTITIONS = "datapoint_to_token.npy"
EIGHT_BITS = "int8_dataset.npy"

MULTIPLIERS = "int8_multipliers.npy"  # [dimension]
MAX_INTEGER = 127
CHUNK = "chunk.npy"
# The assets of a chunk, as ScaNN's loader reads them. A codebook and partitions are there, so it
# computes codes and nothing else.
CHUNK_ASSETS = """
assets { asset_type: AH_CENTERS asset_path: "ah_codebook.pb" }
assets { asset_type: PARTITIONER asset_path: "serialized_partitioner.pb" }
assets { asset_type: DATASET_NPY asset_path: "chunk.npy" }
"""


def hash_rows(embeddings: Embeddings, folder: Path, on_rows: Callable[[int], None]) -> None:
    """Write the codes, partitions and 8-bit vectors of all rows that are not written yet.

    A chunk counts once its bytes are on disk and `hashed.json` says so.
    """
    progress_file = folder / "hashed.json"
    rows_done = read_json(progress_file)["rows"] if progress_file.exists() else 0
    multipliers = np.load(folder / "trained" / MULTIPLIERS)
    on_rows(rows_done)
    for start, rows in embeddings.chunks(CHUNK_ROWS, rows_done):
        arrays = _hash_chunk(rows, folder)
        arrays[EIGHT_BITS] = np.rint(rows * multipliers).astype(np.int8)
        for name, values in arrays.items():
            _write_rows(folder / "index" / name, values, start, total_rows=len(embeddings))
        write_json(progress_file, {"rows": start + len(rows)})
        on_rows(start + len(rows))


def _hash_chunk(rows: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Return the codes and partitions of some rows, by file name.

    ScaNN computes them with the trained codebook and partitions when it loads the rows.
    """
    chunk_file = folder / "trained" / CHUNK
    hashed_folder = folder / "chunk"
    shutil.rmtree(hashed_folder, ignore_errors=True)
    hashed_folder.mkdir()
    np.save(chunk_file, rows)

    scann = package()
    trained_folder = str(chunk_file.parent)
    searcher = scann.ScannSearcher(scann.scann_pybind.ScannNumpy(trained_folder, CHUNK_ASSETS))
    serialize(searcher, hashed_folder)
    arrays = {name: np.load(hashed_folder / name) for name in (HASHES, PARTITIONS)}

    chunk_file.unlink()
    shutil.rmtree(hashed_folder)
    return arrays


def _write_rows(path: Path, rows: np.ndarray, start: int, total_rows: int) -> None:
    """Write some rows of a .npy file, which has its full size on disk from the first rows on.

    Raise OSError where the disk is full.
    """
    is_new = start == 0
    shape = (total_rows, *rows.shape[1:])
    file = np.lib.format.open_memmap(path, "w+" if is_new else "r+", rows.dtype, shape)
    if is_new:
        # A page that is written and has no place on the disk would end the process by a signal.
        with open(path, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    file[start : start + len(rows)] = rows
    file.flush()


# ---- Workaround 2: ScaNN's kernels for vector instructions ----
#
# Two variables of ScaNN's C++ library say which kernels it may use. They are meant to be set at the start,
# by what the processor has. In the wheels of 1.4 they are always false: ScaNN then uses SSE4, and a search
# takes 1.6 to 2 times as long. So this section sets the variables, by their mangled symbols.

# The instructions that each kind of kernel is compiled for, as Linux names them.
KERNELS = {
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2"},
    "avx512": {
        "avx2",
        "fma",
        "f16c",
        "bmi1",
        "bmi2",
        "avx512f",
        "avx512dq",
        "avx512bw",
        "avx512cd",
        "avx512vl",
    },
}


def kernels_allowed(scann: Any, kernels: str) -> ctypes.c_bool:
    """Return ScaNN's own variable, read at every search and when rows are laid out in memory.

    A ScaNN without it gets a variable that nothing reads.
    """
    name = f"should_use_{kernels}"
    symbol = f"_ZN14research_scann14flags_internal{len(name)}{name}E"
    try:
        library = ctypes.CDLL(scann.scann_pybind.__file__)
        return ctypes.c_bool.in_dll(library, symbol)
    except ValueError:
        return ctypes.c_bool()


def usable_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the names in KERNELS that processor and system can run."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags_line = next((line for line in lines if line.startswith("flags")), "")
    instructions = set(flags_line.split())
    return [kernels for kernels, needed in KERNELS.items() if needed <= instructions]
