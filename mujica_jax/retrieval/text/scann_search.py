"""Maximum-inner-product search by ScaNN (Guo et al., 2020), on the host: a tree of partitions, asymmetric hashing,
exact reordering.

Of every query the nearest partitions are scored by four-bit hashes of two dimensions each, and the best of these again
by vectors of eight bits. The parameters follow from the size of the corpus and stand in the index's manifest; a small
corpus is scored whole. A saved index is loaded without building anything.

ScaNN has wheels for Linux on x86-64 alone. It is imported when it is used: it brings TensorFlow.
"""

import ctypes
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import again

MIN_ROWS = 1024  # below, training a tree and hashes on so little would cost recall and save nothing
# Questions lie apart from passages: of 6,119 passages 1,900 scored rows cost 3.1 points of recall@5, 3,100 rows cost
# 0.3.
MIN_ROWS_SCORED = 16_384
SHARE_SEARCHED = 0.3  # of the partitions
# At least; sample and partitions are what takes memory while an index is built.
TRAINING_ROWS, TRAINING_ROWS_A_LEAF = 50_000, 64
REORDERED_OF_K = 10  # candidates of a search for each result
# What ScaNN's kernels for vector instructions are compiled for, as Linux names it. Two variables tell ScaNN which of
# them it may use. Its start sets them by what the processor has, but in the wheels of 1.4 the answer is always no: they
# use SSE4 everywhere, and a search takes 1.6 to 2 times as long. So they are set here.
KERNELS = {
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2"},
    "avx512": {"avx2", "fma", "f16c", "bmi1", "bmi2", "avx512f", "avx512dq", "avx512bw", "avx512cd", "avx512vl"},
}


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
    """About sqrt(rows) partitions of sqrt(rows) rows; three tenths of them are searched, and so many that enough rows
    are scored.

    The nearest partitions are those whose centres have the largest products with the query. The mean of a partition is
    the shorter the wider the partition is spread, so among embeddings of length 1 its length would say nothing about
    its passages: there the centres have length 1 as well.
    """
    if rows < MIN_ROWS:
        return ScannParameters(leaves=0, leaves_searched=0, training_rows=0, reordered=0)
    leaves = round(math.sqrt(rows))
    return ScannParameters(
        leaves=leaves,
        leaves_searched=min(leaves, max(round(SHARE_SEARCHED * leaves), MIN_ROWS_SCORED * leaves // rows)),
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
            raise UserError(f"{folder} cannot be loaded by ScaNN ({error}): {again(folder.parent)}") from error
        ctypes.CDLL(None).malloc_trim(0)  # what loading needed stays with the allocator otherwise: 4% of the index
        return cls(searcher, rows, parameters)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [queries, dimension] -> scores and positions, both [queries, k], best first; -1 is padding."""
        if not len(queries):
            return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
        searched: dict[str, int] = {"final_num_neighbors": k}
        if self.parameters.leaves:
            searched["pre_reorder_num_neighbors"] = min(self._rows, max(self.parameters.reordered, REORDERED_OF_K * k))
            searched["leaves_to_search"] = self.parameters.leaves_searched
        found, products = self._searcher.search_batched_parallel(np.ascontiguousarray(queries, np.float32), **searched)
        kept = np.isfinite(products)  # the others are places without a result, behind the results
        return np.where(kept, products, np.float32(-np.inf)), np.where(kept, found.astype(np.int64), -1)


def package() -> Any:
    """The module with ScaNN's builder and searchers."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow speaks of GPUs and instructions it does not find
    try:
        from scann.scann_ops.py import scann_ops_pybind
    except ImportError as error:
        raise UserError(
            f"ScaNN cannot be imported ({error}); it has wheels for Linux on x86-64: use an index of kind exact "
            "elsewhere"
        ) from error
    for kernels in usable_kernels():
        kernels_allowed(scann_ops_pybind, kernels).value = True
    return scann_ops_pybind


def kernels_allowed(scann: Any, kernels: str) -> ctypes.c_bool:
    """ScaNN's own variable, read at every search and when rows are laid out in memory. A ScaNN that has none gets one
    that nobody reads.
    """
    name = f"should_use_{kernels}"
    try:
        library = ctypes.CDLL(scann.scann_pybind.__file__)
        return ctypes.c_bool.in_dll(library, f"_ZN14research_scann14flags_internal{len(name)}{name}E")
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
