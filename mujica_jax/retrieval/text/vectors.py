"""Embeddings of a corpus on disk, mapped when they are read.

They are written chunk by chunk, so a build that was killed can continue.

embeddings.bfloat16                   [rows, dimension], or
embeddings.int8, embeddings.scales    x = scale * integer, one float32 scale a row: half the bytes,
                                      and off by at most 1/254 of the row's largest value
"""

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import read_json, write_json
from mujica_jax.retrieval.text.corpus import Passage

if TYPE_CHECKING:
    from mujica_jax.retrieval.embedding.embedder import Embedder

Storage = Literal["bfloat16", "int8"]

CHUNK_ROWS = 2048  # embedded, then written: what a kill may cost
PROGRESS = "encoded.json"
SCALES = "embeddings.scales"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings, [rows, dimension], of bfloat16, or of int8 with a scale for each row.

    They are on disk unless a test made them.
    """

    vectors: np.ndarray
    scales: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        return self.vectors.shape[1]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row, its scale included."""
        scale_bytes = 0 if self.scales is None else self.scales.itemsize
        return self.dimension * self.vectors.itemsize + scale_bytes

    def float32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return some rows, [stop - start, dimension], in memory."""
        rows = slice(start, stop)
        vectors = np.asarray(self.vectors[rows], np.float32)
        if self.scales is None:
            return vectors
        return vectors * self.scales[rows, None]

    def of_length_1(self) -> bool:
        """Return whether the first rows have length 1, up to the rounding of bfloat16."""
        lengths = np.linalg.norm(self.float32(0, 1000), axis=1)
        return bool((np.abs(lengths - 1) < 0.01).all())

    def chunks(self, rows: int, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the position and the float32 values of each chunk of rows, from `start` on.

        What was read does not stay in memory.
        """
        while start < len(self):
            yield start, self.float32(start, start + rows)
            for mapped in (self.vectors, self.scales):
                if mapped is not None and isinstance(mapped.base, mmap.mmap):
                    mapped.base.madvise(mmap.MADV_DONTNEED)
            start += rows


def open_embeddings(folder: Path, rows: int, dimension: int, storage: Storage) -> Embeddings:
    """Map the embeddings of a folder."""
    vectors = np.memmap(_file(folder, storage), DTYPES[storage], "r", shape=(rows, dimension))
    if storage == "bfloat16":
        return Embeddings(vectors)
    scales = np.memmap(folder / SCALES, np.float32, "r", shape=(rows,))
    return Embeddings(vectors, scales)


def compressed(vectors: np.ndarray, storage: Storage) -> Embeddings:
    """Return float32 vectors, [rows, dimension], as they are stored. A row of zeros has scale 0."""
    if storage == "bfloat16":
        return Embeddings(vectors.astype(ml_dtypes.bfloat16))
    scales = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float32)
    divisors = np.where(scales == 0, 1, scales)
    integers = np.rint(vectors / divisors[:, None]).astype(np.int8)
    return Embeddings(integers, scales)


def encoded_rows(folder: Path) -> int:
    """Return how many rows an earlier start has embedded."""
    if not (folder / PROGRESS).exists():
        return 0
    return read_json(folder / PROGRESS)["rows"]


def encode(
    passages: Sequence[Passage],
    embedder: "Embedder",
    folder: Path,
    storage: Storage,
    on_rows: Callable[[int], None] = lambda done: None,
) -> Embeddings:
    """Embed the passages that are not embedded yet, and return all embeddings.

    A chunk counts once its bytes are on disk and `encoded.json` says so.
    """
    rows_done = encoded_rows(folder)
    bytes_per_row = {_file(folder, storage): embedder.dimension * DTYPES[storage].itemsize}
    if storage == "int8":
        bytes_per_row[folder / SCALES] = np.dtype(np.float32).itemsize

    with contextlib.ExitStack() as stack:
        # Open the files behind the last whole chunk: a kill may have left a part of the next one.
        files = [stack.enter_context(open(path, "ab")) for path in bytes_per_row]
        for file, width in zip(files, bytes_per_row.values(), strict=True):
            counted_bytes = rows_done * width
            size = file.seek(0, os.SEEK_END)
            if size < counted_bytes:
                raise UserError(
                    f"{file.name} has {size:,} bytes and {PROGRESS} counts {counted_bytes:,}: "
                    f"remove {folder} and build again"
                )
            file.truncate(counted_bytes)
        on_rows(rows_done)

        # Embed chunk after chunk.
        while rows_done < len(passages):
            chunk = passages[rows_done : rows_done + CHUNK_ROWS]
            texts = [passage.contents for passage in chunk]
            vectors = embedder.embed(texts, "passage", on_batch=_counted_from(rows_done, on_rows))
            rows = compressed(vectors, storage)
            for file, values in zip(files, (rows.vectors, rows.scales), strict=False):
                assert values is not None, "there are as many files as arrays"
                file.write(values.tobytes())
                file.flush()
                os.fsync(file.fileno())
            rows_done += len(texts)
            write_json(folder / PROGRESS, {"rows": rows_done})
    return open_embeddings(folder, rows_done, embedder.dimension, storage)


def _counted_from(first_row: int, on_rows: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that adds the rows before a chunk to those done within it."""
    return lambda rows_of_chunk: on_rows(first_row + rows_of_chunk)


def _file(folder: Path, storage: Storage) -> Path:
    """Return the path of the vectors."""
    return folder / f"embeddings.{storage}"
