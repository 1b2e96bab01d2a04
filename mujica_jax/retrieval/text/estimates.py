"""What an index will take, before anything is built: bytes on disk and in memory, and seconds, from a sample of the corpus on this machine.

Embedding and indexing words are timed on the sample. ScaNN's partitions are counted in floating-point operations and divided by the speed
of a matrix product measured here, so their time is a rough one.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.retrieval.text.embeddings import DTYPES
from mujica_jax.retrieval.text.index import Recipe
from mujica_jax.retrieval.text.scann_build import CHUNK_ROWS

if TYPE_CHECKING:
    from mujica_jax.retrieval.text.scann_search import ScannParameters

EMBEDDED_SAMPLE = 128  # passages
WORDS_SAMPLE = 2000
CENTROID_ROUNDS = 13  # of ScaNN's clustering, with one that chooses where it begins
# What ScaNN was seen to hold in memory while an index is built: its training sample in float32 so many times, and while it writes, the
# codebook once for every partition, with so many bytes a centre.
SAMPLES_HELD, CHUNKS_HELD, CENTRES_A_BLOCK, CENTRE_BYTES = 4, 3, 16, 320
FLOAT32_BYTES = 4
# What an index of words was seen to hold while it is built: a number a word of the corpus, an array a passage, and while scores are
# computed so many bytes for each passage of each word. The passages themselves are mapped.
WORD_BYTES, PASSAGE_BYTES, POSTING_BYTES = 4, 100, {"default": 40, "elasticsearch": 60}
MATRIX = 1024  # rows and columns of the product that is timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    passages: int
    disk_bytes: dict[str, int]  # by file
    building_bytes: int  # of memory, beside the program and the embedder's weights
    searching_bytes: int  # of memory; on the devices together, for kind accelerator
    seconds: dict[str, float]  # by stage


def estimate(recipe: Recipe, sample: Sequence[Passage], passages: int) -> Estimate:
    """For `passages` passages like those of the sample."""
    text_bytes = sum(len(f"{passage.id}{passage.contents}".encode()) for passage in sample)
    disk = {"passages": passages * text_bytes // len(sample) + 12 * passages}  # three offsets a row
    if recipe.kind == "bm25":
        words = sample[:WORDS_SAMPLE]
        Bm25Index(words[:1], recipe.tokeniser)  # imports, once for a corpus of any size
        began = time.monotonic()
        index = Bm25Index(words, recipe.tokeniser)
        seconds = {"indexing words": round((time.monotonic() - began) * passages / len(words), 3)}
        with tempfile.TemporaryDirectory() as folder:
            index.save(Path(folder))
            disk["words"] = sum(path.stat().st_size for path in Path(folder).iterdir()) * passages // len(words)
        found = index.encode([passage.contents for passage in words])
        postings = sum(len(set(of)) for of in found)
        held = WORD_BYTES * sum(len(of) for of in found) + POSTING_BYTES[recipe.tokeniser] * postings
        building = passages * (PASSAGE_BYTES + held // len(words))
        return Estimate(
            passages=passages,
            disk_bytes=disk,
            building_bytes=building,
            searching_bytes=disk["words"],
            seconds=seconds,
        )
    assert recipe.embedder is not None, "dense indexes have an embedder"
    dimension = recipe.embedder.dimension
    disk["embeddings"] = passages * (
        dimension * DTYPES[recipe.storage].itemsize + (FLOAT32_BYTES if recipe.storage == "int8" else 0)
    )
    seconds = {"embedding": round(passages / _passages_a_second(recipe, sample[:EMBEDDED_SAMPLE]), 3)}
    building, searching = 0, disk["embeddings"]
    if recipe.kind == "scann":
        from mujica_jax.retrieval.text.scann_search import parameters_for

        of = parameters_for(passages, of_length_1=True)
        blocks = -(-dimension // of.dimensions_a_block) if of.leaves else 0
        vectors = passages * dimension * (1 if of.leaves else FLOAT32_BYTES)
        tree = of.leaves * dimension * FLOAT32_BYTES + (passages * FLOAT32_BYTES if of.leaves else 0)
        disk["scann"] = passages * blocks + vectors + tree  # a byte a block in the file, half of one in memory
        searching = passages * blocks // 2 + vectors + tree
        building = scann_building_bytes(of, passages, dimension)
        products = 2 * dimension * of.leaves * (CENTROID_ROUNDS * of.training_rows + passages)
        seconds["building ScaNN's partitions"] = round(products / _operations_a_second(), 3)
    return Estimate(
        passages=passages, disk_bytes=disk, building_bytes=building, searching_bytes=searching, seconds=seconds
    )


def scann_building_bytes(parameters: "ScannParameters", rows: int, dimension: int) -> int:
    """Memory of `write_scann`, beside the program: that of training, or of writing down what was learned, and some chunks."""
    row = dimension * FLOAT32_BYTES
    if not parameters.leaves:
        return 2 * rows * row
    blocks = -(-dimension // parameters.dimensions_a_block)
    codebooks = parameters.leaves * blocks * CENTRES_A_BLOCK * CENTRE_BYTES
    sample = parameters.training_rows * row
    return max(SAMPLES_HELD * sample, sample + codebooks) + CHUNKS_HELD * min(rows, CHUNK_ROWS) * row


def count_and_sample(passages: Iterable[Passage], count: int | None) -> tuple[list[Passage], int]:
    """The first passages, and how many there are; where `count` is given the rest is not read."""
    stream = iter(passages)
    sample = list(itertools.islice(stream, WORDS_SAMPLE))
    return sample, len(sample) + sum(1 for _ in stream) if count is None else count


def _passages_a_second(recipe: Recipe, sample: Sequence[Passage]) -> float:
    assert recipe.embedder is not None
    embedder = recipe.embedder.load()
    texts = [passage.contents for passage in sample]
    embedder.embed(texts, "passage")  # compiles
    began = time.monotonic()
    embedder.embed(texts, "passage")
    return len(texts) / (time.monotonic() - began)


def _operations_a_second() -> float:
    matrix = np.ones((MATRIX, MATRIX), np.float32)
    np.matmul(matrix, matrix)
    began = time.monotonic()
    for _ in range(3):
        np.matmul(matrix, matrix)
    return 3 * 2 * MATRIX**3 / (time.monotonic() - began)
