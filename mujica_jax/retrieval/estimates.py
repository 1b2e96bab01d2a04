"""Estimate the size of an index before it is built: bytes on disk, in memory and on devices.

The size of a dense index follows from the sizes of its arrays. For BM25 indexes and graphs, a
sample is indexed and the result is scaled up. The estimate for Wikidata's dumps is rough, because
they begin with entities that have more statements than most.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyoxigraph import Store

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.graph.files import GraphSpec, pieces
from mujica_jax.retrieval.graph.index import Loaded, load
from mujica_jax.retrieval.manifest import AUTO
from mujica_jax.retrieval.text.bm25 import Bm25Index, indexed_words
from mujica_jax.retrieval.text.corpus import Passage, stream_corpus
from mujica_jax.retrieval.text.index import IndexSpec, choose_kind
from mujica_jax.retrieval.text.scann import ScannParameters, parameters_for
from mujica_jax.retrieval.text.scann_package import CHUNK_ROWS
from mujica_jax.retrieval.text.vectors import DTYPES

# Number of passages in the sample of a corpus.
WORDS_SAMPLE = 2000
# Measured memory of ScaNN during a build. While it trains, it holds SAMPLES_HELD copies of its
# training sample in float32. While it writes, it holds one codebook for every partition. A codebook
# has CENTRES_A_BLOCK centres of CENTRE_BYTES for each block of dimensions. In both stages it also
# holds CHUNKS_HELD chunks of embeddings in float32.
SAMPLES_HELD = 4
CHUNKS_HELD = 3
CENTRES_A_BLOCK = 16
CENTRE_BYTES = 320
FLOAT32_BYTES = 4
# Measured memory of a BM25 index during a build: WORD_BYTES for each word of the corpus,
# PASSAGE_BYTES for each passage, and while scores are computed POSTING_BYTES for each distinct word
# of each passage. The passages themselves are mapped from disk.
WORD_BYTES = 4
PASSAGE_BYTES = 100
POSTING_BYTES = {"default": 40, "elasticsearch": 60}  # by tokeniser
# Size of the sample of each file of triples, decompressed.
GRAPH_SAMPLE_BYTES = 2**25
# Memory for building a graph of any size: a chunk of lines, and the triples that the store sorts.
GRAPH_BUILDING_BYTES = 10**9
# Memory for searching a graph, without the page cache of the system.
GRAPH_SEARCHING_BYTES = 10**8


def device_bytes(spec: IndexSpec, passages: int, devices: int | None = None) -> int:
    """Return the bytes that the embeddings of an exact index take on each device of a host.

    `devices` is the number of devices. None stands for those of this host.
    """
    from mujica_jax.retrieval.text import exact

    devices = exact.rows_mesh().size if devices is None else devices
    return exact.device_bytes(passages, _row_bytes(spec), devices)


def _row_bytes(spec: IndexSpec) -> int:
    """Return the bytes of one embedding, with its scale if it is stored as int8."""
    assert spec.embedder is not None, "dense indexes have an embedder"
    scale_bytes = FLOAT32_BYTES if spec.storage == "int8" else 0
    return spec.embedder.dimension * DTYPES[spec.storage].itemsize + scale_bytes


def estimate_corpus(
    spec: IndexSpec, passages: int | None = None, devices: int | None = None
) -> dict[str, Any]:
    """Estimate the size of an index from a sample of its corpus. Raises UserError.

    `passages` is the number of passages. None counts those of the corpus. If the kind is auto, the
    result also holds the chosen kind and the reason (`why`).
    """
    skipped = Skipped()
    stream = stream_corpus(spec.corpus, skipped if spec.skip else None, spec.chunking)
    sample = list(itertools.islice(stream, WORDS_SAMPLE))
    if passages is None:
        passages = len(sample) + sum(1 for _ in stream)
    if not sample or passages < 1:
        raise UserError(
            f"{', '.join(spec.corpus)}: {len(sample)} passages were read for an estimate of "
            f"{passages} passages: give at least one"
        )

    amounts: dict[str, Any] = {"passages": passages}
    if spec.kind == AUTO:
        kind, why = choose_kind(passages)
        spec = dataclasses.replace(spec, kind=kind)
        amounts["kind"] = kind
        amounts["why"] = why
    if spec.skip:
        amounts["skipped"] = skipped.skipped
    amounts |= estimate_sample(spec, sample, passages)
    if spec.kind == "exact":
        amounts["device_bytes"] = device_bytes(spec, passages, devices)
    return amounts


def estimate_sample(spec: IndexSpec, sample: Sequence[Passage], passages: int) -> dict[str, Any]:
    """Return the size of an index of `passages` passages, if they are like those of the sample.

    The result holds `disk_bytes` by file. `building_bytes` is the memory of the build, without the
    program and the embedder's weights. `searching_bytes` is the memory for searching. For kind
    exact, it is the memory of all devices together.
    """
    text_bytes = sum(len(f"{passage.id}{passage.contents}".encode()) for passage in sample)
    # Arrow stores three offsets of 4 bytes for each row.
    disk_bytes = {"passages": passages * text_bytes // len(sample) + 12 * passages}
    if spec.kind == "bm25":
        return _estimate_words(spec, sample, passages, disk_bytes)

    assert spec.embedder is not None, "dense indexes have an embedder"
    dimension = spec.embedder.dimension
    disk_bytes["embeddings"] = passages * _row_bytes(spec)
    building_bytes = 0
    searching_bytes = disk_bytes["embeddings"]
    if spec.kind == "scann":
        parameters = parameters_for(passages, of_length_1=True)
        has_partitions = parameters.leaves > 0
        blocks = -(-dimension // parameters.dimensions_a_block) if has_partitions else 0
        vector_bytes = passages * dimension * (1 if has_partitions else FLOAT32_BYTES)
        tree_bytes = parameters.leaves * dimension * FLOAT32_BYTES
        if has_partitions:
            tree_bytes += passages * FLOAT32_BYTES
        # A block of dimensions takes one byte in the file and half a byte in memory.
        disk_bytes["scann"] = passages * blocks + vector_bytes + tree_bytes
        searching_bytes = passages * blocks // 2 + vector_bytes + tree_bytes
        building_bytes = scann_building_bytes(parameters, passages, dimension)
    return {
        "disk_bytes": disk_bytes,
        "building_bytes": building_bytes,
        "searching_bytes": searching_bytes,
    }


def estimate_graph(spec: GraphSpec, sample_bytes: int = GRAPH_SAMPLE_BYTES) -> dict[str, Any]:
    """Estimate the size of a graph. Raises UserError if there is no triple.

    The beginning of each file (`sample_bytes`) is loaded into a store in a temporary directory.
    """
    triples = 0.0
    names = 0.0
    disk_bytes = 0.0
    for path in spec.files:
        with tempfile.TemporaryDirectory() as folder:
            store = Store(folder)
            loaded = Loaded()
            for _ in load(store, dataclasses.replace(spec, files=(path,)), loaded, sample_bytes):
                store.flush()
            store.optimize()
            share = max(
                (piece.share for piece in pieces(path, max_bytes=sample_bytes)), default=1.0
            )
            del store
            disk_bytes += sum(file.stat().st_size for file in Path(folder).iterdir()) / share
        triples += loaded.triples / share
        names += loaded.names / share
    if not triples:
        raise UserError(
            f"{', '.join(spec.files)}: there is no triple in the sample that was read; give a "
            "graph with at least one triple"
        )
    return {
        "triples": round(triples),
        "names": round(names),
        "disk_bytes": {"graph": round(disk_bytes)},
        "building_bytes": GRAPH_BUILDING_BYTES,
        "searching_bytes": GRAPH_SEARCHING_BYTES,
    }


def scann_building_bytes(parameters: ScannParameters, rows: int, dimension: int) -> int:
    """Return the bytes of memory that `write_scann` takes.

    It is the memory of training or the memory of saving, whichever is larger, and the memory of
    CHUNKS_HELD chunks of embeddings.
    """
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
    spec: IndexSpec, sample: Sequence[Passage], passages: int, disk_bytes: dict[str, int]
) -> dict[str, Any]:
    """Estimate the size of a BM25 index from an index of the sample."""
    index = Bm25Index(sample, spec.tokeniser)
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder))
        sample_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    disk_bytes["words"] = sample_bytes * passages // len(sample)
    words = indexed_words([passage.contents for passage in sample], spec.tokeniser)
    distinct_words = sum(len(set(words_of_passage)) for words_of_passage in words)
    word_bytes = WORD_BYTES * sum(map(len, words)) + POSTING_BYTES[spec.tokeniser] * distinct_words
    return {
        "disk_bytes": disk_bytes,
        "building_bytes": passages * (PASSAGE_BYTES + word_bytes // len(sample)),
        "searching_bytes": disk_bytes["words"],
    }
