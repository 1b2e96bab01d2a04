"""Searching and embedding, beside faiss, hnswlib and sentence-transformers; one JSON line a row.

    python benchmarks/retrieval.py search --work FOLDER [--rows 1000000] [--peers-python PYTHON] \\
        [--rounds 5] [--engines scann faiss-hnsw]
    python benchmarks/retrieval.py encode --corpus FILE [--embedder minilm] [--peers-python PYTHON] [--rounds 5]

`search`: clustered_vectors.py makes the vectors. Every engine is a process of its own with as many
threads as the others; its index is built, saved (and found again in FOLDER by the next run) and
loaded. Then they search in turns, round by round, all queries in one call and one by one; what is
printed are medians over the rounds. `resident_bytes` is the memory without a file behind it that
loading an index and searching it once takes. ScaNN's row with `"setting": null` has the parameters
of `index build`, its other rows search another share of the partitions; HNSW's setting is efSearch,
both have 32 links a row. The engines that look at every row get a tenth of the queries.

`encode`: the passages of a corpus, as long as they are, in turns with sentence-transformers on the
same weights in float32, which sorts by length as well; after a first pass that compiles.

The peers need a Python with faiss-cpu, hnswlib and sentence-transformers; where none is named they
are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
from clustered_vectors import DIMENSION, K, make_vectors, recall

PEERS = Path(__file__).parent / "peers"
OURS, THEIRS = ("scann", "exact"), ("faiss-flat", "faiss-hnsw", "hnswlib")
EVERY_ROW = ("exact", "faiss-flat")
CANDIDATES = (32, 64, 128, 256, 512, 768, 1024)
SETTINGS: dict[str, Sequence[float | None]] = {
    "scann": (None, 0.05, 0.1, 0.15, 0.2, 0.3),
    "exact": (None,),
    "faiss-flat": (None,),
    "faiss-hnsw": CANDIDATES,
    "hnswlib": CANDIDATES,
}
SINGLE_QUERIES = 300
PEER_BATCHES = (32, 128)  # the first is the default of sentence-transformers


class Engine:
    """One of them, in its own process; see peers/vector_search.py for what is said."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name = name
        program = (
            [sys.executable, __file__, "engine"]
            if name in OURS
            else [given.peers_python, str(PEERS / "vector_search.py")]
        )
        command = [
            *program,
            str(given.work),
            name,
            "--threads",
            str(given.threads),
            "--candidates",
            str(given.candidates),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "JAX_PLATFORMS": "cpu"}
        built = given.work / f"{name}.json"
        if not built.exists():
            made = subprocess.run(
                [*command, "--build"], env=environment, stdout=PIPE, text=True, check=True
            )
            built.write_text(made.stdout.splitlines()[-1])
        self.about = json.loads(built.read_text())
        self._process = subprocess.Popen(
            command, env=environment, stdin=PIPE, stdout=PIPE, text=True
        )
        # what is loaded late is loaded now
        self._say({"setting": SETTINGS[name][-1], "batched": True, "share": 0.02})
        self.about |= json.loads(self._heard())

    def pass_over(self, setting: float | None, batched: bool) -> float:
        """Queries a second."""
        share = 0.1 if self.name in EVERY_ROW else 1.0
        self._say({"setting": setting, "batched": batched, "share": share})
        said = json.loads(self._heard())
        return said["queries"] / said["seconds"]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, asked: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)

    def _heard(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return line


def search(given: argparse.Namespace) -> None:
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / "exact.npy").exists():
        make_vectors(given.work, given.rows)
    exact = np.load(given.work / "exact.npy")
    rows = len(np.load(given.work / "vectors.npy", mmap_mode="r"))
    if rows != given.rows:
        raise SystemExit(
            f"{given.work} holds {rows:,} vectors and --rows is {given.rows:,}: give another --work"
        )
    names = [name for name in given.engines if name in OURS or given.peers_python]
    engines = [Engine(name, given) for name in names]
    cells = [(engine, setting) for engine in engines for setting in SETTINGS[engine.name]]
    speeds: dict[tuple[str, float | None, bool], list[float]] = {}
    recalls = {}
    for _ in range(given.rounds):
        for engine, setting in cells:
            for batched in (True, False):
                speeds.setdefault((engine.name, setting, batched), []).append(
                    engine.pass_over(setting, batched)
                )
                if batched:
                    recalls[engine.name, setting] = recall(
                        np.load(given.work / f"{engine.name}.found.npy"), exact
                    )
    for engine, setting in cells:
        together, single = (
            statistics.median(speeds[engine.name, setting, of]) for of in (True, False)
        )
        row = {
            "engine": engine.name,
            "setting": setting,
            "rows": rows,
            "recall@10": round(recalls[engine.name, setting], 4),
            "queries_per_second": round(together, 1),
            "one_by_one_per_second": round(single, 1),
            **engine.about,
        }
        print(json.dumps(row), flush=True)
    for engine in engines:
        engine.end()


