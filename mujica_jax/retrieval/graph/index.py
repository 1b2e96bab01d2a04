"""Build and open a knowledge graph on disk.

    INDEX/graph/          The store of pyoxigraph.
    INDEX/loaded.json     The position in the files, and the counts so far. It is written after each
                          chunk.

Files are loaded in chunks. A killed build continues after the last chunk that is safely on disk. It
reads the unfinished chunk again. This does no harm, because the store is a set of triples. Like
every index, a graph also has plan.json and manifest.json (`manifest.py`).
"""

import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pyoxigraph import Store

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph.dumps import Line, Lines, claim_quads
from mujica_jax.retrieval.graph.files import KIND, Counts, GraphSpec, Piece, is_table, pieces
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore
from mujica_jax.retrieval.graph.tables import Table
from mujica_jax.retrieval.manifest import (
    Reporter,
    building,
    commit,
    read_json,
    read_manifest,
    rebuild_advice,
    write_json,
)

STORE = "graph"
PROGRESS = "loaded.json"
# Files that a killed load has not finished. The store renames finished ones to numbers.
UNFINISHED = "bulk-*.sst"
# Logs that the store writes at each start, for people to read.
OLD_LOGS = "LOG.old.*"
# A chunk ends when its chosen lines reach CHUNK_BYTES, which is about 500,000 triples. It also ends
# when all lines that were read for it, chosen or not, reach CHUNK_READ_BYTES.
CHUNK_BYTES = 2**26
CHUNK_READ_BYTES = 2**30


@dataclasses.dataclass
class Loaded(Counts):
    """The progress of a build. Tables are read twice: for names, and for statements."""

    stage: Literal["names", "statements", "done"] = "names"
    # Number of the current file, from 0.
    file: int = 0
    # Bytes (decompressed) and lines of the current file that are loaded.
    bytes: int = 0
    lines: int = 0


def build(folder: Path, spec: GraphSpec, reporter: Reporter) -> tuple[dict[str, Any], bool]:
    """Build a graph. Return its manifest, and whether it was finished already.

    `folder` is the directory of the index. `reporter` shows the progress. Raises UserError.
    """
    for path in spec.files:
        # Raises UserError for a file that is neither a table nor N-Triples.
        is_table(path)
    plan = spec.plan()
    with building(folder, plan) as is_finished:
        if is_finished:
            return read_manifest(folder), True
        return _build(folder, spec, plan, reporter), False


def _build(
    folder: Path, spec: GraphSpec, plan: dict[str, Any], reporter: Reporter
) -> dict[str, Any]:
    """Load everything that earlier starts have not loaded, and return the manifest."""
    start_time = time.monotonic()

    # Continue after the last chunk that is safely on disk.
    loaded = Loaded()
    if (folder / PROGRESS).exists():
        loaded = Loaded(**read_json(folder / PROGRESS))
    _remove(folder, UNFINISHED)
    try:
        store = _open_for_writing(folder)
    except OSError as error:
        raise UserError(
            f"{folder / STORE} cannot be opened ({error}): {rebuild_advice(folder)}"
        ) from error

    with reporter.stage("loading the graph", unit="triples") as stage:
        for progress in load(store, spec, loaded):
            store.flush()
            write_json(folder / PROGRESS, dataclasses.asdict(progress))
            stage.update(progress.triples + progress.names)
    if not loaded.triples:
        chosen = f" among the properties {' '.join(spec.properties)}" if spec.properties else ""
        raise UserError(
            f"{', '.join(spec.files)}: there is no triple in it{chosen}; give a graph with at "
            "least one"
        )

    with reporter.stage("ordering the graph", unit="triples") as stage:
        store.optimize()
        store.flush()
        stage.update(loaded.triples + loaded.names)

    # Close the store. Opening it again removes the write-ahead logs, whose content is in the tables.
    del store
    _open_for_writing(folder).flush()
    _remove(folder, OLD_LOGS)

    description = {
        **plan,
        "triples": loaded.triples,
        "names": loaded.names,
        "skipped": loaded.skipped,
        "first_skipped": loaded.first_skipped,
        # Duration of the last start of the build.
        "seconds": round(time.monotonic() - start_time, 1),
    }
    return commit(folder, description)


