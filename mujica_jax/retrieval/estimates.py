"""What an index will take, before it is built: bytes on disk and in memory, and seconds, from a
sample on this machine.

Embedding, indexing words and loading triples are timed. ScaNN's partitions are counted in
floating-point operations and divided by the speed of a matrix product measured here; Wikidata's
dumps begin with the entities that say most: both of these figures are rough ones.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyoxigraph import Store

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.graph.files import GraphSpec, pieces
from mujica_jax.retrieval.graph.index import Loaded, load
from mujica_jax.retrieval.manifest import AUTO
from mujica_jax.retrieval.text.bm25 import Bm25Index, indexed_words
from mujica_jax.retrieval.text.corpus import Passage, stream_corpus
from mujica_jax.retrieval.text.index import IndexSpec, choose_kind
from mujica_jax.retrieval.text.recall import QUERIES
from mujica_jax.retrieval.text.scann import CHUNK_ROWS, ScannParameters, parameters_for
from mujica_jax.retrieval.text.vectors import DTYPES

EMBEDDED_SAMPLE = 128  # passages
WORDS_SAMPLE = 2000
CENTROID_ROUNDS = 13  # of ScaNN's clustering, with one that chooses where it begins
# What ScaNN was seen to hold in memory while an index is built: its training sample in float32 so
# many times, and while it writes, the codebook once for every partition, with so many bytes a
# centre.
SAMPLES_HELD, CHUNKS_HELD, CENTRES_A_BLOCK, CENTRE_BYTES = 4, 3, 16, 320
FLOAT32_BYTES = 4
# What an index of words was seen to hold while it is built: a number a word of the corpus, an array
# a passage, and while scores are computed so many bytes for each passage of each word. The passages
# themselves are mapped.
WORD_BYTES, PASSAGE_BYTES, POSTING_BYTES = 4, 100, {"default": 40, "elasticsearch": 60}
MATRIX = 1024  # rows and columns of the product that is timed
GRAPH_SAMPLE_BYTES = 2**25  # of each file of triples, decompressed
# a chunk of lines and what the store sorts at once, however large the graph is
GRAPH_BUILDING_BYTES = 10**9
GRAPH_SEARCHING_BYTES = 10**8  # beside what the system keeps of the files


def device_bytes(
    spec: IndexSpec, passages: int, hosts: int = 1, devices: int | None = None
) -> dict[str, int]:
    """What the rows of kind exact take on each device of a job of so many hosts with so many
    devices each (None: as many as this one has), by `task.index_rows`.
    """
    from mujica_jax.retrieval.text.exact import layout, rows_mesh

    assert spec.embedder is not None, "dense indexes have an embedder"
    devices = rows_mesh().size if devices is None else devices
    row = spec.embedder.dimension * DTYPES[spec.storage].itemsize + (
        FLOAT32_BYTES if spec.storage == "int8" else 0
    )
    of_host = {"host": passages, "job": -(-passages // hosts)}
    return {rows: layout(held, devices)[1] // devices * row for rows, held in of_host.items()}


def estimate_corpus(
    spec: IndexSpec, passages: int | None = None, hosts: int = 1, devices: int | None = None
) -> dict[str, Any]:
    """Estimate as if the corpus had this many passages; None counts them. A kind that was chosen is
    named, with why."""
    skipped = Skipped()
    stream = stream_corpus(spec.corpus, skipped if spec.skip else None)
    sample = list(itertools.islice(stream, WORDS_SAMPLE))
    if passages is None:
        passages = len(sample) + sum(1 for _ in stream)
    if not sample or passages < 1:
        raise UserError(
            f"{', '.join(spec.corpus)}: {len(sample)} passages were read and {passages} are asked "
            "for: give at least one"
        )
    chosen: dict[str, str] = {}
    if spec.kind == AUTO:
        kind, why = choose_kind(passages)
        spec = dataclasses.replace(spec, kind=kind)
        chosen = {"kind": kind, "why": why}
    found = estimate_sample(spec, sample, passages)
    if spec.kind == "exact":
        found["device_bytes"] = device_bytes(spec, passages, hosts, devices)
    return {
        "passages": passages,
        **chosen,
        **({"skipped": skipped.skipped} if spec.skip else {}),
        **found,
    }


def estimate_sample(spec: IndexSpec, sample: Sequence[Passage], passages: int) -> dict[str, Any]:
    """For `passages` passages like those of the sample: `disk_bytes` by file, `building_bytes` of
    memory beside the program and the embedder's weights, `searching_bytes` (on the devices
    together, for kind exact), `seconds` by stage.
    """
    text_bytes = sum(len(f"{passage.id}{passage.contents}".encode()) for passage in sample)
    disk = {"passages": passages * text_bytes // len(sample) + 12 * passages}  # three offsets a row
    if spec.kind == "bm25":
        return _estimate_words(spec, sample, passages, disk)
    assert spec.embedder is not None, "dense indexes have an embedder"
    dimension = spec.embedder.dimension
    scale_bytes = FLOAT32_BYTES if spec.storage == "int8" else 0
    disk["embeddings"] = passages * (dimension * DTYPES[spec.storage].itemsize + scale_bytes)
    seconds = {"embedding": round(passages / _passages_a_second(spec, sample[:EMBEDDED_SAMPLE]), 3)}
    building, searching = 0, disk["embeddings"]
    if spec.kind == "scann":
        of = parameters_for(passages, of_length_1=True)
        blocks = -(-dimension // of.dimensions_a_block) if of.leaves else 0
        vectors = passages * dimension * (1 if of.leaves else FLOAT32_BYTES)
        tree = of.leaves * dimension * FLOAT32_BYTES + (
            passages * FLOAT32_BYTES if of.leaves else 0
        )
        # a byte a block in the file, half of one in memory
        disk["scann"] = passages * blocks + vectors + tree
        searching = passages * blocks // 2 + vectors + tree
        building = scann_building_bytes(of, passages, dimension)
        products = 2 * dimension * of.leaves * (CENTROID_ROUNDS * of.training_rows + passages)
        operations_a_second = _operations_a_second()
        seconds["building ScaNN's partitions"] = round(products / operations_a_second, 3)
        compared = 2 * dimension * passages * min(QUERIES, passages)
        seconds["measuring recall"] = round(compared / operations_a_second, 3)
    return {
        "disk_bytes": disk,
        "building_bytes": building,
        "searching_bytes": searching,
        "seconds": seconds,
    }


def estimate_graph(spec: GraphSpec, sample_bytes: int = GRAPH_SAMPLE_BYTES) -> dict[str, Any]:
    """From the beginning of each file, loaded into a temporary directory."""
    triples = names = disk = seconds = 0.0
    for path in spec.files:
        with tempfile.TemporaryDirectory() as folder:
            store, loaded = Store(folder), Loaded()
            began = time.monotonic()
            for _ in load(store, dataclasses.replace(spec, files=(path,)), loaded, sample_bytes):
                store.flush()
            store.optimize()
            share = max(
                (piece.share for piece in pieces(path, max_bytes=sample_bytes)), default=1.0
            )
            seconds += (time.monotonic() - began) / share
            del store
            disk += sum(file.stat().st_size for file in Path(folder).iterdir()) / share
        triples, names = triples + loaded.triples / share, names + loaded.names / share
    if not triples:
        raise UserError(
            f"{', '.join(spec.files)}: there is no triple in what was read; give a graph with at "
            "least one"
        )
    return {
        "triples": round(triples),
        "names": round(names),
        "disk_bytes": {"graph": round(disk)},
        "building_bytes": GRAPH_BUILDING_BYTES,
        "searching_bytes": GRAPH_SEARCHING_BYTES,
        "seconds": {"loading": round(seconds, 1)},
    }


def scann_building_bytes(parameters: ScannParameters, rows: int, dimension: int) -> int:
    """Memory of `write_scann`: that of training, or of writing down what was learned, and some
    chunks."""
    row = dimension * FLOAT32_BYTES
    if not parameters.leaves:
        return 2 * rows * row
    blocks = -(-dimension // parameters.dimensions_a_block)
    codebooks = parameters.leaves * blocks * CENTRES_A_BLOCK * CENTRE_BYTES
    sample = parameters.training_rows * row
    return (
        max(SAMPLES_HELD * sample, sample + codebooks) + CHUNKS_HELD * min(rows, CHUNK_ROWS) * row
    )


def _estimate_words(
    spec: IndexSpec, sample: Sequence[Passage], passages: int, disk: dict[str, int]
) -> dict[str, Any]:
    Bm25Index(sample[:1], spec.tokeniser)  # imports, once for a corpus of any size
    began = time.monotonic()
    index = Bm25Index(sample, spec.tokeniser)
    seconds = (time.monotonic() - began) * passages / len(sample)
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder))
        disk["words"] = (
            sum(path.stat().st_size for path in Path(folder).iterdir()) * passages // len(sample)
        )
    words = indexed_words([passage.contents for passage in sample], spec.tokeniser)
    distinct_words = sum(len(set(words_of_passage)) for words_of_passage in words)
    held = WORD_BYTES * sum(map(len, words)) + POSTING_BYTES[spec.tokeniser] * distinct_words
    return {
        "disk_bytes": disk,
        "building_bytes": passages * (PASSAGE_BYTES + held // len(sample)),
        "searching_bytes": disk["words"],
        "seconds": {"indexing words": round(seconds, 3)},
    }


def _passages_a_second(spec: IndexSpec, sample: Sequence[Passage]) -> float:
    assert spec.embedder is not None, "dense indexes have an embedder"
    embedder = spec.embedder.load()
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
