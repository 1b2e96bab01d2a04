"""Knowledge graphs: loading and asking our store, beside the graph in memory.

    python benchmarks/graph.py [--table TRIPLES.tsv.gz] [--entities 200000] [--facts 5] [--searches 2000]

Prints one JSON line. `table` is about a file of triples (left out without --table): triples a
second that are read and ready to be asked, and searches a second over all of its Q-ids, in memory
(`TripleGraph`), in an index on disk, and with 16 searches of that at once. `dump` is about a
generated dump in Wikidata's form, compressed by gzip: entities with labels in three languages, of
which one is kept, a hub that all of them point at, and facts between them. Its index is built by
the command line in a process of its own, whose largest memory is measured.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mujica_jax.retrieval.graph.index import open_graph
from mujica_jax.retrieval.graph.knowledge_graph import GraphStore
from mujica_jax.retrieval.graph.tables import read_triples
from mujica_jax.retrieval.graph.triples import TripleGraph

WD = "http://www.wikidata.org/entity/"
WDT = "http://www.wikidata.org/prop/direct/"
LABEL = "<http://www.w3.org/2000/01/rdf-schema#label>"
PROPERTIES = 60
AT_ONCE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path)
    parser.add_argument("--entities", type=int, default=200_000)
    parser.add_argument("--facts", type=int, default=5)
    parser.add_argument("--searches", type=int, default=2000)
    options = parser.parse_args(arguments)
    result = {"table": table(options.table)} if options.table else {}
    print(json.dumps(result | {"dump": dump(options.entities, options.facts, options.searches)}))
    return 0


def table(path: Path) -> dict[str, float]:
    start_time = time.monotonic()
    triples = read_triples(path)
    memory = TripleGraph(triples)
    figures: dict[str, float] = {
        "triples": len(triples),
        "memory_triples_per_second": per_second(len(triples), start_time),
    }
    keys = sorted(
        {
            key
            for triple in triples
            for key in (triple.subject_id, triple.object_id)
            if key.startswith("Q")
        }
    )
    start_time = time.monotonic()
    for key in keys:
        memory.ends_of(key)
    figures["memory_searches_per_second"] = per_second(len(keys), start_time)
    with tempfile.TemporaryDirectory() as folder:
        built = build(path, Path(folder) / "index")
        graph = open_graph(Path(folder) / "index")
        figures["index_triples_per_second"] = round(len(triples) / built["seconds"])
        figures["index_bytes"] = built["bytes"]
        figures |= searched(graph, keys)
    return figures


def dump(entities: int, facts: int, searches: int) -> dict[str, float]:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.nt.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            for number in range(10, 10 + entities):
                file.writelines(entity(draw, number, entities, facts))
            for number in range(1, PROPERTIES):
                file.write(f'<{WD}P{number}> {LABEL} "property {number}"@en .\n')
        figures: dict[str, float] = {
            "triples": entities * (facts + 1),
            "compressed_bytes": path.stat().st_size,
        }
        built = build(path, Path(folder) / "index")
        figures["build_triples_per_second"] = round(figures["triples"] / built["seconds"])
        figures |= {"build_peak_mib": built["peak_mib"], "index_bytes": built["bytes"]}
        start_time = time.monotonic()
        graph = open_graph(Path(folder) / "index")
        figures["open_seconds"] = round(time.monotonic() - start_time, 2)
        figures |= searched(
            graph, [f"Q{draw.randrange(10, 10 + entities)}" for _ in range(searches)]
        )
        start_time = time.monotonic()
        asyncio.run(graph.triples_of("Q5"))
        figures["hub_milliseconds"] = round(1e3 * (time.monotonic() - start_time), 1)
    return figures


def entity(draw: random.Random, number: int, entities: int, facts: int) -> list[str]:
    own = f"<{WD}Q{number}>"
    lines = [f'{own} {LABEL} "entity {number}"@{language} .\n' for language in ("en", "de", "fr")]
    lines.append(f"{own} <{WDT}P31> <{WD}Q5> .\n")
    for _ in range(facts):
        # Squaring makes some entities the object of many facts.
        other = 10 + int(entities * draw.random() ** 2)
        lines.append(f"{own} <{WDT}P{draw.randrange(1, PROPERTIES)}> <{WD}Q{other}> .\n")
    return lines


def build(path: Path, out: Path) -> dict[str, float]:
    """Return seconds and largest memory of the command, and bytes of the index.

    The start of the interpreter is included.
    """
    command = [
        sys.executable,
        "-m",
        "mujica_jax.index",
        "build",
        "--corpus",
        str(path),
        "--kind",
        "graph",
        "--out",
        str(out),
    ]
    start_time = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start_time
    assert status == 0, f"{' '.join(command)} ended with status {status}"
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {"seconds": seconds, "peak_mib": round(used.ru_maxrss / 1024), "bytes": size}


def searched(graph: GraphStore, keys: Sequence[str]) -> dict[str, float]:
    async def one_by_one() -> None:
        for key in keys:
            await graph.triples_of(key)

    async def at_once() -> None:
        waiting = iter(keys)

        async def ask_waiting() -> None:
            for key in waiting:
                await graph.triples_of(key)

        await asyncio.gather(*(ask_waiting() for _ in range(AT_ONCE)))

    start_time = time.monotonic()
    asyncio.run(one_by_one())
    alone = per_second(len(keys), start_time)
    start_time = time.monotonic()
    asyncio.run(at_once())
    return {
        "searches_per_second": alone,
        f"searches_per_second_{AT_ONCE}_at_once": per_second(len(keys), start_time),
    }


def per_second(count: int, start_time: float) -> int:
    return round(count / (time.monotonic() - start_time))


if __name__ == "__main__":
    raise SystemExit(main())