def _open_for_writing(folder: Path) -> Store:
    """Open the store of a graph. Raises OSError, also while the same store is still open.

    A store is closed when nothing refers to it. An error that was caught, of a full disk or of a
    repeated request to a bucket, still refers to the frames that used a store, in a circle that only
    the garbage collector frees.
    """
    gc.collect()
    return Store(folder / STORE)


def load(
    store: Store, spec: GraphSpec, loaded: Loaded, max_bytes: int | None = None
) -> Iterator[Loaded]:
    """Load the files into the store, beginning at the position in `loaded`.

    After each chunk, `loaded` is updated and yielded. The caller has to flush the store before it
    saves `loaded`. With `max_bytes`, only the beginning of each file is loaded.
    """
    is_table_file = [is_table(path) for path in spec.files]
    while loaded.stage != "done":
        if loaded.file >= len(spec.files):
            loaded.stage = "statements" if loaded.stage == "names" else "done"
            loaded.file = 0
            continue

        path = spec.files[loaded.file]
        if is_table_file[loaded.file]:
            yield from _load_table(store, path, spec, loaded, max_bytes)
        elif loaded.stage == "statements":
            yield from _load_lines(store, path, spec, loaded, max_bytes)
        loaded.file += 1
        loaded.bytes = 0
        loaded.lines = 0
    yield loaded


def open_graph(folder: str | Path) -> GraphStore:
    """Check all files of a graph against their checksums, and open it for reading.

    Raises UserError.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["kind"] != KIND:
        raise UserError(
            f"the index {folder} is of kind {manifest['kind']}, but a graph is needed: give an "
            f"index of kind {KIND}"
        )
    try:
        store = Store.read_only(str(folder / STORE))
    except OSError as error:
        raise UserError(
            f"{folder / STORE} cannot be opened ({error}): {rebuild_advice(folder)}"
        ) from error
    return GraphStore(store, version=manifest["version"], languages=tuple(manifest["languages"]))


def _load_table(
    store: Store, path: str, spec: GraphSpec, loaded: Loaded, max_bytes: int | None
) -> Iterator[Loaded]:
    """Load the names or the statements of a table, depending on the stage."""
    table = Table(store, path, spec.skip, loaded)
    for piece in pieces(path, loaded.bytes, first_line=loaded.lines + 1, max_bytes=max_bytes):
        quads = table.names(piece) if loaded.stage == "names" else table.statements(piece)
        store.extend(quads)
        yield _read_up_to(loaded, piece)


def _load_lines(
    store: Store, path: str, spec: GraphSpec, loaded: Loaded, max_bytes: int | None
) -> Iterator[Loaded]:
    """Load the chosen lines of a file of N-Triples in chunks."""
    lines = Lines(path, spec, loaded)
    # Predicates of statements so far.
    claims: set[bytes] = set()
    # Predicates that are connected with their properties in the store already.
    stated_claims: set[bytes] = set()

    def put(chunk: list[Line]) -> None:
        lines.load(store, chunk)
        store.extend(claim_quads(claims - stated_claims))
        stated_claims.update(claims)

    chunk: list[Line] = []
    chunk_bytes = 0
    chunk_start = loaded.bytes
    piece = None
    for piece in pieces(path, loaded.bytes, first_line=loaded.lines + 1, max_bytes=max_bytes):
        chosen_lines = lines.choose(piece, claims)
        chunk += chosen_lines
        chunk_bytes += sum(len(line.text) for line in chosen_lines)
        if chunk_bytes >= CHUNK_BYTES or piece.end - chunk_start >= CHUNK_READ_BYTES:
            put(chunk)
            chunk = []
            chunk_bytes = 0
            chunk_start = piece.end
            yield _read_up_to(loaded, piece)

    # Load the last chunk.
    if piece is not None and piece.end > chunk_start:
        put(chunk)
        yield _read_up_to(loaded, piece)


def _remove(folder: Path, names: str) -> None:
    """Remove the files in the store's folder whose names match a pattern."""
    for path in (folder / STORE).glob(names):
        path.unlink()


def _read_up_to(loaded: Loaded, piece: Piece) -> Loaded:
    """Record in `loaded` that a file is read up to the end of a piece, and return it."""
    loaded.bytes = piece.end
    loaded.lines = piece.first_line + len(piece.lines) - 1
    return loaded
