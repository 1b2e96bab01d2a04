"""What a graph will take, before it is built: from the beginning of its files, loaded into a temporary directory of this machine.

Wikidata's dumps begin with the entities that say most, so what follows from their first lines is a rough figure.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph import index as graph_index
from mujica_jax.retrieval.graph.dumps import Lines, claim_quads
from mujica_jax.retrieval.graph.files import Counts, is_table, pieces
from mujica_jax.retrieval.graph.tables import Table

SAMPLE_BYTES = 2**25  # of each file, decompressed
BUILDING_BYTES = 10**9  # of memory: a chunk of lines and what the store sorts at once, however large the graph is
SEARCHING_BYTES = 10**8  # of memory, beside what the system keeps of the files


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphEstimate:
    triples: int
    names: int
    disk_bytes: dict[str, int]
    building_bytes: int
    searching_bytes: int
    seconds: dict[str, float]


def estimate_graph(recipe: graph_index.GraphRecipe, sample_bytes: int = SAMPLE_BYTES) -> GraphEstimate:
    from pyoxigraph import Store

    triples = names = disk = seconds = 0.0
    for path in recipe.files:
        with tempfile.TemporaryDirectory() as folder:
            store, counts = Store(folder), Counts()
            began = time.monotonic()
            share = max(_loaded(store, path, recipe, counts, sample_bytes), default=1.0)
            store.flush()
            store.optimize()
            taken = time.monotonic() - began
            del store
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
        triples, names = triples + counts.triples / share, names + counts.names / share
        disk, seconds = disk + size / share, seconds + taken / share
    if not triples:
        raise UserError(
            f"{', '.join(recipe.files)}: there is no triple in what was read; give a graph with at least one"
        )
    return GraphEstimate(
        triples=round(triples),
        names=round(names),
        disk_bytes={"graph": round(disk)},
        building_bytes=BUILDING_BYTES,
        searching_bytes=SEARCHING_BYTES,
        seconds={"loading": round(seconds, 1)},
    )


def _loaded(
    store: "graph_index.Store", path: str, recipe: graph_index.GraphRecipe, counts: Counts, most: int
) -> Iterator[float]:
    """The share of the file that was read, piece by piece."""
    if is_table(path):
        table = Table(store, path, skip=recipe.skip, counts=counts)
        for piece in pieces(path):
            store.extend(table.names(piece))
            store.extend(table.statements(piece))
            yield piece.share
            if piece.end >= most:
                return
        return
    lines, claims = Lines(path, recipe.choice, skip=recipe.skip, counts=counts), set[bytes]()
    for piece in pieces(path):
        lines.load(store, lines.kept(piece, claims))
        store.extend(claim_quads(claims))
        yield piece.share
        if piece.end >= most:
            return
