"""Write the embeddings of a corpus to disk, and map them into memory for reading.

Embeddings are written in chunks, so that a killed build can continue. They are stored as

    embeddings.bfloat16     [rows, dimension]

or, in half the bytes, as

    embeddings.int8         [rows, dimension]
    embeddings.scales       [rows], float32

where a value is its integer times the scale of its row. The error is at most 1/254 of the largest
absolute value in the row.
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

# Number of passages that are embedded before they are written. A kill loses at most one chunk.
CHUNK_ROWS = 2048
# File that holds the number of rows written so far.
PROGRESS = "encoded.json"
SCALES = "embeddings.scales"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings of passages. The arrays are usually mapped from disk."""

    # [rows, dimension], bfloat16 or int8.
    vectors: np.ndarray
    # [rows], float32: the scale of each row of int8 vectors. None for bfloat16.
    scales: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """The number of values in an embedding."""
        return self.vectors.shape[1]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, with its scale."""
        scale_bytes = 0 if self.scales is None else self.scales.itemsize
        return self.dimension * self.vectors.itemsize + scale_bytes

    def float32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows from `start` up to `stop` as float32 in memory, [rows, dimension]."""
        rows = slice(start, stop)
        vectors = np.asarray(self.vectors[rows], np.float32)
        if self.scales is None:
            return vectors
        return vectors * self.scales[rows, None]

    def of_length_1(self) -> bool:
        """Return whether the first 1,000 rows have length 1, up to the rounding of bfloat16."""
        lengths = np.linalg.norm(self.float32(0, 1000), axis=1)
        return bool((np.abs(lengths - 1) < 0.01).all())

    def chunks(self, rows: int, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first position and the float32 values of each chunk of `rows` rows.

        `start` is the first row. Mapped pages are released after each chunk.
        """
        while start < len(self):
            yield start, self.float32(start, start + rows)
            for mapped in (self.vectors, self.scales):
                if mapped is not None and isinstance(mapped.base, mmap.mmap):
                    mapped.base.madvise(mmap.MADV_DONTNEED)
            start += rows


def open_embeddings(folder: Path, rows: int, dimension: int, storage: Storage) -> Embeddings:
    """Return the embeddings in a folder, mapped into memory for reading."""
    vectors = np.memmap(_file(folder, storage), DTYPES[storage], "r", shape=(rows, dimension))
    if storage == "bfloat16":
        return Embeddings(vectors)
    scales = np.memmap(folder / SCALES, np.float32, "r", shape=(rows,))
    return Embeddings(vectors, scales)


def compressed(vectors: np.ndarray, storage: Storage) -> Embeddings:
    """Return float32 vectors, [rows, dimension], in their stored form.

    With int8, a row of zeros gets the scale 0.
    """
    if storage == "bfloat16":
        return Embeddings(vectors.astype(ml_dtypes.bfloat16))
    scales = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float32)
    divisors = np.where(scales == 0, 1, scales)
    integers = np.rint(vectors / divisors[:, None]).astype(np.int8)
    return Embeddings(integers, scales)


def encoded_rows(folder: Path) -> int:
    """Return how many rows earlier starts of the build have embedded."""
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
    """Embed all passages that are not embedded yet, and return all embeddings.

    A chunk counts when its bytes are on disk and `encoded.json` holds the new number of rows.
    `on_rows` is called with the number of rows embedded so far.
    """
    rows_done = encoded_rows(folder)
    bytes_per_row = {_file(folder, storage): embedder.dimension * DTYPES[storage].itemsize}
    if storage == "int8":
        bytes_per_row[folder / SCALES] = np.dtype(np.float32).itemsize

    with contextlib.ExitStack() as stack:
        # Cut the files after the last complete chunk. A kill may have left a part of the next one.
        files = [stack.enter_context(open(path, "ab")) for path in bytes_per_row]
        for file, width in zip(files, bytes_per_row.values(), strict=True):
            counted_bytes = rows_done * width
            size = file.seek(0, os.SEEK_END)
            if size < counted_bytes:
                raise UserError(
                    f"{file.name} has {size:,} bytes, but {PROGRESS} counts {counted_bytes:,}: "
                    f"remove {folder} and build again"
                )
            file.truncate(counted_bytes)
        on_rows(rows_done)

        # Embed and write one chunk at a time.
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
    """Return a callback for one chunk, which reports the rows of the whole corpus.

    It is called with the rows done in the chunk, and adds the rows before the chunk.
    """
    return lambda rows_of_chunk: on_rows(first_row + rows_of_chunk)


def _file(folder: Path, storage: Storage) -> Path:
    """Return the path of the file of vectors."""
    return folder / f"embeddings.{storage}"
