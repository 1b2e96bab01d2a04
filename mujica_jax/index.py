"""Indexes from the command line: build one, measure its recall, ask it.

    python -m mujica_jax.index build --corpus FILE [FILE ...] --kind scann|accelerator|bm25 [--embedder NAME] --out DIR
    python -m mujica_jax.index build --embeddings INDEX --kind scann --out DIR
    python -m mujica_jax.index build --corpus FILE [FILE ...] --kind graph [--languages en] [--properties P57 ...] --out DIR
    python -m mujica_jax.index estimate --corpus FILE [FILE ...] --kind KIND [--passages N]
    python -m mujica_jax.index recall --index DIR --questions FILE [--k 2 5 20]
    python -m mujica_jax.index query --index DIR "Who directed The Purple Shore?"
    python -m mujica_jax.index query --index DIR Q42
    python -m mujica_jax.index serve --index DIR --host 0.0.0.0 --port 8600

`recall` prints one JSON line: the mean share of a question's gold titles (`supporting_facts`) among the titles of its first k passages, in
percent. docs/retrieval.md has the formats, the embedders and the measured numbers.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mujica_jax.config.schema import DEFAULT_EMBEDDER
from mujica_jax.errors import UserError
from mujica_jax.runtime.standard_output import run_program

if TYPE_CHECKING:
    from mujica_jax.report import Progress
    from mujica_jax.retrieval.graph.index import GraphRecipe
    from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
    from mujica_jax.retrieval.text.index import Index

PROGRAM = "python -m mujica_jax.index"
GRAPH = "graph"  # the kind of index that holds triples
DEFAULT_K = 5
MAX_NAMESAKES = 5  # other entities of one name that are shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 2 a mistake of the user's; 130 interrupted (a build goes on with the same command)."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted" + ": the same command goes on where this one was" * (given.run is build), file=sys.stderr)
        return 130
    return 0


def build(given: argparse.Namespace) -> None:
    from mujica_jax.report import Progress
    from mujica_jax.retrieval.text import index as indexes
    from mujica_jax.retrieval.text.embedders import find_embedder

    if "://" in given.out:
        raise UserError(
            f"an index is built on local disk and --out is {given.out}: give a directory, and copy it there afterwards"
        )
    _refuse_unread(given, given.kind)
    embeds = given.kind not in ("bm25", GRAPH) and given.embeddings is None
    if given.kind == GRAPH:
        build_graph(given)
        return
    if (given.corpus is None) == (given.embeddings is None) or (given.skip and given.corpus is None):
        raise UserError("an index is made of passages: give --corpus with or without --skip, or --embeddings alone")
    recipe = indexes.Recipe(
        kind=given.kind,
        corpus=tuple(given.corpus or ()),
        source=given.embeddings,
        skip=given.skip,
        tokeniser=given.tokenizer or "default",
        embedder=find_embedder(given.embedder or DEFAULT_EMBEDDER, given.prefixes) if embeds else None,
        storage=given.storage or "bfloat16",
        recall_target=given.recall_target,
    )
    progress = Progress(sys.stderr)
    manifest, found = indexes.build(Path(given.out), recipe, _Reported(progress))
    if manifest["skipped"]:
        progress.line(f"{manifest['skipped']:,} passages were left out; the first one: {manifest['first_skipped']}")
    progress.line(
        f"{given.out}: {manifest['passages']:,} passages, version {manifest['version']}{' (was there already)' * found}"
    )


def estimate(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.text import estimates
    from mujica_jax.retrieval.text import index as indexes
    from mujica_jax.retrieval.text.corpus import Skipped, stream_corpus
    from mujica_jax.retrieval.text.embedders import find_embedder

    _refuse_unread(given, given.kind)
    if given.kind == GRAPH:
        if given.passages is not None:
            raise UserError(f"--passages is {given.passages} and a graph has none: leave it out")
        from mujica_jax.retrieval.graph.estimates import estimate_graph

        print(json.dumps(dataclasses.asdict(estimate_graph(_graph_recipe(given)))))
        return
    recipe = indexes.Recipe(
        kind=given.kind,
        corpus=tuple(given.corpus),
        tokeniser=given.tokenizer or "default",
        embedder=find_embedder(given.embedder or DEFAULT_EMBEDDER, given.prefixes) if given.kind != "bm25" else None,
        storage=given.storage or "bfloat16",
    )
    skipped = Skipped() if given.skip else None
    sample, passages = estimates.count_and_sample(stream_corpus(recipe.corpus, skipped), given.passages)
    if not sample or passages < 1:
        raise UserError(
            f"{', '.join(recipe.corpus)}: {len(sample)} passages were read and {passages} are asked for: give at least one"
        )
    left_out = {} if skipped is None else {"skipped": skipped.count}
    print(json.dumps(dataclasses.asdict(estimates.estimate(recipe, sample, passages)) | left_out))


def recall(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.text.corpus_records import read_records
    from mujica_jax.retrieval.text.index import read_kind
    from mujica_jax.retrieval.text.passages import PassageFile

    questions = list(_questions(read_records(given.questions), given.questions))
    if not questions:
        raise UserError(f"{given.questions} holds no question: give a file with at least one")
    _refuse_unread(given, read_kind(given.index))
    index = _opened(given)
    most = max(given.k)
    _check_k(min(given.k), index)
    _check_k(most, index)
    wanted = set().union(*(gold for _, gold in questions))
    assert isinstance(index.passages, PassageFile), "an index that was opened"
    unknown = wanted - {passage.title for passage in index.passages.titled(wanted)}
    if unknown == wanted:
        raise UserError(
            f"none of the {len(wanted):,} gold titles of {given.questions} is a title in {given.index}: give the questions of its corpus"
        )
    began = time.monotonic()
    encoded = index.encode([text for text, _ in questions])
    middle = time.monotonic()
    found = index.search_encoded(encoded, most)
    ended = time.monotonic()
    shares = {k: 0.0 for k in given.k}
    for (_, gold), hits in zip(questions, found, strict=True):
        titles: list[Any] = [index.passages[position].title for position, _ in hits]
        for k in shares:
            shares[k] += len(gold & set(titles[:k])) / len(gold)
    result: dict[str, Any] = {f"recall@{k}": round(100 * share / len(questions), 2) for k, share in shares.items()}
    result |= {
        "questions": len(questions),
        "passages": len(index.passages),
        "unknown_titles": len(unknown),  # gold ones that the index has not, so that no search finds them
        "encode_seconds": round(middle - began, 3),
        "search_seconds": round(ended - middle, 3),
    }
    print(json.dumps(result))


def query(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.text.corpus_records import check_text
    from mujica_jax.retrieval.text.index import read_kind

    check_text(given.text)
    kind = GRAPH if given.index.startswith("sparql+") else read_kind(given.index)
    _refuse_unread(given, kind)
    if kind == GRAPH:
        query_graph(given)
        return
    index = _opened(given)
    k = min(DEFAULT_K, len(index.passages)) if given.k is None else given.k
    _check_k(k, index)
    for position, score in index.search([given.text], k)[0]:
        passage = index.passages[position]
        found = {
            "score": round(score, 4),
            "position": position,
            "id": passage.id,
            "title": passage.title,
            "text": passage.text,
        }
        print(json.dumps(found, ensure_ascii=False))


def serve(given: argparse.Namespace) -> None:
    from mujica_jax.config.cache_folders import cache_folder
    from mujica_jax.retrieval.retriever import IndexRetriever
    from mujica_jax.retrieval.search_cache import SearchCache
    from mujica_jax.retrieval.service import address_of, make_app, open_port, serve_until_told
    from mujica_jax.retrieval.text.index import read_kind

    if given.most_waiting < 1:
        raise UserError(f"--most-waiting is {given.most_waiting}: give at least 1, or nobody is answered")
    if not 0 < given.deadline_seconds < math.inf:
        raise UserError(f"--deadline-seconds is {given.deadline_seconds:g}: give a number of seconds above 0")
    kind = read_kind(given.index)
    _refuse_unread(given, kind)
    if kind == GRAPH:
        raise UserError(
            f"{given.index} is a graph, which a SPARQL server serves: `pip install oxigraph`, then `oxigraph serve-read-only --location "
            f"{given.index}/graph --bind {given.host}:{given.port}`, and give --task.index sparql+http://HOST:{given.port}/query"
        )
    opened = open_port(given.host, given.port)
    with contextlib.closing(opened):
        index = _opened(given)
        retriever = IndexRetriever(
            index,
            cache=None if kind == "bm25" else SearchCache(cache_folder("searches"), index.version),
            max_waiting=given.most_waiting,
            deadline_seconds=given.deadline_seconds,
        )
        told = f"serving {given.index} (version {index.version}) at {address_of(opened)}"
        serve_until_told(make_app(retriever, kind), opened, told)
    print(retriever.statistics.sentence(), flush=True)


def build_graph(given: argparse.Namespace) -> None:
    from mujica_jax.report import Progress
    from mujica_jax.retrieval.graph.index import build as build_index

    if given.corpus is None:
        raise UserError("a graph is made of files of triples: give --corpus")
    progress = Progress(sys.stderr)
    manifest, found = build_index(Path(given.out), _graph_recipe(given), _Reported(progress))
    if manifest["skipped"]:
        progress.line(f"{manifest['skipped']:,} lines were left out; the first one: {manifest['first_skipped']}")
    names = f" and {manifest['names']:,} names" if manifest["names"] else ""  # tables name entities in their triples
    progress.line(
        f"{given.out}: {manifest['triples']:,} triples{names}, version {manifest['version']}"
        f"{' (was there already)' * found}"
    )


def query_graph(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.errors import RetrievalError
    from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
    from mujica_jax.retrieval.graph.index import open_graph

    graph = open_endpoint(given.index) if given.index.startswith(SCHEME) else open_graph(given.index)
    try:
        asyncio.run(_print_triples(graph, given.index, given.text, given.k))
    except RetrievalError as error:
        raise UserError(error.reason) from error


async def _print_triples(graph: "KnowledgeGraph", index: str, text: str, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"k is {limit}: give at least 1")
    keys = await graph.find(text)
    if not keys:
        raise UserError(
            f"{index} knows no entity {text!r}: give a Q-id, or a label or an alias as the graph writes it (in "
            f"{', '.join(graph.languages)})"
        )
    if len(keys) > 1:
        others = ", ".join(keys[1 : 1 + MAX_NAMESAKES]) + ", ..." * (len(keys) > 1 + MAX_NAMESAKES)
        print(
            f"{len(keys)} entities are called {text!r}: these are the triples of {keys[0]}, not of {others}",
            file=sys.stderr,
        )
    for triple in await graph.triples_of(keys[0], limit):
        shown = dataclasses.asdict(triple)
        print(json.dumps(shown, ensure_ascii=False))


def _graph_recipe(given: argparse.Namespace) -> "GraphRecipe":
    from mujica_jax.retrieval.graph import sparql
    from mujica_jax.retrieval.graph.files import Choice
    from mujica_jax.retrieval.graph.index import GraphRecipe

    choice = Choice(
        languages=tuple(tag.lower() for tag in given.languages or sparql.LANGUAGES),
        properties=tuple(dict.fromkeys(given.properties or ())),
    )
    return GraphRecipe(files=tuple(given.corpus), choice=choice, skip=given.skip)


class _Reported:
    """Tells the console how far a build is."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        with self._progress.stage(name, total=total, unit=unit) as stage:
            yield stage.update


