"""The size of an index before it is built: bytes on disk, in memory and on devices.

Dense indexes are counted from the sizes of their arrays. Words and triples are counted in a sample,
which is indexed; Wikidata's dumps begin with the entities that say most, so that of them the figure
is a rough one.
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

WORDS_SAMPLE = 2000  # passages
# What ScaNN was seen to hold in memory while an index is built: its training sample in float32
# SAMPLES_HELD times, and while it writes, the codebook once for every partition.
SAMPLES_HELD = 4
CHUNKS_HELD = 3
CENTRES_A_BLOCK = 16
CENTRE_BYTES = 320
FLOAT32_BYTES = 4
# What an index of words was seen to hold while it is built: a number for each word of the corpus, an
# array for each passage, and while scores are computed POSTING_BYTES for each passage of each word.
# The passages themselves are mapped.
WORD_BYTES = 4
PASSAGE_BYTES = 100
POSTING_BYTES = {"default": 40, "elasticsearch": 60}  # by tokeniser
GRAPH_SAMPLE_BYTES = 2**25  # of each file of triples, decompressed
# a chunk of lines and what the store sorts at once, however large the graph is
GRAPH_BUILDING_BYTES = 10**9
GRAPH_SEARCHING_BYTES = 10**8  # beside what the system keeps of the files


def device_bytes(spec: IndexSpec, passages: int, devices: int | None = None) -> int:
    """Return the bytes that the rows of an exact index take on each of a host's devices.

    `devices` of None means as many as this host has.
    """
    from mujica_jax.retrieval.text import exact

    devices = exact.rows_mesh().size if devices is None else devices
    return exact.device_bytes(passages, _row_bytes(spec), devices)


def _row_bytes(spec: IndexSpec) -> int:
    """Return the bytes of an embedding, with its scale if it has one."""
    assert spec.embedder is not None, "dense indexes have an embedder"
    scale_bytes = FLOAT32_BYTES if spec.storage == "int8" else 0
    return spec.embedder.dimension * DTYPES[spec.storage].itemsize + scale_bytes


def estimate_corpus(
    spec: IndexSpec, passages: int | None = None, devices: int | None = None
) -> dict[str, Any]:
    """Estimate as if the corpus had this many passages; None counts them.

    A kind that was chosen is named, with why.
    """
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
    """Return what an index of this many passages takes, if they are like those of the sample.

    `disk_bytes` by file; `building_bytes` of memory beside the program and the embedder's weights;
    `searching_bytes` (of kind exact on the devices together).
    """
    text_bytes = sum(len(f"{passage.id}{passage.contents}".encode()) for passage in sample)
    disk_bytes = {
        "passages": passages * text_bytes // len(sample) + 12 * passages  # three offsets a row
    }
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
        # a byte a block in the file, half of one in memory
        disk_bytes["scann"] = passages * blocks + vector_bytes + tree_bytes
        searching_bytes = passages * blocks // 2 + vector_bytes + tree_bytes
        building_bytes = scann_building_bytes(parameters, passages, dimension)
    return {
        "disk_bytes": disk_bytes,
        "building_bytes": building_bytes,
        "searching_bytes": searching_bytes,
    }


def estimate_graph(spec: GraphSpec, sample_bytes: int = GRAPH_SAMPLE_BYTES) -> dict[str, Any]:
    """Estimate from the beginning of each file, loaded into a temporary directory."""
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
            f"{', '.join(spec.files)}: there is no triple in what was read; give a graph with at "
            "least one"
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

    They are those of training or of saving what was learned, whichever is larger, and of some
    chunks.
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
    """Estimate an index of words from one of the sample."""
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
