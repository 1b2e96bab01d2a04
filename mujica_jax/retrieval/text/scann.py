"""Maximum-inner-product search by ScaNN (Guo et al., 2020), on the host: a tree of partitions,
asymmetric hashing, exact reordering.

Of every query the nearest partitions are scored by four-bit hashes of two dimensions each, and the
best of these again by vectors of eight bits. The parameters follow from the size of the corpus and
stand in the index's manifest; a small corpus is scored whole. A saved index is loaded without
building anything.

Its files are written in chunks, so that the embeddings of a corpus are never in memory as a whole.
ScaNN's own builder takes float32 of all rows and copies them: four times the bytes of bfloat16 and
more. Here it is given a sample, and partitions and codebook come of that. Under these it then
assigns and hashes chunk after chunk, as it does with all rows at once, and what it finds is put
together in the files that its loader reads; a test compares them with those of its own builder.

    FOLDER/trained/          what ScaNN learned from the sample
    FOLDER/trained.json      written after it: the parameters
    FOLDER/index/            hashed_dataset.npy [rows, blocks] uint8, a code of four bits a block;
                             datapoint_to_token.npy [rows] int32, the partition;
                             int8_dataset.npy [rows, dimension], round(x * multiplier); and the trained files
    FOLDER/hashed.json       how many rows are there: a killed build goes on behind them

The most memory is taken by the sample, a few times in float32. ScaNN has wheels for Linux on x86-64
alone. It is imported when it is used: it brings TensorFlow.
"""

import ctypes
import dataclasses
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import again, read_json, write_json
from mujica_jax.retrieval.text.embeddings import Embeddings
from mujica_jax.storage.local import sync

MIN_ROWS = 1024  # below, training a tree and hashes on so little would cost recall and save nothing
# Questions lie apart from passages: of 6,119 passages 1,900 scored rows cost 3.1 points of
# recall@5, 3,100 rows cost 0.3.
MIN_ROWS_SCORED = 16_384
SHARE_SEARCHED = 0.3  # of the partitions
# At least; sample and partitions are what takes memory while an index is built.
TRAINING_ROWS, TRAINING_ROWS_A_LEAF = 50_000, 64
REORDERED_OF_K = 10  # candidates of a search for each result
# What ScaNN's kernels for vector instructions are compiled for, as Linux names it. Two variables
# tell ScaNN which of them it may use. Its start sets them by what the processor has, but in the
# wheels of 1.4 the answer is always no: they use SSE4 everywhere, and a search takes 1.6 to 2 times
# as long. So they are set here.
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
CHUNK_ROWS = 32_768
REQUIREMENT = "scann==1.4.2"  # as requirements.txt has it
MAX_REASON = 200  # characters of an import error that are shown
MAX_INTEGER = 127
HASHES, PARTITIONS, EIGHT_BITS = (
    "hashed_dataset.npy",
    "datapoint_to_token.npy",
    "int8_dataset.npy",
)  # a row a passage
MULTIPLIERS = "int8_multipliers.npy"  # [dimension]
CHUNK = "chunk.npy"
# What ScaNN's loader is told of a chunk: with a codebook and partitions there, it computes codes
# and nothing else.
CHUNK_ASSETS = """
assets { asset_type: AH_CENTERS asset_path: "ah_codebook.pb" }
assets { asset_type: PARTITIONER asset_path: "serialized_partitioner.pb" }
assets { asset_type: DATASET_NPY asset_path: "chunk.npy" }
"""


