"""Searching and embedding, also beside faiss, hnswlib and sentence-transformers; one JSON line a row.

    python benchmarks/retrieval.py search --work FOLDER [--rows 1000000] [--peers-python PYTHON] \\
        [--rounds 5] [--engines scann faiss-hnsw]
    python benchmarks/retrieval.py encode --corpus FILE [--embedder minilm] [--peers-python PYTHON] [--rounds 5]
    python benchmarks/retrieval.py exact [--rows 10000000 --dimension 1024 --queries 256 --k 10]
    python benchmarks/retrieval.py recall --data DIR --work FOLDER [--embedder minilm] [--sentences]

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

`exact`: exact search over random embeddings in the memory of the devices that are here. The roof is
the time in which the devices' memory can be read once: every call reads all embeddings, whatever
the number of queries. It is measured beside the search, as a sum over a large array.

`recall`: what ScaNN loses against exact search on questions that its rule was not made from, those
of HotpotQA and MuSiQue. DIR has the folders 2wikimultihopqa, hotpotqa, musique and nq_open with
files in their official formats (their names stand below). The corpus is that of 2Wiki and every
passage given with a question of HotpotQA and MuSiQue, once each; with --sentences each of their
sentences is a passage, so that there are enough for the rule to leave partitions out. FOLDER gets
it, and an index by `index build` that the next run finds again. A row for each set and each number
of partitions searched: recall of gold titles at 5 by exact search and by ScaNN, in percent.
`"partitions": "by the rule"` is what `index build` would search. FOLDER/search gets the embeddings
and those of all questions (2Wiki's and NQ's too) as `search --work FOLDER/search --rows PASSAGES`
wants them, which measures ScaNN on real text beside its peers; of an embedder of its 384 numbers.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
from clustered_vectors import DIMENSION, K, make_vectors, recall, save_queries

PEERS = Path(__file__).parent / "peers"
OURS = ("scann", "exact")
THEIRS = ("faiss-flat", "faiss-hnsw", "hnswlib")
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
DRAWN_ROWS = 65_536  # of `exact`, repeated: what the rows hold does not matter there

# Of `recall`: files under --data.
CORPUS = "2wikimultihopqa/corpus_6119.json.gz"
QUESTION_FILES = {
    "hotpotqa": ("hotpotqa/dev_distractor_visible.jsonl.gz", "hotpotqa/train_100.json.gz"),
    "musique": ("musique/dev_visible.jsonl.gz", "musique/train_100.json.gz"),
}
OTHER_QUESTION_FILES = (
    "2wikimultihopqa/questions_visible.jsonl.gz",
    "nq_open/dev_500.jsonl.gz",
)
SHARES_SEARCHED = (0.1, 0.2, 0.3, 0.5)  # of the partitions
GOLD_K = 5
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


class Engine:
    """A search engine in its own process.

    See peers/vector_search.py for the lines that are exchanged.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        program = [arguments.peers_python, str(PEERS / "vector_search.py")]
        if name in OURS:
            program = [sys.executable, __file__, "engine"]
        command = [
            *program,
            str(arguments.work),
            name,
            "--threads",
            str(arguments.threads),
            "--candidates",
            str(arguments.candidates),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(arguments.threads),
            "JAX_PLATFORMS": "cpu",
        }
        built = arguments.work / f"{name}.json"
        if not built.exists():
            build = subprocess.run(
                [*command, "--build"], env=environment, stdout=PIPE, text=True, check=True
            )
            built.write_text(build.stdout.splitlines()[-1])
        self.figures = json.loads(built.read_text())
        self._process = subprocess.Popen(
            command, env=environment, stdin=PIPE, stdout=PIPE, text=True
        )
        # what is loaded late is loaded now
        self._say({"setting": SETTINGS[name][-1], "batched": True, "share": 0.02})
        self.figures |= json.loads(self._heard())

    def pass_over(self, setting: float | None, batched: bool) -> float:
        """Return queries a second."""
        share = 0.1 if self.name in EVERY_ROW else 1.0
        self._say({"setting": setting, "batched": batched, "share": share})
        answer = json.loads(self._heard())
        return answer["queries"] / answer["seconds"]

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


