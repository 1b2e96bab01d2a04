"""Maximum-inner-product search by ScaNN (Guo et al., 2020), on the host.

ScaNN uses a tree of partitions, asymmetric hashing and exact reordering. For each query it scores
the nearest partitions by four-bit hashes of two dimensions each, and the best of these again by
vectors of eight bits. The parameters follow from the size of the corpus and stand in the index's
manifest. In a small corpus every passage is scored. A saved index is loaded without building
anything.

The files are written in chunks, so the embeddings of a corpus are never in memory as a whole.
ScaNN's own builder takes float32 of all rows and copies them, which is more than four times the
bytes of bfloat16. Here it gets a sample and learns partitions and codebook from it. It then assigns
and hashes chunk after chunk, as it does with all rows at once. The results are joined in the files
that its loader reads. A test compares them with those of its own builder.

    FOLDER/trained/          what ScaNN learned from the sample
    FOLDER/trained.json      written after it: the parameters
    FOLDER/index/            hashed_dataset.npy [rows, blocks] uint8, a code of four bits a block;
                             datapoint_to_token.npy [rows] int32, the partition;
                             int8_dataset.npy [rows, dimension], round(x * multiplier);
                             and the trained files
    FOLDER/hashed.json       how many rows are done: a killed build continues after them

The sample takes the most memory, a few times its size in float32. ScaNN has wheels only for Linux
on x86-64. It is imported when it is used, because it brings TensorFlow.
"""

import ctypes
import dataclasses
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import read_json, rebuild_advice, write_json
from mujica_jax.retrieval.text.scann_package import (
    CHUNK_ROWS,
    EIGHT_BITS,
    HASHES,
    MAX_INTEGER,
    MULTIPLIERS,
    PARTITIONS,
    hash_rows,
    package,
    serialize,
)
from mujica_jax.retrieval.text.vectors import Embeddings
from mujica_jax.storage.local import sync

# A corpus with fewer rows has no tree and no hashes. Trained on so few rows, they would cost recall
# and save no time.
MIN_ROWS = 1024
# The embeddings of questions are far from those of passages. With 1,900 of 6,119 rows scored,
# recall@5 is 3.1 points lower. With 3,100 rows it is 0.3 points lower.
MIN_ROWS_SCORED = 16_384
# Share of the partitions that a search looks into.
SHARE_SEARCHED = 0.3
# Smallest number of rows in the sample that an index is trained on. Sample and partitions take the
# most memory while an index is built.
TRAINING_ROWS = 50_000
# Number of rows in the sample for each leaf, which is a partition.
TRAINING_ROWS_A_LEAF = 64
# Number of candidates that are scored again, for each result of a search.
REORDERED_OF_K = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannParameters:
    """The parameters that an index is built with."""

    # Number of partitions. 0: all rows are scored, without hashes.
    leaves: int
    # Number of partitions that a search looks into.
    leaves_searched: int
    # Whether the centres of partitions have length 1.
    spherical: bool = False
    # Number of dimensions that share a code of four bits.
    dimensions_a_block: int = 2
    # ScaNN's threshold for anisotropic hashing. An error along a vector changes inner products, so
    # it weighs more than an error across the vector.
    anisotropic_threshold: float = 0.2
    # Number of rows in the sample that the index is trained on.
    training_rows: int
    # Smallest number of candidates that are scored again.
    reordered: int