class ScannMissing(UserError):
    """ScaNN cannot be imported here. `reason` names the platform and the error without saying what
    to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: use --kind exact, which searches on any platform (approximately on an "
            f"accelerator with --recall-target 0.95), or {_where_scann_works()}"
        )
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannParameters:
    """What an index is built with."""

    leaves: int  # partitions; 0: all rows are scored, without hashes
    leaves_searched: int
    spherical: bool = False  # the centres of partitions have length 1
    dimensions_a_block: int = 2  # that share four bits
    # Weighs the error along a vector, which changes inner products, above the error across it.
    anisotropic_threshold: float = 0.2
    training_rows: int
    reordered: int  # candidates that are scored again, at least


def parameters_for(rows: int, *, of_length_1: bool) -> ScannParameters:
    """About sqrt(rows) partitions of sqrt(rows) rows; three tenths of them are searched, and so
    many that enough rows are scored.

    The nearest partitions are those whose centres have the largest products with the query. The
    mean of a partition is the shorter the wider the partition is spread, so among embeddings of
    length 1 its length would say nothing about its passages: there the centres have length 1 as
    well.
    """
    if rows < MIN_ROWS:
        return ScannParameters(leaves=0, leaves_searched=0, training_rows=0, reordered=0)
    leaves = round(math.sqrt(rows))
    return ScannParameters(
        leaves=leaves,
        leaves_searched=min(
            leaves, max(round(SHARE_SEARCHED * leaves), MIN_ROWS_SCORED * leaves // rows)
        ),
        spherical=of_length_1,
        training_rows=min(rows, max(TRAINING_ROWS, TRAINING_ROWS_A_LEAF * leaves)),
        reordered=100,
    )


class ScannSearch:
    """A built index in memory."""

    def __init__(self, searcher: Any, rows: int, parameters: ScannParameters) -> None:
        self._searcher, self._rows, self.parameters = searcher, rows, parameters

    @classmethod
    def load(cls, folder: Path, rows: int, parameters: ScannParameters) -> "ScannSearch":
        """Without the package's own loader, which would read a pickle that lies there."""
        scann = package()
        try:
            assets = (folder / "scann_assets.pbtxt").read_text()
            searcher = scann.ScannSearcher(scann.scann_pybind.ScannNumpy(str(folder), assets))
            searcher.set_num_threads(len(os.sched_getaffinity(0)))
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{folder} cannot be loaded by ScaNN ({error}): {again(folder.parent)}"
            ) from error
        ctypes.CDLL(None).malloc_trim(
            0
        )  # what loading needed stays with the allocator otherwise: 4% of the index
        return cls(searcher, rows, parameters)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [queries, dimension] -> scores and positions, both [queries, k], best first; -1
        is padding."""
        if not len(queries):
            return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
        searched: dict[str, int] = {"final_num_neighbors": k}
        if self.parameters.leaves:
            searched["pre_reorder_num_neighbors"] = min(
                self._rows, max(self.parameters.reordered, REORDERED_OF_K * k)
            )
            searched["leaves_to_search"] = self.parameters.leaves_searched
        found, products = self._searcher.search_batched_parallel(
            np.ascontiguousarray(queries, np.float32), **searched
        )
        kept = np.isfinite(products)  # the others are places without a result, behind the results
        return np.where(kept, products, np.float32(-np.inf)), np.where(
            kept, found.astype(np.int64), -1
        )


def write_scann(
    embeddings: Embeddings,
    parameters: ScannParameters,
    folder: Path,
    on_rows: Callable[[int], None] = lambda done: None,
) -> Path:
    """The folder with the whole index, inside `folder`. Goes on with what an earlier start left
    there, if that had the same parameters.
    """
    index, trained = folder / "index", folder / "trained"
    about = dataclasses.asdict(parameters) | {
        "rows": len(embeddings),
        "dimension": embeddings.dimension,
    }
    if not (folder / "trained.json").exists() or read_json(folder / "trained.json") != about:
        shutil.rmtree(folder, ignore_errors=True)
        trained.mkdir(parents=True)
        index.mkdir()
        if parameters.leaves:
            _train(embeddings, parameters, trained)
        else:
            made = package().builder(embeddings.float32(), 1, "dot_product").score_brute_force()
            _serialize(made.build(), trained)
        for path in (*trained.iterdir(), trained):
            sync(path)
        write_json(folder / "trained.json", about)
    if parameters.leaves:
        _hash(embeddings, parameters, folder, on_rows)
    for path in trained.iterdir():
        shutil.copyfile(path, index / path.name)
    return index


def _train(embeddings: Embeddings, parameters: ScannParameters, folder: Path) -> None:
    """Partitions and codebook of a sample, and the multipliers of all rows."""
    chosen = np.random.default_rng(0).choice(
        len(embeddings), parameters.training_rows, replace=False
    )
    chosen.sort()
    sample = np.empty((len(chosen), embeddings.dimension), np.float32)
    largest = np.zeros(embeddings.dimension, np.float32)
    for start, rows in embeddings.chunks(CHUNK_ROWS):
        first, last = np.searchsorted(chosen, (start, start + len(rows)))
        sample[first:last] = rows[chosen[first:last] - start]
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
    made = package().builder(sample, 1, "dot_product")
    made = made.tree(
        parameters.leaves,
        parameters.leaves_searched,
        training_sample_size=len(sample),
        spherical=parameters.spherical,
        # by k-means++, which draws the same centres each time; the other way does not
        random_init=False,
    )
    made = made.score_ah(
        parameters.dimensions_a_block,
        anisotropic_quantization_threshold=parameters.anisotropic_threshold,
        training_sample_size=len(sample),
    )
    _serialize(made.reorder(parameters.reordered, quantize=True).build(), folder)
    for name in (HASHES, PARTITIONS, EIGHT_BITS):  # of the sample
        (folder / name).unlink()
    largest[largest == 0] = MAX_INTEGER
    np.save(folder / MULTIPLIERS, MAX_INTEGER / largest)


def _hash(
    embeddings: Embeddings,
    parameters: ScannParameters,
    folder: Path,
    on_rows: Callable[[int], None],
) -> None:
    """A chunk counts once its bytes are on disk and `hashed.json` says so."""
    done = read_json(folder / "hashed.json")["rows"] if (folder / "hashed.json").exists() else 0
    multipliers = np.load(folder / "trained" / MULTIPLIERS)
    on_rows(done)
    for start, rows in embeddings.chunks(CHUNK_ROWS, done):
        found = _hashed(rows, folder) | {EIGHT_BITS: np.rint(rows * multipliers).astype(np.int8)}
        for name, values in found.items():
            _put(folder / "index" / name, values, start, len(embeddings))
        write_json(folder / "hashed.json", {"rows": start + len(rows)})
        on_rows(start + len(rows))


def _hashed(rows: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Codes and partitions of some rows, by ScaNN under what it has learned."""
    given, made = folder / "trained" / CHUNK, folder / "chunk"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    np.save(given, rows)
    searcher = package().ScannSearcher(
        package().scann_pybind.ScannNumpy(str(given.parent), CHUNK_ASSETS)
    )
    _serialize(searcher, made)
    found = {name: np.load(made / name) for name in (HASHES, PARTITIONS)}
    given.unlink()
    shutil.rmtree(made)
    return found