def engine(given: argparse.Namespace) -> None:
    """One of ours, as peers/vector_search.py is one of theirs."""
    import dataclasses

    from mujica_jax.retrieval.text.scann import ScannSearch, package, parameters_for, write_scann
    from mujica_jax.retrieval.text.vectors import open_embeddings

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: given.threads]))
    queries = np.load(given.folder / "queries.npy")
    rows = (given.folder / "embeddings.bfloat16").stat().st_size // (2 * DIMENSION)
    embeddings = open_embeddings(given.folder, rows, DIMENSION, "bfloat16")
    parameters, place = parameters_for(rows, of_length_1=True), given.folder / "scann"
    began = time.perf_counter()
    if given.build:
        if given.engine == "scann":
            write_scann(embeddings, parameters, given.folder / ".scann.new").replace(place)
        print(json.dumps({"build_seconds": round(time.perf_counter() - began, 1)}))
        return
    if given.engine == "scann":
        package()
        before = anonymous_bytes()
        loaded = ScannSearch.load(place, rows, parameters)
    else:
        import jax

        from mujica_jax.retrieval.text.exact import ExactSearch

        jax.devices()
        before = anonymous_bytes()
        loaded = ExactSearch(embeddings)
    loading = True
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["setting"] is not None:
            searched = max(1, round(asked["setting"] * parameters.leaves))
            loaded.parameters = dataclasses.replace(parameters, leaves_searched=searched)  # pyright: ignore
        elif given.engine == "scann":
            loaded.parameters = parameters  # pyright: ignore[reportAttributeAccessIssue]
        chosen = queries[: max(1, round(asked["share"] * len(queries)))]
        began = time.perf_counter()
        if asked["batched"]:
            _, found = loaded.search(chosen, K)
            seconds = time.perf_counter() - began
            np.save(given.folder / f"{given.engine}.found.npy", found)
        else:
            chosen = chosen[: round(asked["share"] * SINGLE_QUERIES)]
            for query in chosen:
                loaded.search(query[None], K)
            seconds = time.perf_counter() - began
        said = (
            {"resident_bytes": anonymous_bytes() - before}
            if loading
            else {"queries": len(chosen), "seconds": seconds}
        )
        loading = False
        print(json.dumps(said), flush=True)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def encode(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.embedding.find import find_embedder
    from mujica_jax.retrieval.text.corpus import read_corpus

    passages = [passage.contents for passage in read_corpus([given.corpus])]
    chosen = np.random.default_rng(0).choice(
        len(passages), min(given.passages, len(passages)), replace=False
    )
    texts = [passages[place] for place in chosen]
    found = find_embedder(given.embedder)
    embedder = found.load()
    ours = embedder.embed(texts, "passage")  # compiles
    seconds: dict[str, list[float]] = {"ours": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        peer, agreement = None, None
        if given.peers_python:
            command = [
                given.peers_python,
                str(PEERS / "sentence_encoding.py"),
                str(file),
                str(found.folder),
            ]
            environment = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
            command += ["--threads", str(given.threads)]
            peer = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)
            _pass_of(peer, PEER_BATCHES[0])  # the first one is not counted
            agreement = float((np.load(f"{file}.npy") * ours).sum(1).min())
        for _ in range(given.rounds):
            began = time.perf_counter()
            embedder.embed(texts, "passage")
            seconds["ours"].append(time.perf_counter() - began)
            for size in PEER_BATCHES if peer else ():
                seconds.setdefault(f"sentence-transformers, batches of {size}", []).append(
                    _pass_of(peer, size)
                )
        if peer is not None:
            assert peer.stdin is not None
            peer.stdin.close()
            peer.wait()
    for name, of in seconds.items():
        speed = len(texts) / statistics.median(of)
        print(
            json.dumps(
                {"encoder": name, "passages": len(texts), "passages_per_second": round(speed, 1)}
            )
        )
    if agreement is not None:
        print(json.dumps({"smallest_cosine_between_both": round(agreement, 6)}))


def _pass_of(peer: Any, batch: int) -> float:
    print(batch, file=peer.stdin, flush=True)
    return json.loads(peer.stdout.readline())["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    searched, encoded = (commands.add_parser(run.__name__) for run in (search, encode))
    alone = commands.add_parser("engine")
    searched.set_defaults(run=search)
    searched.add_argument(
        "--work", type=Path, required=True, help="vectors and built indexes are kept here"
    )
    searched.add_argument("--rows", type=int, default=100_000)
    searched.add_argument(
        "--engines", nargs="+", default=[*OURS, *THEIRS], choices=[*OURS, *THEIRS]
    )
    searched.add_argument("--candidates", type=int, default=128, help="efConstruction of HNSW")
    encoded.set_defaults(run=encode)
    encoded.add_argument("--corpus", required=True)
    encoded.add_argument("--embedder", default="minilm")
    encoded.add_argument("--passages", type=int, default=1024, help="drawn from the corpus")
    for made in (searched, encoded):
        made.add_argument("--rounds", type=int, default=5)
        made.add_argument("--threads", type=int, default=2)
        made.add_argument("--peers-python", metavar="PYTHON")
    alone.set_defaults(run=engine)  # the process that `search` starts
    alone.add_argument("folder", type=Path)
    alone.add_argument("engine", choices=OURS)
    alone.add_argument("--threads", type=int, required=True)
    alone.add_argument("--candidates", type=int)
    alone.add_argument("--build", action="store_true")
    given = parser.parse_args()
    given.run(given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
