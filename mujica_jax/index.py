"""Indexes from the command line: build one, measure its recall, ask it.

    python -m mujica_jax.index build --corpus FILE [FILE ...] [--kind auto|scann|exact|bm25] [--embedder NAME] --out DIR
    python -m mujica_jax.index build --embeddings INDEX --kind scann --out DIR
    python -m mujica_jax.index build --corpus FILE [FILE ...] --kind graph [--languages en] [--properties P57] --out DIR
    python -m mujica_jax.index estimate --corpus FILE [FILE ...] [--kind KIND] [--passages N]
    python -m mujica_jax.index recall --index DIR --questions FILE [--k 2 5 20]
    python -m mujica_jax.index query --index DIR "Who directed The Purple Shore?"
    python -m mujica_jax.index query --index DIR Q42
    python -m mujica_jax.index serve --index DIR --host 0.0.0.0 --port 8600

Kind `auto` is the default: a dense index, which is exact up to 100,000 passages and ScaNN above.
`query` prints a list on a terminal and JSON lines into a file or pipe. docs/retrieval.md has the
formats, the embedders and the measured numbers, docs/graphs.md the graphs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.tasks import DEFAULT_EMBEDDER
from mujica_jax.errors import UserError, nearest
from mujica_jax.report.progress import Progress
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.estimates import estimate_corpus, estimate_graph
from mujica_jax.retrieval.graph import index as graphs
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
from mujica_jax.retrieval.graph.files import GraphSpec, is_table
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.manifest import AUTO, RECALL
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text.corpus_records import check_text
from mujica_jax.retrieval.text.dense import check_k
from mujica_jax.retrieval.text.embedders import find_embedder
from mujica_jax.retrieval.text.index import (
    MAX_EXACT_PASSAGES,
    Index,
    IndexSpec,
    open_index,
    read_kind,
)
from mujica_jax.retrieval.text.recall import measure_recall, read_questions
from mujica_jax.runtime.standard_output import run_program

PROGRAM = "python -m mujica_jax.index"
GRAPH = "graph"  # the kind of index that holds triples
KINDS = (AUTO, "exact", "bm25", "scann", GRAPH)
KIND_THAT_READS = {  # flags that no index of kind auto reads
    "languages": GRAPH,
    "properties": GRAPH,
    "tokenizer": "bm25",
    "hosts": "exact",
    "devices": "exact",
    "recall_target": "exact",
}
FORMER_KINDS = {"accelerator": "exact"}
DEFAULT_K = 5
MAX_NAMESAKES = 5  # other entities of one name that are shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 2 a user's mistake; 130 interrupted (a build goes on with the same
    command)."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted" + ": the same command goes on where this one was" * (given.run is build),
            file=sys.stderr,
        )
        return 130
    return 0


def build(given: argparse.Namespace) -> None:
    if "://" in given.out:
        raise UserError(
            f"an index is built on local disk and --out is {given.out}: give a directory, and copy "
            "it there afterwards"
        )
    _refuse_unread(given, given.kind)
    progress = Progress(sys.stderr)
    if given.kind == GRAPH:
        if given.corpus is None:
            raise UserError("a graph is made of files of triples: give --corpus")
        manifest, found = graphs.build(Path(given.out), _graph_spec(given), progress)
        # Tables name entities in their triples.
        names = f" and {manifest['names']:,} names" if manifest["names"] else ""
        what, left_out = f"{manifest['triples']:,} triples{names}", "lines"
    else:
        if (given.corpus is None) == (given.embeddings is None) or (
            given.skip and given.corpus is None
        ):
            raise UserError(
                "an index is made of passages: give --corpus with or without --skip, or "
                "--embeddings alone"
            )
        manifest, found = indexes.build(Path(given.out), _index_spec(given), progress)
        what, left_out = f"{manifest['passages']:,} passages", "passages"
    if manifest["skipped"]:
        progress.line(
            f"{manifest['skipped']:,} {left_out} were left out; the first one: "
            f"{manifest['first_skipped']}"
        )
    if given.kind == AUTO and found:
        progress.line(f"{given.out} is an index of kind {manifest['kind']}")
    if manifest["kind"] == "scann":
        progress.line(_recall_sentence(manifest[RECALL]))
    progress.line(
        f"{given.out}: {what}, version {manifest['version']}{' (was there already)' * found}"
    )


def _recall_sentence(recall: dict[str, Any]) -> str:
    """Say how much of what exact search finds a ScaNN index finds."""
    if "unmeasured" in recall:
        return f"recall beside exact search was not measured: {recall['unmeasured']}"
    return (
        f"recall@{recall['k']} beside exact search: {recall['percent']}% (queries: "
        f"{recall['queries']:,} passages)"
    )


def estimate(given: argparse.Namespace) -> None:
    _refuse_unread(given, given.kind)
    if given.kind != GRAPH:
        for name in ("hosts", "devices"):
            if (number := getattr(given, name)) is not None and number < 1:
                raise UserError(f"--{name} is {number}: give at least 1")
        found = estimate_corpus(_index_spec(given), given.passages, given.hosts or 1, given.devices)
    elif given.passages is None:
        found = estimate_graph(_graph_spec(given))
    else:
        raise UserError(f"--passages is {given.passages} and a graph has none: leave it out")
    print(json.dumps(found))


def recall(given: argparse.Namespace) -> None:
    questions = read_questions(given.questions)
    _refuse_unread(given, read_kind(given.index))
    print(
        json.dumps(measure_recall(_opened(given), given.index, questions, given.questions, given.k))
    )


def query(given: argparse.Namespace) -> None:
    check_text(given.text)
    if not given.text.strip():
        raise UserError(f"the query is {given.text!r}: write what is searched for between quotes")
    kind = GRAPH if given.index.startswith(SCHEME) else read_kind(given.index)
    _refuse_unread(given, kind)
    if kind == GRAPH:
        if given.k is not None and given.k < 1:
            raise UserError(f"k is {given.k}: give at least 1")
        graph = (
            open_endpoint(given.index)
            if given.index.startswith(SCHEME)
            else graphs.open_graph(given.index)
        )
        try:
            found = asyncio.run(_triples(graph, given.index, given.text, given.k))
        except RetrievalError as error:
            raise UserError(str(error)) from error
    else:
        index = _opened(given)
        k = min(DEFAULT_K, len(index.passages)) if given.k is None else given.k
        check_k(k, index.passages)
        found = [
            {
                "score": round(score, 4),
                "position": position,
                **dataclasses.asdict(index.passages[position]),
            }
            for position, score in index.search([given.text], k)[0]
        ]
    if not sys.stdout.isatty():
        for one in found:
            print(json.dumps(one, ensure_ascii=False))
        return
    width = shutil.get_terminal_size().columns
    for number, one in enumerate(found, start=1):
        if kind == GRAPH:
            lines = [f"{one['subject']} | {one['relation']} | {one['object']}"]
        else:
            text = textwrap.fill(one["text"], max(width - 4, 20))
            lines = [
                f"{one['title'] or 'untitled'} (id {one['id']}, score {one['score']})",
                *text.splitlines(),
            ]
        print("\n".join([f"{number:>3}. {lines[0]}", *(f"     {line}" for line in lines[1:])]))


def serve(given: argparse.Namespace) -> None:
    # Imported here: what serves takes half a second.
    from mujica_jax.retrieval.service import address_of, make_app, open_port, serve_until_told

    if given.max_waiting < 1:
        raise UserError(
            f"--max-waiting is {given.max_waiting}: give at least 1, or nobody is answered"
        )
    if not 0 < given.deadline_seconds < math.inf:
        raise UserError(
            f"--deadline-seconds is {given.deadline_seconds:g}: give a number of seconds above 0"
        )
    kind = read_kind(given.index)
    _refuse_unread(given, kind)
    if kind == GRAPH:
        raise UserError(
            f"{given.index} is a graph, which a SPARQL server serves: `pip install oxigraph`, then "
            f"`oxigraph serve-read-only --location {given.index}/graph --bind "
            f"{given.host}:{given.port}`, and give --task.index "
            f"sparql+http://HOST:{given.port}/query"
        )
    opened = open_port(given.host, given.port)
    with contextlib.closing(opened):
        index = _opened(given)
        retriever = IndexRetriever(
            index,
            cache=None if kind == "bm25" else SearchCache(cache_folder("searches"), index.version),
            max_waiting=given.max_waiting,
            deadline_seconds=given.deadline_seconds,
        )
        told = f"serving {given.index} (version {index.version}) at {address_of(opened)}"
        serve_until_told(make_app(retriever, kind), opened, told)
    print(retriever.statistics.sentence(), flush=True)


def _refuse_unread(given: argparse.Namespace, kind: str) -> None:
    """Flags that a command knows and an index of this kind does not read."""
    dense, taken = kind not in ("bm25", GRAPH), getattr(given, "embeddings", None) is not None
    files = getattr(given, "corpus", None) if kind == GRAPH else None
    tables = bool(files) and all(map(is_table, files))
    read = {
        "languages": kind == GRAPH and not tables,
        "properties": kind == GRAPH and not tables,
        "tokenizer": kind == "bm25",
        "embedder": dense and not taken,
        "prefixes": dense and not taken,
        "storage": dense and not taken,
        "embeddings": dense,
        "hosts": kind == "exact",
        "devices": kind == "exact",
        "recall_target": kind not in ("bm25", "scann", GRAPH, AUTO),
    }
    for name, is_read in read.items():
        if not is_read and (value := getattr(given, name, None)) is not None:
            what = f"kind {kind}" + (
                " with --embeddings" if dense and taken else " from tables" if tables else ""
            )
            shown = " ".join(value) if isinstance(value, list) else value
            flag = name.replace("_", "-")
            instead = (
                f", or give --kind {KIND_THAT_READS[name]}"
                if kind == AUTO and name in KIND_THAT_READS
                else ""
            )
            raise UserError(
                f"--{flag} is {shown} and an index of {what} does not read it: leave it "
                f"out{instead}"
            )


def _refuse_triples(files: Sequence[str]) -> None:
    """Check that no file is one of triples: they make a graph, which has to be asked for."""
    for file in files:
        if file.removesuffix(".gz").removesuffix(".bz2").endswith(".nt"):
            raise UserError(
                f"{file} holds triples and --kind is {AUTO}, an index of passages: give --kind "
                f"{GRAPH}"
            )


def _index_spec(given: argparse.Namespace) -> IndexSpec:
    if given.kind == AUTO:
        _refuse_triples(given.corpus or ())
    source = getattr(given, "embeddings", None)
    embeds = given.kind != "bm25" and source is None
    return IndexSpec(
        kind=given.kind,
        corpus=tuple(given.corpus or ()),
        source=source,
        skip=given.skip,
        tokeniser=given.tokenizer or "default",
        embedder=find_embedder(given.embedder or DEFAULT_EMBEDDER, given.prefixes)
        if embeds
        else None,
        storage=given.storage or "bfloat16",
        recall_target=getattr(given, "recall_target", None),
    )


def _graph_spec(given: argparse.Namespace) -> GraphSpec:
    return GraphSpec(
        files=tuple(given.corpus),
        languages=tuple(tag.lower() for tag in given.languages or sparql.LANGUAGES),
        properties=tuple(dict.fromkeys(given.properties or ())),
        skip=given.skip,
    )


def _opened(given: argparse.Namespace) -> Index:
    return open_index(given.index, given.embedder, given.prefixes, given.recall_target)


async def _triples(
    graph: KnowledgeGraph, index: str, name: str, limit: int | None
) -> list[dict[str, Any]]:
    """Of the likeliest entity of this name. Raises RetrievalError."""
    keys = await graph.find(name)
    if not keys:
        raise UserError(
            f"{index} knows no entity {name!r}: give a Q-id, or a label or an alias as the graph "
            f"writes it (in {', '.join(graph.languages)})"
        )
    if len(keys) > 1:
        others = ", ".join(keys[1 : 1 + MAX_NAMESAKES]) + ", ..." * (len(keys) > 1 + MAX_NAMESAKES)
        said = (
            f"{len(keys)} entities are called {name!r}: these are the triples of {keys[0]}, not of "
            f"{others}"
        )
        print(said, file=sys.stderr)
    return [dataclasses.asdict(triple) for triple in await graph.triples_of(keys[0], limit)]


def _kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(
            f"there is no kind {text}: {nearest(FORMER_KINDS.get(text, text), KINDS)}"
        )
    return text


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"{text} is no number between 0 and 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Build, measure and ask indexes of passages and graphs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__, help=summary, description=summary)
        made.set_defaults(run=run)
        return made

    estimated = command(estimate, "Bytes and seconds that an index will take, as one JSON line.")
    estimated.add_argument("--corpus", nargs="+", required=True, metavar="FILE")
    estimated.add_argument(
        "--passages", type=int, help="as if it had so many (default: all are counted)"
    )
    estimated.add_argument(
        "--hosts", type=int, help="of the job that searches an index of kind exact (1)"
    )
    estimated.add_argument("--devices", type=int, help="of each of these hosts (as many as here)")
    built = command(
        build, "Build an index of a corpus. A killed build goes on with the same command."
    )
    built.add_argument(
        "--corpus",
        nargs="+",
        metavar="FILE",
        help="JSON arrays, JSON Lines, Parquet, tar; .tsv and .nt for graphs",
    )
    text = "a dense index whose passages and embeddings are taken instead"
    built.add_argument("--embeddings", metavar="INDEX", help=text)
    built.add_argument("--out", required=True, metavar="DIR", help="directory of the index")
    for made in (built, estimated):
        text = f"auto: exact up to {MAX_EXACT_PASSAGES:,} passages, scann above (auto)"
        made.add_argument(
            "--kind", type=_kind, default=AUTO, metavar=f"{{{','.join(KINDS)}}}", help=text
        )
        made.add_argument("--tokenizer", choices=("default", "elasticsearch"), help="of bm25")
        text = "of a graph: labels and texts in these, the first before the others (en mul)"
        made.add_argument("--languages", nargs="+", metavar="TAG", help=text)
        text = "of a graph: only these, as P57 or full addresses (all)"
        made.add_argument("--properties", nargs="+", metavar="NAME", help=text)
        made.add_argument(
            "--storage", choices=("bfloat16", "int8"), help="of embeddings on disk (bfloat16)"
        )
        made.add_argument(
            "--skip", action="store_true", help="leave out and count what would be refused"
        )

    measured = command(recall, "Recall of gold titles, as one JSON line.")
    text = "records with question and supporting_facts"
    measured.add_argument("--questions", required=True, metavar="FILE", help=text)
    measured.add_argument("--k", type=int, nargs="+", default=[2, 5, 20])
    asked = command(
        query, "The passages found for one query, or the triples of an entity of a graph."
    )
    asked.add_argument("text", metavar="QUERY", help="of a graph: a Q-id, a label or an alias")
    asked.add_argument("--k", type=int, help=f"at most so many ({DEFAULT_K} passages, all triples)")
    served = command(
        serve, "An HTTP service of passages: POST /search, GET /healthz, GET /metrics."
    )
    served.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (127.0.0.1; 0.0.0.0 for other hosts)",
    )
    served.add_argument("--port", type=int, default=8600)
    served.add_argument(
        "--max-waiting", type=int, default=1024, help="queries in line before others get 429"
    )
    served.add_argument("--deadline-seconds", type=float, default=30.0, help="for one query")
    for made in (measured, asked, served):
        made.add_argument("--index", required=True, metavar="DIR")
    for made in (built, estimated, measured, asked, served):
        default = (
            f"default {DEFAULT_EMBEDDER}"
            if made in (built, estimated)
            else "default: the one it was built with"
        )
        text = f"a folder, minilm, or a Hugging Face name ({default})"
        made.add_argument("--embedder", metavar="NAME", help=text)
        text = "instead of those that follow from the name"
        made.add_argument("--prefixes", choices=("none", "bge", "e5"), help=text)
        if made is not estimated:
            text = "search approximately: the share of the k best that it should find"
            made.add_argument("--recall-target", type=_share, metavar="SHARE", help=text)
    return parser


if __name__ == "__main__":
    raise SystemExit(run_program(main))
