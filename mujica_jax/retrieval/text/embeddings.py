"""Embeddings of a corpus on disk: written chunk by chunk, so that a killed build goes on, and
mapped when they are read.

embeddings.bfloat16                   [rows, dimension], or
embeddings.int8, embeddings.scales    x = scale * integer, one float32 scale a row: half the bytes, and off by at
                                      most 1/254 of the row's largest value
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
    from mujica_jax.models.embedder import Embedder

Storage = Literal["bfloat16", "int8"]

CHUNK_ROWS = 2048  # embedded, then written: what a kill may cost
PROGRESS, SCALES = "encoded.json", "embeddings.scales"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """[rows, dimension] of bfloat16, or of int8 with a scale a row; on disk unless a test made
    them."""

    vectors: np.ndarray
    scales: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        return self.vectors.shape[1]

    def float32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Some rows, [stop - start, dimension], in memory."""
        rows = slice(start, stop)
        wide = np.asarray(self.vectors[rows], np.float32)
        return wide if self.scales is None else wide * self.scales[rows, None]

    def of_length_1(self) -> bool:
        """Whether the first rows are, up to the rounding of bfloat16."""
        return bool((np.abs(np.linalg.norm(self.float32(0, 1000), axis=1) - 1) < 0.01).all())

    def chunks(self, rows: int, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """All rows from `start` on as float32, so many at a time, each chunk with its position.
        What was read is not kept in memory.
        """
        while start < len(self):
            yield start, self.float32(start, start + rows)
            for mapped in (self.vectors, self.scales):
                if mapped is not None and isinstance(mapped.base, mmap.mmap):
                    mapped.base.madvise(mmap.MADV_DONTNEED)
            start += rows


def open_embeddings(folder: Path, rows: int, dimension: int, storage: Storage) -> Embeddings:
    vectors = np.memmap(_file(folder, storage), DTYPES[storage], "r", shape=(rows, dimension))
    if storage == "bfloat16":
        return Embeddings(vectors)
    return Embeddings(vectors, np.memmap(folder / SCALES, np.float32, "r", shape=(rows,)))


def compressed(vectors: np.ndarray, storage: Storage) -> Embeddings:
    """float32 [rows, dimension] as it is kept. A row of zeros has the scale 0."""
    if storage == "bfloat16":
        return Embeddings(vectors.astype(ml_dtypes.bfloat16))
    scales = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float32)
    integers = np.rint(vectors / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8)
    return Embeddings(integers, scales)


def encoded_rows(folder: Path) -> int:
    """How many an earlier start has embedded."""
    return read_json(folder / PROGRESS)["rows"] if (folder / PROGRESS).exists() else 0


def encode(
    passages: Sequence[Passage],
    embedder: "Embedder",
    folder: Path,
    storage: Storage,
    on_rows: Callable[[int], None] = lambda done: None,
) -> Embeddings:
    """Embed what is not embedded yet. A chunk counts once its bytes are on disk and `encoded.json`
    says so."""
    done = encoded_rows(folder)
    widths = {_file(folder, storage): embedder.dimension * DTYPES[storage].itemsize}
    if storage == "int8":
        widths[folder / SCALES] = np.dtype(np.float32).itemsize
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "ab")) for path in widths]
        for file, width in zip(files, widths.values(), strict=True):
            if (size := file.seek(0, os.SEEK_END)) < done * width:
                raise UserError(
                    f"{file.name} has {size:,} bytes and {PROGRESS} counts {done * width:,}: "
                    f"remove {folder} and build again"
                )
            file.truncate(done * width)  # what a kill left of a chunk
        on_rows(done)
        while done < len(passages):
            began = done
            texts = [passage.contents for passage in passages[done : done + CHUNK_ROWS]]
            vectors = embedder.embed(
                texts, "passage", on_batch=lambda of, began=began: on_rows(began + of)
            )
            rows = compressed(vectors, storage)
            for file, values in zip(files, (rows.vectors, rows.scales), strict=False):
                assert values is not None, "there are as many files as arrays"
                file.write(values.tobytes())
                file.flush()
                os.fsync(file.fileno())
            done += len(texts)
            write_json(folder / PROGRESS, {"rows": done})
    return open_embeddings(folder, done, embedder.dimension, storage)


def _file(folder: Path, storage: Storage) -> Path:
    return folder / f"embeddings.{storage}"
