"""A knowledge graph on disk, loaded in chunks: a killed load goes on behind the last chunk that is
safely there.

    INDEX/graph/          the store of pyoxigraph
    INDEX/loaded.json     how far the files were read, and what was counted; written when a chunk is on the disk

A chunk that was being written is read again: a store is a set, so a triple that comes twice is
there once. plan.json, manifest.json and the rules of opening are those of every index
(`manifest.py`).
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pyoxigraph import Store

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph.dumps import Kept, Lines, claim_quads
from mujica_jax.retrieval.graph.files import KIND, Counts, GraphSpec, Piece, is_table, pieces
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore
from mujica_jax.retrieval.graph.tables import Table
from mujica_jax.retrieval.manifest import (
    Reporter,
    again,
    building,
    commit,
    read_json,
    read_manifest,
    write_json,
)

STORE, PROGRESS = "graph", "loaded.json"
UNFINISHED = "bulk-*.sst"  # what a killed load was writing: the store takes tables in under numbers
OLD_LOGS = "LOG.old.*"  # of each start, for people
CHUNK_BYTES = 2**26  # of kept lines; some 500,000 triples
CHUNK_READ_BYTES = 2**30  # of lines, kept or not


@dataclasses.dataclass
class Loaded(Counts):
    """How far the files are read. Tables are read twice, for names and for statements."""

    stage: Literal["names", "statements", "done"] = "names"
    file: int = 0
    bytes: int = 0  # of this file, decompressed
    lines: int = 0


def build(folder: Path, spec: GraphSpec, reporter: Reporter) -> tuple[dict[str, Any], bool]:
    """The manifest, and whether the index was there already."""
    for path in spec.files:
        is_table(path)
    plan = spec.plan()
    with building(folder, plan) as finished:
        if finished:
            return read_manifest(folder), True
        began = time.monotonic()
        loaded = (
            Loaded(**read_json(folder / PROGRESS)) if (folder / PROGRESS).exists() else Loaded()
        )
        _remove(folder, UNFINISHED)
        try:
            store = Store(folder / STORE)
        except OSError as error:
            raise UserError(
                f"{folder / STORE} cannot be opened ({error}): {again(folder)}"
            ) from error
        with reporter.stage("loading the graph", unit="triples") as stage:
            for so_far in load(store, spec, loaded):
                store.flush()
                write_json(folder / PROGRESS, dataclasses.asdict(so_far))
                stage.update(so_far.triples + so_far.names)
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
        del store  # closes it
        Store(
            folder / STORE
        ).flush()  # opening it again drops the logs of what is in its tables by now
        _remove(folder, OLD_LOGS)
        about = {
            **plan,
            **{
                name: getattr(loaded, name)
                for name in ("triples", "names", "skipped", "first_skipped")
            },
        }
        about["seconds"] = round(time.monotonic() - began, 1)  # of the last start
        return commit(folder, about), False


def load(
    store: Store, spec: GraphSpec, loaded: Loaded, max_bytes: int | None = None
) -> Iterator[Loaded]:
    """Reads on from where `loaded` is, of each file its beginning if `max_bytes` says so. What
    `loaded` says counts from when it is given out and the store was flushed.
    """
    tables = [is_table(path) for path in spec.files]
    while loaded.stage != "done":
        if loaded.file < len(spec.files):
            path = spec.files[loaded.file]
            if tables[loaded.file]:
                table = Table(store, path, spec.skip, loaded)
                for piece in pieces(path, loaded.bytes, loaded.lines + 1, max_bytes):
                    store.extend(
                        table.names(piece) if loaded.stage == "names" else table.statements(piece)
                    )
                    yield _at(loaded, piece)
            elif loaded.stage == "statements":
                yield from _load_lines(store, path, spec, loaded, max_bytes)
            loaded.file, loaded.bytes, loaded.lines = loaded.file + 1, 0, 0
        else:
            loaded.stage, loaded.file = (
                ("statements", 0) if loaded.stage == "names" else ("done", 0)
            )
    yield loaded


def open_graph(folder: str | Path) -> GraphStore:
    """Every file of it found whole. It is read and never written."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["kind"] != KIND:
        raise UserError(
            f"the index {folder} is of kind {manifest['kind']} and no graph: give one of kind "
            f"{KIND}"
        )
    try:
        store = Store.read_only(str(folder / STORE))
    except OSError as error:
        raise UserError(f"{folder / STORE} cannot be opened ({error}): {again(folder)}") from error
    return GraphStore(store, version=manifest["version"], languages=tuple(manifest["languages"]))


def _load_lines(
    store: Store, path: str, spec: GraphSpec, loaded: Loaded, max_bytes: int | None
) -> Iterator[Loaded]:
    lines = Lines(path, spec, loaded)
    kept: list[Kept] = []
    claims: set[bytes] = set()
    stated: set[bytes] = set()
    size, begun, piece = 0, loaded.bytes, None

    def put() -> None:
        lines.load(store, kept)
        store.extend(claim_quads(claims - stated))
        stated.update(claims)

    for piece in pieces(path, loaded.bytes, loaded.lines + 1, max_bytes):
        found = lines.kept(piece, claims)
        kept += found
        size += sum(len(line.text) for line in found)
        if size >= CHUNK_BYTES or piece.end - begun >= CHUNK_READ_BYTES:
            put()
            kept, size, begun = [], 0, piece.end
            yield _at(loaded, piece)
    if piece is not None and piece.end > begun:
        put()
        yield _at(loaded, piece)


def _remove(folder: Path, names: str) -> None:
    for path in (folder / STORE).glob(names):
        path.unlink()


def _at(loaded: Loaded, piece: Piece) -> Loaded:
    loaded.bytes, loaded.lines = piece.end, piece.first_line + len(piece.lines) - 1
    return loaded