def search(arguments: argparse.Namespace) -> None:
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not (arguments.work / "exact.npy").exists():
        make_vectors(arguments.work, arguments.rows)
    exact = np.load(arguments.work / "exact.npy")
    rows = len(np.load(arguments.work / "vectors.npy", mmap_mode="r"))
    if rows != arguments.rows:
        raise SystemExit(
            f"{arguments.work} holds {rows:,} vectors and --rows is {arguments.rows:,}: give another --work"
        )
    names = [name for name in arguments.engines if name in OURS or arguments.peers_python]
    engines = [Engine(name, arguments) for name in names]
    cells = [(engine, setting) for engine in engines for setting in SETTINGS[engine.name]]
    speeds: dict[tuple[str, float | None, bool], list[float]] = {}
    recalls = {}
    for _ in range(arguments.rounds):
        for engine, setting in cells:
            for batched in (True, False):
                speeds.setdefault((engine.name, setting, batched), []).append(
                    engine.pass_over(setting, batched)
                )
                if batched:
                    recalls[engine.name, setting] = recall(
                        np.load(arguments.work / f"{engine.name}.found.npy"), exact
                    )
    for engine, setting in cells:
        together, single = (
            statistics.median(speeds[engine.name, setting, kind]) for kind in (True, False)
        )
        row = {
            "engine": engine.name,
            "setting": setting,
            "rows": rows,
            "recall@10": round(recalls[engine.name, setting], 4),
            "queries_per_second": round(together, 1),
            "one_by_one_per_second": round(single, 1),
            **engine.figures,
        }
        print(json.dumps(row), flush=True)
    for engine in engines:
        engine.end()


def engine(arguments: argparse.Namespace) -> None:
    """Run one of our engines, as peers/vector_search.py runs one of theirs."""
    from mujica_jax.retrieval.text.scann import ScannSearch, parameters_for, write_scann
    from mujica_jax.retrieval.text.scann_package import package
    from mujica_jax.retrieval.text.vectors import open_embeddings

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.threads]))
    queries = np.load(arguments.folder / "queries.npy")
    rows = (arguments.folder / "embeddings.bfloat16").stat().st_size // (2 * DIMENSION)
    embeddings = open_embeddings(arguments.folder, rows, DIMENSION, "bfloat16")
    parameters = parameters_for(rows, of_length_1=True)
    place = arguments.folder / "scann"
    start_time = time.perf_counter()
    if arguments.build:
        if arguments.engine == "scann":
            write_scann(embeddings, parameters, arguments.folder / ".scann.new").replace(place)
        print(json.dumps({"build_seconds": round(time.perf_counter() - start_time, 1)}))
        return
    if arguments.engine == "scann":
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
        elif arguments.engine == "scann":
            loaded.parameters = parameters  # pyright: ignore[reportAttributeAccessIssue]
        chosen = queries[: max(1, round(asked["share"] * len(queries)))]
        start_time = time.perf_counter()
        if asked["batched"]:
            _, positions = loaded.search(chosen, K)
            seconds = time.perf_counter() - start_time
            np.save(arguments.folder / f"{arguments.engine}.found.npy", positions)
        else:
            chosen = chosen[: round(asked["share"] * SINGLE_QUERIES)]
            for query in chosen:
                loaded.search(query[None], K)
            seconds = time.perf_counter() - start_time
        answer = {"queries": len(chosen), "seconds": seconds}
        if loading:
            answer = {"resident_bytes": anonymous_bytes() - before}
        loading = False
        print(json.dumps(answer), flush=True)


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def encode(arguments: argparse.Namespace) -> None:
    from mujica_jax.retrieval.embedding.find import find_embedder
    from mujica_jax.retrieval.text.corpus import read_corpus

    passages = [passage.contents for passage in read_corpus([arguments.corpus])]
    chosen = np.random.default_rng(0).choice(
        len(passages), min(arguments.passages, len(passages)), replace=False
    )
    texts = [passages[place] for place in chosen]
    embedder_folder = find_embedder(arguments.embedder)
    embedder = embedder_folder.load()
    # The first call compiles.
    ours = embedder.embed(texts, "passage")
    seconds: dict[str, list[float]] = {"ours": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        peer = None
        agreement = None
        if arguments.peers_python:
            command = [
                arguments.peers_python,
                str(PEERS / "sentence_encoding.py"),
                str(file),
                str(embedder_folder.folder),
            ]
            environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
            command += ["--threads", str(arguments.threads)]
            peer = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)
            # The first one is not counted.
            _pass_of(peer, PEER_BATCHES[0])
            agreement = float((np.load(f"{file}.npy") * ours).sum(1).min())
        for _ in range(arguments.rounds):
            start_time = time.perf_counter()
            embedder.embed(texts, "passage")
            seconds["ours"].append(time.perf_counter() - start_time)
            for size in PEER_BATCHES if peer else ():
                seconds.setdefault(f"sentence-transformers, batches of {size}", []).append(
                    _pass_of(peer, size)
                )
        if peer is not None:
            assert peer.stdin is not None
            peer.stdin.close()
            peer.wait()
    for name, pass_seconds in seconds.items():
        speed = len(texts) / statistics.median(pass_seconds)
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