def _refuse_unread(given: argparse.Namespace, kind: str) -> None:
    """Flags that a command knows and an index of this kind does not read."""
    dense, taken = kind not in ("bm25", GRAPH), getattr(given, "embeddings", None) is not None
    unread = {
        "languages": kind != GRAPH,
        "properties": kind != GRAPH,
        "tokenizer": kind != "bm25",
        "embedder": not dense or taken,
        "prefixes": not dense or taken,
        "storage": not dense or taken,
        "embeddings": not dense,
        "recall_target": kind != "accelerator",
    }
    for name, of_no_use in unread.items():
        if of_no_use and (value := getattr(given, name, None)) is not None:
            what = f"kind {kind}" + (" with --embeddings" if dense and taken else "")
            shown = " ".join(value) if isinstance(value, list) else value
            raise UserError(
                f"--{name.replace('_', '-')} is {shown} and an index of {what} does not read it: leave it out"
            )


def _opened(given: argparse.Namespace) -> "Index":
    from mujica_jax.retrieval.text.index import open_index

    return open_index(given.index, given.embedder, given.prefixes, given.recall_target)


def _questions(records: Iterator[tuple[int, object]], file: str) -> Iterator[tuple[str, set[str]]]:
    """Text and gold titles of each question; official records name a sentence with each title."""
    from mujica_jax.retrieval.text.corpus_records import check_text

    for line, record in records:
        text = record.get("question") if isinstance(record, dict) else None
        facts: Any = record.get("supporting_facts") if isinstance(record, dict) else None
        titles: list[Any] = [
            fact[0] if isinstance(fact, list) and fact else fact for fact in (facts if isinstance(facts, list) else ())
        ]
        if not isinstance(text, str) or not titles or not all(isinstance(title, str) for title in titles):
            raise UserError(
                f"{file}, line {line}: a question needs `question` and a list of gold titles in `supporting_facts`"
            )
        try:
            for said in (text, *titles):
                check_text(said)
        except UserError as error:
            raise UserError(f"{file}, line {line}: {error}") from error
        yield text, set(titles)


