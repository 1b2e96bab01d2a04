"""Indexes of faiss and hnswlib over the vectors of `benchmarks/retrieval.py`, which starts it by a
Python that has them; speaks JSON lines.

    vector_search.py FOLDER ENGINE --threads N --build     builds the index and saves it beside the vectors
    vector_search.py FOLDER ENGINE --threads N             loads it and answers each line of its input

A line asks for one pass over a share of the queries, {"setting": efSearch, "batched": true,
"share": 1.0}; the answer has their number and its seconds, and what was found by a batched one is
in FOLDER/ENGINE.found.npy. The answer to the first line is {"resident_bytes": N}.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

K = 10
SINGLE_QUERIES = 300
LINKS = 32  # M


class Faiss:
    def __init__(self, folder: Path, engine: str, threads: int, candidates: int) -> None:
        import faiss

        self._faiss = faiss
        self._file = str(folder / engine)
        self._engine = engine
        self._candidates = candidates
        faiss.omp_set_num_threads(threads)

    def build(self, vectors: np.ndarray) -> None:
        faiss = self._faiss
        dimension = vectors.shape[1]
        if self._engine == "faiss-flat":
            index = faiss.IndexFlatIP(dimension)
        else:
            index = faiss.IndexHNSWFlat(dimension, LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = self._candidates
        index.add(vectors)
        faiss.write_index(index, self._file)

    def load(self, rows: int, dimension: int) -> None:
        self._index = self._faiss.read_index(self._file)

    def search(self, queries: np.ndarray, setting: int | None) -> np.ndarray:
        if setting is not None:
            self._index.hnsw.efSearch = setting
        return self._index.search(queries, K)[1]


class Hnswlib:
    def __init__(self, folder: Path, engine: str, threads: int, candidates: int) -> None:
        self._file = str(folder / engine)
        self._threads = threads
        self._candidates = candidates

    def build(self, vectors: np.ndarray) -> None:
        self._index = self._empty(vectors.shape[1])
        self._index.init_index(len(vectors), M=LINKS, ef_construction=self._candidates)
        self._index.set_num_threads(self._threads)
        self._index.add_items(vectors)
        self._index.save_index(self._file)

    def load(self, rows: int, dimension: int) -> None:
        self._index = self._empty(dimension)
        self._index.load_index(self._file, max_elements=rows)
        self._index.set_num_threads(self._threads)

    def search(self, queries: np.ndarray, setting: int | None) -> np.ndarray:
        self._index.set_ef(setting)
        return self._index.knn_query(queries, K)[0]

    def _empty(self, dimension: int):
        import hnswlib

        return hnswlib.Index("ip", dimension)


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("engine", choices=["faiss-flat", "faiss-hnsw", "hnswlib"])
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--candidates", type=int, default=128, help="efConstruction")
parser.add_argument("--build", action="store_true")
arguments = parser.parse_args()

vectors = np.load(arguments.folder / "vectors.npy", mmap_mode="r")
queries = np.load(arguments.folder / "queries.npy")
engine = (Hnswlib if arguments.engine == "hnswlib" else Faiss)(
    arguments.folder, arguments.engine, arguments.threads, arguments.candidates
)
if arguments.build:
    start_time = time.perf_counter()
    engine.build(vectors)
    print(json.dumps({"build_seconds": round(time.perf_counter() - start_time, 1)}))
    raise SystemExit
before = anonymous_bytes()
loading = True
engine.load(*vectors.shape)
for line in sys.stdin:
    asked = json.loads(line)
    chosen = queries[: max(1, round(asked["share"] * len(queries)))]
    start_time = time.perf_counter()
    if asked["batched"]:
        positions = engine.search(chosen, asked["setting"])
        seconds = time.perf_counter() - start_time
        np.save(arguments.folder / f"{arguments.engine}.found.npy", positions)
    else:
        chosen = chosen[: round(asked["share"] * SINGLE_QUERIES)]
        for query in chosen:
            engine.search(query[None], asked["setting"])
        seconds = time.perf_counter() - start_time
    answer = {"queries": len(chosen), "seconds": seconds}
    if loading:
        answer = {"resident_bytes": anonymous_bytes() - before}
    loading = False
    print(json.dumps(answer), flush=True)