def _serialize(searcher: Any, folder: Path) -> None:
    """Raises OSError where ScaNN cannot write."""
    try:
        searcher.serialize(str(folder), relative_path=True)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _put(path: Path, rows: np.ndarray, start: int, of: int) -> None:
    """Some rows of a .npy file, which has its full size on the disk from the first ones on. Raises
    OSError where that is full.
    """
    file = np.lib.format.open_memmap(
        path, "r+" if start else "w+", rows.dtype, (of, *rows.shape[1:])
    )
    if (
        not start
    ):  # a page that is written and has no place on the disk would end the process by a signal
        with open(path, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    file[start : start + len(rows)] = rows
    file.flush()


def package() -> Any:
    """Return the module with ScaNN's builder and searchers. Raise ScannMissing where it cannot be
    imported."""
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "2"
    )  # TensorFlow speaks of GPUs and instructions it does not find
    try:
        from scann.scann_ops.py import scann_ops_pybind
    # Not only ImportError: beside another TensorFlow it fails with an error of TensorFlow's own.
    except Exception as error:
        message = " ".join(str(error).split())[:MAX_REASON]
        raise ScannMissing(f"ScaNN cannot be imported on {_platform()} ({message})") from error
    for kernels in usable_kernels():
        kernels_allowed(scann_ops_pybind, kernels).value = True
    return scann_ops_pybind


def _platform() -> str:
    return (
        f"{platform.system()} {platform.machine()} with Python "
        f"{sys.version_info.major}.{sys.version_info.minor}"
    )


def _where_scann_works() -> str:
    """Say what makes ScaNN available: a package on a platform that has wheels, and that platform
    elsewhere."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return f"install ScaNN (`pip install {REQUIREMENT} 'tensorflow~=2.20.0'`)"
    return "build and search a ScaNN index on Linux x86-64, for which it has wheels"


def kernels_allowed(scann: Any, kernels: str) -> ctypes.c_bool:
    """ScaNN's own variable, read at every search and when rows are laid out in memory. A ScaNN that
    has none gets one that nobody reads.
    """
    name = f"should_use_{kernels}"
    try:
        library = ctypes.CDLL(scann.scann_pybind.__file__)
        return ctypes.c_bool.in_dll(
            library, f"_ZN14research_scann14flags_internal{len(name)}{name}E"
        )
    except ValueError:
        return ctypes.c_bool()


def usable_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Of KERNELS, those that processor and system can run."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    return [kernels for kernels, needed in KERNELS.items() if needed <= has]