def parameters_for(rows: int, *, of_length_1: bool) -> ScannParameters:
    """Return the parameters for a corpus with this many rows.

    The index has about sqrt(rows) partitions of sqrt(rows) rows. A search looks into three tenths
    of them, or into more if these hold fewer than MIN_ROWS_SCORED rows.

    The nearest partitions are those whose centres have the largest products with the query. The
    wider a partition is spread, the shorter is the mean of its embeddings. If all embeddings have
    length 1, the length of this mean says nothing about the passages. Such partitions therefore
    have centres of length 1 too.
    """
    if rows < MIN_ROWS:
        return ScannParameters(leaves=0, leaves_searched=0, training_rows=0, reordered=0)

    leaves = round(math.sqrt(rows))
    leaves_searched = max(round(SHARE_SEARCHED * leaves), MIN_ROWS_SCORED * leaves // rows)
    training_rows = max(TRAINING_ROWS, TRAINING_ROWS_A_LEAF * leaves)
    return ScannParameters(
        leaves=leaves,
        leaves_searched=min(leaves, leaves_searched),
        spherical=of_length_1,
        training_rows=min(rows, training_rows),
        reordered=100,
    )


class ScannSearch:
    """A built index in memory."""

    def __init__(self, searcher: Any, rows: int, parameters: ScannParameters) -> None:
        self._searcher = searcher
        self._rows = rows
        self.parameters = parameters

    @classmethod
    def load(cls, folder: Path, rows: int, parameters: ScannParameters) -> "ScannSearch":
        """Load an index without the package's own loader.

        That loader would read a pickle that lies in the folder.
        """
        scann = package()
        try:
            assets = (folder / "scann_assets.pbtxt").read_text()
            searcher = scann.ScannSearcher(scann.scann_pybind.ScannNumpy(str(folder), assets))
            searcher.set_num_threads(len(os.sched_getaffinity(0)))
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{folder} cannot be loaded by ScaNN ({error}): {rebuild_advice(folder.parent)}"
            ) from error

        # The allocator would keep what loading needed: 4% of the index.
        ctypes.CDLL(None).malloc_trim(0)
        return cls(searcher, rows, parameters)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and positions of the k best rows of each query, both [queries, k].

        `queries` are float32 [queries, dimension]. The best row comes first; -1 is padding.
        """
        if not len(queries):
            return np.empty((0, k), np.float32), np.empty((0, k), np.int64)

        num_candidates = None  # without partitions all rows are scored
        leaves_searched = None
        if self.parameters.leaves:
            num_candidates = min(self._rows, max(self.parameters.reordered, REORDERED_OF_K * k))
            leaves_searched = self.parameters.leaves_searched
        positions, products = self._searcher.search_batched_parallel(
            np.ascontiguousarray(queries, np.float32),
            final_num_neighbors=k,
            pre_reorder_num_neighbors=num_candidates,
            leaves_to_search=leaves_searched,
        )

        # Behind its results ScaNN fills a row with products that are not finite.
        is_result = np.isfinite(products)
        scores = np.where(is_result, products, np.float32(-np.inf))
        return scores, np.where(is_result, positions.astype(np.int64), -1)


def write_scann(
    embeddings: Embeddings,
    parameters: ScannParameters,
    folder: Path,
    on_rows: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write the whole index into a folder inside `folder`, and return that.

    It continues what an earlier start wrote there, if that had the same parameters.
    """
    index = folder / "index"
    trained = folder / "trained"
    description = {
        **dataclasses.asdict(parameters),
        "rows": len(embeddings),
        "dimension": embeddings.dimension,
    }
    description_file = folder / "trained.json"

    # Train on a sample; a small corpus is stored whole and scored by brute force.
    if not description_file.exists() or read_json(description_file) != description:
        shutil.rmtree(folder, ignore_errors=True)
        trained.mkdir(parents=True)
        index.mkdir()
        if parameters.leaves:
            _train(embeddings, parameters, trained)
        else:
            builder = package().builder(embeddings.float32(), 1, "dot_product")
            serialize(builder.score_brute_force().build(), trained)
        for path in (*trained.iterdir(), trained):
            sync(path)
        write_json(description_file, description)

    # Hash all rows, chunk after chunk.
    if parameters.leaves:
        hash_rows(embeddings, folder, on_rows)

    # Put the trained files beside the hashes.
    for path in trained.iterdir():
        shutil.copyfile(path, index / path.name)
    return index


def _train(embeddings: Embeddings, parameters: ScannParameters, folder: Path) -> None:
    """Write the partitions and the codebook of a sample, and the multipliers of all rows."""
    # Draw the sample, and find the largest value of each dimension on the way.
    sample_positions = np.random.default_rng(0).choice(
        len(embeddings), parameters.training_rows, replace=False
    )
    sample_positions.sort()
    sample = np.empty((len(sample_positions), embeddings.dimension), np.float32)
    largest = np.zeros(embeddings.dimension, np.float32)
    for start, rows in embeddings.chunks(CHUNK_ROWS):
        first, last = np.searchsorted(sample_positions, (start, start + len(rows)))
        sample[first:last] = rows[sample_positions[first:last] - start]
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)

    # Train partitions and codebook.
    builder = package().builder(sample, 1, "dot_product")
    builder = builder.tree(
        parameters.leaves,
        parameters.leaves_searched,
        training_sample_size=len(sample),
        spherical=parameters.spherical,
        # by k-means++, which draws the same centres each time; the other way does not
        random_init=False,
    )
    builder = builder.score_ah(
        parameters.dimensions_a_block,
        anisotropic_quantization_threshold=parameters.anisotropic_threshold,
        training_sample_size=len(sample),
    )
    builder = builder.reorder(parameters.reordered, quantize=True)
    serialize(builder.build(), folder)

    # The rows of the sample are not those of the index.
    for name in (HASHES, PARTITIONS, EIGHT_BITS):
        (folder / name).unlink()
    largest[largest == 0] = MAX_INTEGER
    np.save(folder / MULTIPLIERS, MAX_INTEGER / largest)