def exact_search(arguments: argparse.Namespace) -> None:
    """Measure exact search over random embeddings on the devices that are here."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes

    from mujica_jax.retrieval.text.exact import ExactSearch
    from mujica_jax.retrieval.text.vectors import Embeddings
    from mujica_jax.runtime.chips import fastest_seconds

    draw = np.random.default_rng(0)
    drawn_rows = min(DRAWN_ROWS, arguments.rows)
    drawn = draw.standard_normal((drawn_rows, arguments.dimension), np.float32)
    vectors = np.resize(drawn.astype(ml_dtypes.bfloat16), (arguments.rows, arguments.dimension))
    queries = draw.standard_normal((arguments.queries, arguments.dimension), np.float32)

    start_time = time.perf_counter()
    index = ExactSearch(Embeddings(vectors))
    index.search(queries[:1], arguments.k)
    load_seconds = time.perf_counter() - start_time

    k = arguments.k
    all_seconds = fastest_seconds(lambda: index.search(queries, k), spend_seconds=5.0)
    query_seconds = fastest_seconds(lambda: index.search(queries[:1], k), spend_seconds=5.0)

    array = jnp.ones(64 << 20)
    total = jax.jit(jnp.sum)
    sum_seconds = fastest_seconds(lambda: total(array).block_until_ready())
    bandwidth = array.nbytes / sum_seconds * index.mesh.size
    roof_seconds = vectors.nbytes / bandwidth
    row = {
        "rows": arguments.rows,
        "dimension": arguments.dimension,
        "load_seconds": round(load_seconds, 1),
        "queries_per_second": round(arguments.queries / all_seconds, 1),
        "one_query_milliseconds": round(1e3 * query_seconds, 2),
        "memory_gigabytes_per_second": round(bandwidth / 1e9, 1),
        "share_of_roof_one_query": round(roof_seconds / query_seconds, 3),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(row))


def gold_recall(arguments: argparse.Namespace) -> None:
    """Compare ScaNN with exact search by the gold titles among the passages that they find."""
    from mujica_jax.commands import index
    from mujica_jax.retrieval.embedding.find import find_embedder
    from mujica_jax.retrieval.text.corpus import PassageFile
    from mujica_jax.retrieval.text.dense import best_rows
    from mujica_jax.retrieval.text.scann import ScannSearch, parameters_for, write_scann
    from mujica_jax.retrieval.text.vectors import open_embeddings

    # Build the exact index, and ScaNN's files beside it.
    arguments.work.mkdir(parents=True, exist_ok=True)
    corpus = arguments.work / "corpus.jsonl"
    folder = arguments.work / "exact"
    write_corpus(arguments.data, corpus, sentences=arguments.sentences)
    build = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", arguments.embedder]
    if status := index.main([*build, "--out", str(folder)]):
        raise SystemExit(status)
    passages = PassageFile(folder / "passages.arrow")
    titles = [passage.title for passage in passages]
    embedder_folder = find_embedder(arguments.embedder)
    embeddings = open_embeddings(folder, len(passages), embedder_folder.dimension, "bfloat16")
    rule = parameters_for(len(passages), of_length_1=embeddings.of_length_1())
    scann_folder = write_scann(embeddings, rule, arguments.work / "scann")
    scann = ScannSearch.load(scann_folder, len(passages), rule)

    # Search for the questions of each set.
    embedder = embedder_folder.load()
    all_queries = []
    for file in OTHER_QUESTION_FILES:
        questions = [record["question"] for record in read_question_records(arguments.data / file)]
        all_queries.append(embedder.embed(questions, "query"))
    for name, files in QUESTION_FILES.items():
        records = [
            record for file in files for record in read_question_records(arguments.data / file)
        ]
        gold_titles = [gold_titles_of(record) for record in records]
        queries = embedder.embed([record["question"] for record in records], "query")
        all_queries.append(queries)
        exact_positions = best_rows(queries, embeddings.float32(), GOLD_K)[1]
        exact_percent = gold_percent(exact_positions, titles, gold_titles)
        for share in (None, *SHARES_SEARCHED):
            searched = rule.leaves_searched if share is None else round(share * rule.leaves)
            scann.parameters = dataclasses.replace(rule, leaves_searched=searched)
            scann_positions = scann.search(queries, GOLD_K)[1]
            row = {
                "questions": f"{name}, {len(records)}",
                "passages": len(passages),
                "partitions": "by the rule" if share is None else share,
                "searched": f"{searched} of {rule.leaves}",
                "exact_recall@5": exact_percent,
                "scann_recall@5": gold_percent(scann_positions, titles, gold_titles),
            }
            print(json.dumps(row), flush=True)

    # Leave vectors and queries for `search`.
    if embedder_folder.dimension == DIMENSION:
        search_folder = arguments.work / "search"
        # Indexes of other vectors may lie there.
        shutil.rmtree(search_folder, ignore_errors=True)
        search_folder.mkdir()
        shutil.copyfile(folder / "embeddings.bfloat16", search_folder / "embeddings.bfloat16")
        vectors = embeddings.float32()
        np.save(search_folder / "vectors.npy", vectors)
        save_queries(search_folder, np.concatenate(all_queries), vectors)


def read_question_records(file: Path) -> Iterator[Any]:
    """Return the records of a file in one of the official formats."""
    from mujica_jax.retrieval.text.corpus_records import read_records

    return (record for _, record in read_records(file))


def passages_of(record: Any) -> Iterator[tuple[str, str]]:
    """Yield title and text of each passage given with a question."""
    if "paragraphs" in record:
        for paragraph in record["paragraphs"]:
            yield paragraph["title"], paragraph["paragraph_text"]
    else:
        for title, sentences in record["context"]:
            yield title, "".join(sentences)


def gold_titles_of(record: Any) -> set[str]:
    """Return the titles of a question's gold passages."""
    if "paragraphs" in record:
        return {
            paragraph["title"] for paragraph in record["paragraphs"] if paragraph["is_supporting"]
        }
    return {title for title, _ in record["supporting_facts"]}