def _check_k(k: int, index: "Index") -> None:
    if not 1 <= k <= len(index.passages):
        raise UserError(
            f"k is {k} and the index holds {len(index.passages):,} passages: give 1 to {len(index.passages)}"
        )


def _share(text: str) -> float:
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Build, measure and ask indexes of passages and graphs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__, help=summary, description=summary)
        made.set_defaults(run=run)
        return made

    def with_embedder(made: argparse.ArgumentParser, default: str) -> None:
        text = f"a folder, minilm, or a Hugging Face name ({default})"
        made.add_argument("--embedder", metavar="NAME", help=text)
        made.add_argument(
            "--prefixes", choices=("none", "bge", "e5"), help="instead of those that follow from the name"
        )

    def with_target(made: argparse.ArgumentParser) -> None:
        text = "let the accelerator search approximately: the share of the k best that it should find"
        made.add_argument("--recall-target", type=_share, metavar="SHARE", help=text)

    estimated = command(estimate, "Bytes and seconds that an index will take, as one JSON line.")
    estimated.add_argument("--corpus", nargs="+", required=True, metavar="FILE")
    estimated.add_argument("--passages", type=int, help="as if it had so many (default: all are counted)")
    built = command(build, "Build an index of a corpus. A killed build goes on with the same command.")
    built.add_argument(
        "--corpus", nargs="+", metavar="FILE", help="JSON arrays, JSON Lines, Parquet, tar; .tsv and .nt for graphs"
    )
    text = "a dense index whose passages and embeddings are taken instead"
    built.add_argument("--embeddings", metavar="INDEX", help=text)
    built.add_argument("--out", required=True, metavar="DIR", help="directory of the index")
    for made in (built, estimated):
        made.add_argument("--kind", choices=("accelerator", "bm25", "scann", GRAPH), required=True)
        made.add_argument("--tokenizer", choices=("default", "elasticsearch"), help="of bm25")
        text = "of a graph: labels and texts in these, the first before the others (en mul)"
        made.add_argument("--languages", nargs="+", metavar="TAG", help=text)
        text = "of a graph: only these, as P57 or full addresses (all)"
        made.add_argument("--properties", nargs="+", metavar="NAME", help=text)
        made.add_argument("--storage", choices=("bfloat16", "int8"), help="of embeddings on disk (bfloat16)")
        made.add_argument("--skip", action="store_true", help="leave out and count what would be refused")
    with_target(built)
    for made in (built, estimated):
        with_embedder(made, f"default {DEFAULT_EMBEDDER}")

    measured = command(recall, "Recall of gold titles, as one JSON line.")
    measured.add_argument(
        "--questions", required=True, metavar="FILE", help="records with question and supporting_facts"
    )
    measured.add_argument("--k", type=int, nargs="+", default=[2, 5, 20])
    asked = command(query, "The passages found for one query, or the triples of an entity of a graph, as JSON lines.")
    asked.add_argument("text", metavar="QUERY", help="of a graph: a Q-id, a label or an alias")
    asked.add_argument("--k", type=int, help=f"at most so many ({DEFAULT_K} passages, all triples)")
    served = command(serve, "An HTTP service of passages: POST /search, GET /healthz, GET /metrics.")
    served.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1; 0.0.0.0 for other hosts)")
    served.add_argument("--port", type=int, default=8600)
    served.add_argument("--most-waiting", type=int, default=1024, help="queries in line before others get 429")
    served.add_argument("--deadline-seconds", type=float, default=30.0, help="for one query")
    for made in (measured, asked, served):
        made.add_argument("--index", required=True, metavar="DIR")
        with_target(made)
        with_embedder(made, "default: the one the index was built with")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_program(main))
