"""Vectors like the embeddings of an encyclopaedia, and queries near them, for
`benchmarks/retrieval.py`.

All-MiniLM-L6-v2 was looked at on the 6,119 passages of 2WikiMultihopQA: the variances of the
principal axes fall as i**-0.79, the mean has length 0.26, and a passage's nearest neighbour lies at
a cosine of 0.58. Here half of a vector's variance is its cluster's (a hundred each on average, of
lognormal sizes) and half its own. All have length 1 and are rounded to bfloat16. A query lies at a
cosine of about 0.75 from some row.

    FOLDER/vectors.npy          [rows, 384] float32, rounded
    FOLDER/embeddings.bfloat16  the same as an index keeps them
    FOLDER/queries.npy          [queries, 384] float32
    FOLDER/exact.npy            [queries, 10], the rows with the largest products, best first
"""

from pathlib import Path

import ml_dtypes
import numpy as np

DIMENSION = 384
QUERIES = 2000
K = 10
ROWS_A_CLUSTER = 100
OF_CLUSTER = 0.5
MEAN_LENGTH = 0.27
AXIS_POWER = -0.8
QUERY_COSINE = 0.75
BLOCK_ROWS = 50_000  # at once


def make_vectors(folder: Path, rows: int, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    axes = np.linalg.qr(draw.normal(size=(DIMENSION, DIMENSION)))[0]
    spread = np.arange(1, DIMENSION + 1) ** (AXIS_POWER / 2)
    spread = (axes * (spread / np.linalg.norm(spread))).T.astype(np.float32)
    mean = MEAN_LENGTH * axes[:, 0].astype(np.float32)

    def drawn(count: int) -> np.ndarray:
        return draw.standard_normal((count, DIMENSION), dtype=np.float32) @ spread

    sizes = draw.lognormal(0, 1, rows // ROWS_A_CLUSTER)
    centres = drawn(len(sizes))
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (rows, DIMENSION))
    with open(folder / "embeddings.bfloat16", "wb") as file:
        for start in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - start)
            clusters = draw.choice(len(centres), count, p=sizes / sizes.sum())
            own = (
                mean
                + np.sqrt(OF_CLUSTER) * centres[clusters]
                + np.sqrt(1 - OF_CLUSTER) * drawn(count)
            )
            rounded = _of_length_1(own).astype(ml_dtypes.bfloat16)
            vectors[start : start + count] = rounded
            file.write(rounded.tobytes())
    beside = vectors[draw.choice(rows, QUERIES, replace=False)]
    queries = _of_length_1(QUERY_COSINE * beside + np.sqrt(1 - QUERY_COSINE**2) * drawn(QUERIES))
    save_queries(folder, queries, vectors)


def save_queries(folder: Path, queries: np.ndarray, vectors: np.ndarray) -> None:
    """Save queries, with the rows that are nearest to each."""
    np.save(folder / "queries.npy", queries)
    np.save(folder / "exact.npy", _nearest(queries, vectors))


def recall(positions: np.ndarray, exact: np.ndarray) -> float:
    """Return the share of the exact ten best among `positions`, which may have fewer queries."""
    shares = [
        len(set(ours) & set(theirs)) / K for ours, theirs in zip(positions, exact, strict=False)
    ]
    return float(np.mean(shares))


def _nearest(queries: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    scores = []
    positions = []
    for start in range(0, len(vectors), BLOCK_ROWS):
        of_block = queries @ vectors[start : start + BLOCK_ROWS].T
        best = np.argpartition(-of_block, K, axis=1)[:, :K]
        scores.append(np.take_along_axis(of_block, best, 1))
        positions.append(best + start)
    order = np.argsort(-np.concatenate(scores, 1), axis=1)[:, :K]
    return np.take_along_axis(np.concatenate(positions, 1), order, 1)


def _of_length_1(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