def gold_percent(
    positions: np.ndarray, titles: Sequence[str], gold_titles: Sequence[set[str]]
) -> float:
    """Return the percentage of the gold titles that are found, on average over the questions."""
    shares = []
    for row, gold in zip(positions, gold_titles, strict=True):
        row_titles = {titles[position] for position in row if position >= 0}
        shares.append(len(gold & row_titles) / len(gold))
    return round(100 * float(np.mean(shares)), 2)


def write_corpus(data: Path, file: Path, *, sentences: bool) -> None:
    """Write the passages of all sets, each once and in the order in which they come."""
    passages: dict[tuple[str, str], None] = {}
    for record in read_question_records(data / CORPUS):
        passages[record["title"], record["text"].strip()] = None
    for names in QUESTION_FILES.values():
        for name in names:
            for record in read_question_records(data / name):
                for title, text in passages_of(record):
                    passages[title, text.strip()] = None
    if sentences:
        whole_passages = passages
        passages = {}
        for title, text in whole_passages:
            for sentence in SENTENCE_END.split(text):
                passages[title, sentence] = None
    lines = [
        json.dumps({"title": title, "text": text})
        for title, text in passages
        if title.strip() and text
    ]
    file.write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    searched, encoded = (commands.add_parser(run.__name__) for run in (search, encode))
    measured = commands.add_parser("exact")
    compared = commands.add_parser("recall")
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
    for command_parser in (searched, encoded):
        command_parser.add_argument("--rounds", type=int, default=5)
        command_parser.add_argument("--threads", type=int, default=2)
        command_parser.add_argument("--peers-python", metavar="PYTHON")
    measured.set_defaults(run=exact_search)
    measured.add_argument("--rows", type=int, default=10_000_000)
    measured.add_argument("--dimension", type=int, default=1024)
    measured.add_argument("--queries", type=int, default=256)
    measured.add_argument("--k", type=int, default=10)
    compared.set_defaults(run=gold_recall)
    compared.add_argument("--data", type=Path, required=True)
    compared.add_argument("--work", type=Path, required=True)
    compared.add_argument("--embedder", default="minilm")
    compared.add_argument("--sentences", action="store_true")
    # `search` starts this process.
    alone.set_defaults(run=engine)
    alone.add_argument("folder", type=Path)
    alone.add_argument("engine", choices=OURS)
    alone.add_argument("--threads", type=int, required=True)
    alone.add_argument("--candidates", type=int)
    alone.add_argument("--build", action="store_true")
    arguments = parser.parse_args()
    arguments.run(arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
