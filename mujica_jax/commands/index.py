"""Build, measure, query and serve indexes of passages and graphs.

    python -m mujica_jax.index build --corpus FILE [FILE ...] [--kind auto|scann|exact|bm25] \\
        [--embedder NAME] --out DIR
    python -m mujica_jax.index build --embeddings INDEX --kind scann --out DIR
    python -m mujica_jax.index build --corpus FILE [FILE ...] --kind graph [--languages en] \\
        [--properties P57] --out DIR
    python -m mujica_jax.index estimate --corpus FILE [FILE ...] [--kind KIND] [--passages N]
    python -m mujica_jax.index recall --index DIR --questions FILE [--k 2 5 20]
    python -m mujica_jax.index query --index DIR "Who directed The Purple Shore?"
    python -m mujica_jax.index query --index DIR Q42
    python -m mujica_jax.index serve --index DIR --host 0.0.0.0 --port 8600

The default kind `auto` builds a dense index: an exact one for up to 100,000 passages, and a ScaNN
index for more. `query` prints a list on a terminal, and JSON lines into a file or a pipe.

docs/guides/passages.md describes file formats and embedders and has measured numbers.
docs/guides/graphs.md describes graphs.
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
from mujica_jax.config.program_help import program_name
from mujica_jax.config.tasks import DEFAULT_EMBEDDER
from mujica_jax.errors import UserError, nearest
from mujica_jax.report.progress import Progress
from mujica_jax.retrieval.embedding.find import find_embedder
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
from mujica_jax.retrieval.text.documents import (
    DEFAULT_CHUNKING,
    Chunking,
    corpus_files,
    is_document,
)
from mujica_jax.retrieval.text.documents import SUFFIXES as DOCUMENT_SUFFIXES
from mujica_jax.retrieval.text.index import (
    MAX_EXACT_PASSAGES,
    Index,
    IndexSpec,
    open_index,
    read_kind,
)
from mujica_jax.retrieval.text.recall import measure_recall, read_questions

# Examples of the help of each sub-command, each with its meaning.
EXAMPLES = {
    "": {
        "build --corpus corpus.jsonl --kind bm25 --out indexes/words": "Build an index of words.",
        'query --index indexes/words "Who is the mayor of Venford?"': "Search it once.",
    },
    "build": {
        "--corpus corpus.jsonl --kind bm25 --out indexes/words": "Build an index of words.",
        "--corpus triples.tsv --kind graph --out indexes/graph": "Build a graph of triples.",
    },
    "estimate": {
        "--corpus corpus.jsonl --kind scann": "Say how large the index of a corpus will be.",
        "--corpus sample.jsonl --passages 21000000": "Say so from a sample of a larger corpus.",
    },
    "recall": {
        "--index indexes/words --questions dev.json": "Measure recall at 2, 5 and 20 passages.",
        "--index indexes/words --questions dev.json --k 1 10": "Measure recall at 1 and 10.",
    },
    "query": {
        '--index indexes/words "Who is the mayor of Venford?"': "Print the best five passages.",
        "--index indexes/graph Q42": "Print the triples of an entity.",
    },
    "serve": {
        "--index indexes/words": "Serve an index to the programs on this machine, on port 8600.",
        "--index indexes/words --host 0.0.0.0": "Serve it to other machines too.",
    },
}
# The kind of an index that holds triples.
GRAPH = "graph"
KINDS = (AUTO, "exact", "bm25", "scann", GRAPH)
# Flags that kind `auto` does not read, and the kind that reads them.
KIND_THAT_READS = {
    "languages": GRAPH,
    "properties": GRAPH,
    "tokenizer": "bm25",
    "devices": "exact",
    "recall_target": "exact",
}
# Kinds of earlier versions, and the kinds that replace them.
FORMER_KINDS = {"accelerator": "exact"}
DEFAULT_K = 5
# How many other entities of the same name are listed.
MAX_NAMESAKES = 5


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    - 0: the command finished.
    - 2: the user made a mistake.
    - 130: Ctrl-C ended the command. A build continues if the same command is run again.
    """
    arguments = _parser().parse_args(command_line)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        message = "interrupted"
        if arguments.run is build:
            message += "; run the same command again to continue"
        print(message, file=sys.stderr)
        return 130
    return 0


def build(arguments: argparse.Namespace) -> None:
    """Build an index of passages or a graph, and print what it contains."""
    if "://" in arguments.out:
        raise UserError(
            f"--out is {arguments.out}, but an index can only be built on a local disk: give a "
            "local directory, and copy the finished index afterwards"
        )
    _refuse_unread(arguments, arguments.kind)
    progress = Progress(sys.stderr)
    if arguments.kind == GRAPH:
        _build_graph(arguments, progress)
    else:
        _build_passages(arguments, progress)


def _build_graph(arguments: argparse.Namespace, progress: Progress) -> None:
    """Build a graph, and print what it contains."""
    if arguments.corpus is None:
        raise UserError("--kind is graph, but there are no triples: give files of them to --corpus")
    manifest, was_there = graphs.build(Path(arguments.out), _graph_spec(arguments), progress)

    _print_left_out(manifest, "lines", progress)
    content = f"{manifest['triples']:,} triples"
    # Graphs from tables have no separate names, because their triples contain the names.
    if manifest["names"]:
        content += f" and {manifest['names']:,} names"
    progress.line(_index_sentence(arguments.out, content, manifest, was_there))


def _build_passages(arguments: argparse.Namespace, progress: Progress) -> None:
    """Build an index of passages, and print what it contains."""
    has_corpus = arguments.corpus is not None
    has_embeddings = arguments.embeddings is not None
    if has_corpus == has_embeddings or (arguments.skip and not has_corpus):
        raise UserError(
            "an index is built either from passages or from the embeddings of another index: give "
            "--corpus (and --skip if you like), or give --embeddings alone"
        )
    manifest, was_there = indexes.build(Path(arguments.out), _index_spec(arguments), progress)

    _print_left_out(manifest, "passages", progress)
    if arguments.kind == AUTO and was_there:
        progress.line(f"{arguments.out} is an index of kind {manifest['kind']}")
    if manifest["kind"] == "scann":
        progress.line(_recall_sentence(manifest[RECALL]))
    content = f"{manifest['passages']:,} passages"
    progress.line(_index_sentence(arguments.out, content, manifest, was_there))


def _print_left_out(manifest: dict[str, Any], unit: str, progress: Progress) -> None:
    """Print how many lines or passages were left out, if any."""
    if manifest["skipped"]:
        progress.line(
            f"{manifest['skipped']:,} {unit} were skipped; the first of them: "
            f"{manifest['first_skipped']}"
        )


def _index_sentence(folder: str, content: str, manifest: dict[str, Any], was_there: bool) -> str:
    """Return a sentence about the content and the version of an index."""
    sentence = f"{folder}: {content}, version {manifest['version']}"
    if was_there:
        sentence += " (already built)"
    return sentence


def _recall_sentence(recall: dict[str, Any]) -> str:
    """Return a sentence about the share of the results of exact search that ScaNN finds."""
    if "unmeasured" in recall:
        return f"recall compared with exact search was not measured: {recall['unmeasured']}"
    return (
        f"recall@{recall['k']} compared with exact search: {recall['percent']}% (with "
        f"{recall['queries']:,} passages as queries)"
    )


def estimate(arguments: argparse.Namespace) -> None:
    """Print how many bytes an index will take, as JSON."""
    _refuse_unread(arguments, arguments.kind)
    if arguments.kind != GRAPH:
        if arguments.devices is not None and arguments.devices < 1:
            raise UserError(f"--devices is {arguments.devices}: give at least 1")
        amounts = estimate_corpus(
            _index_spec(arguments), arguments.passages, devices=arguments.devices
        )
    elif arguments.passages is None:
        amounts = estimate_graph(_graph_spec(arguments))
    else:
        raise UserError(
            f"--passages is {arguments.passages}, but a graph has no passages: leave --passages out"
        )
    print(json.dumps(amounts))


def recall(arguments: argparse.Namespace) -> None:
    """Print the share of gold titles that the index finds for a file of questions, as JSON."""
    questions = read_questions(arguments.questions)
    _refuse_unread(arguments, read_kind(arguments.index))
    index = _open_index(arguments)
    result = measure_recall(
        index, arguments.index, questions, file=arguments.questions, ks=arguments.k
    )
    print(json.dumps(result))


def query(arguments: argparse.Namespace) -> None:
    """Print the passages found for a query, or the triples of an entity."""
    check_text(arguments.text)
    if not arguments.text.strip():
        raise UserError(
            f"the query is {arguments.text!r}, which is empty: write the words to search for "
            "between quotes"
        )
    kind = GRAPH if arguments.index.startswith(SCHEME) else read_kind(arguments.index)
    _refuse_unread(arguments, kind)

    results = _search_graph(arguments) if kind == GRAPH else _search_passages(arguments)

    # Print JSON lines to a file or a pipe, and a numbered list to a terminal.
    if not sys.stdout.isatty():
        for result in results:
            print(json.dumps(result, ensure_ascii=False))
        return
    for number, result in enumerate(results, start=1):
        lines = _triple_lines(result) if kind == GRAPH else _passage_lines(result)
        print(f"{number:>3}. {lines[0]}")
        for line in lines[1:]:
            print(f"     {line}")


def _search_graph(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the triples of the entity that the query names. Raises UserError."""
    if arguments.k is not None and arguments.k < 1:
        raise UserError(f"--k is {arguments.k}: give at least 1")
    if arguments.index.startswith(SCHEME):
        graph = open_endpoint(arguments.index)
    else:
        graph = graphs.open_graph(arguments.index)
    try:
        return asyncio.run(_triples(graph, arguments.index, name=arguments.text, limit=arguments.k))
    except RetrievalError as error:
        raise UserError(str(error)) from error


def _search_passages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best passages for the query, with their scores."""
    index = _open_index(arguments)
    k = min(DEFAULT_K, len(index.passages)) if arguments.k is None else arguments.k
    check_k(k, index.passages)
    (hits,) = index.search([arguments.text], k)
    results = []
    for position, score in hits:
        passage = dataclasses.asdict(index.passages[position])
        results.append({"score": round(score, 4), "position": position, **passage})
    return results


def _triple_lines(triple: dict[str, Any]) -> list[str]:
    """Return the lines that show a triple on a terminal."""
    return [f"{triple['subject']} | {triple['relation']} | {triple['object']}"]


def _passage_lines(passage: dict[str, Any]) -> list[str]:
    """Return the lines that show a passage on a terminal: its title, then its wrapped text."""
    width = shutil.get_terminal_size().columns
    title = f"{passage['title'] or 'untitled'} (id {passage['id']}, score {passage['score']})"
    text = textwrap.fill(passage["text"], max(width - 4, 20))
    return [title, *text.splitlines()]


def serve(arguments: argparse.Namespace) -> None:
    """Serve an index of passages over HTTP until SIGTERM or SIGINT."""
    # Imported late, because the import takes half a second and no other command needs it.
    from mujica_jax.retrieval.service import address_of, make_app, open_port, serve_until_told

    if arguments.max_waiting < 1:
        raise UserError(
            f"--max-waiting is {arguments.max_waiting}: give at least 1, or every query is refused"
        )
    if not 0 < arguments.deadline_seconds < math.inf:
        raise UserError(
            f"--deadline-seconds is {arguments.deadline_seconds:g}: give a number of seconds above "
            "0"
        )
    kind = read_kind(arguments.index)
    _refuse_unread(arguments, kind)
    if kind == GRAPH:
        raise UserError(
            f"{arguments.index} is a graph, and only a SPARQL server can serve a graph: run `pip "
            f"install oxigraph`, then `oxigraph serve-read-only --location {arguments.index}/graph "
            f"--bind {arguments.host}:{arguments.port}`, and give the programs that search it "
            f"--task.index sparql+http://HOST:{arguments.port}/query"
        )

    server_socket = open_port(arguments.host, arguments.port)
    with contextlib.closing(server_socket):
        index = _open_index(arguments)
        cache = None if kind == "bm25" else SearchCache(cache_folder("searches"), index.version)
        retriever = IndexRetriever(
            index,
            cache=cache,
            max_waiting=arguments.max_waiting,
            deadline_seconds=arguments.deadline_seconds,
        )
        address = address_of(server_socket)
        serve_until_told(
            make_app(retriever, kind),
            server_socket,
            f"serving {arguments.index} (version {index.version}) at {address}",
        )
    print(retriever.statistics.sentence(), flush=True)


def _refuse_unread(arguments: argparse.Namespace, kind: str) -> None:
    """Check that an index of this kind reads all given flags. Raises UserError."""
    is_dense = kind not in ("bm25", GRAPH)
    has_source = getattr(arguments, "embeddings", None) is not None
    embeds = is_dense and not has_source
    files = getattr(arguments, "corpus", None) if kind == GRAPH else None
    is_of_tables = bool(files) and all(map(is_table, files))
    chooses_triples = kind == GRAPH and not is_of_tables
    is_read = {
        "languages": chooses_triples,
        "properties": chooses_triples,
        "tokenizer": kind == "bm25",
        "embedder": embeds,
        "prefixes": embeds,
        "storage": embeds,
        "chunk_tokens": kind != GRAPH,
        "chunk_overlap": kind != GRAPH,
        "embeddings": is_dense,
        "devices": kind == "exact",
        "recall_target": kind not in ("bm25", "scann", GRAPH, AUTO),
    }
    unread_names = [
        name for name in is_read if not is_read[name] and getattr(arguments, name, None) is not None
    ]
    if not unread_names:
        return

    # Name the first of these flags, and the kind that reads it.
    name = unread_names[0]
    value = getattr(arguments, name)
    shown_value = " ".join(value) if isinstance(value, list) else value
    flag = name.replace("_", "-")
    source = ""
    if is_dense and has_source:
        source = " with --embeddings"
    elif is_of_tables:
        source = " from tables"
    advice = ""
    if kind == AUTO and name in KIND_THAT_READS:
        advice = f", or give --kind {KIND_THAT_READS[name]}"
    raise UserError(
        f"--{flag} is {shown_value}, but an index of kind {kind}{source} does not use it: leave it "
        f"out{advice}"
    )


def _refuse_triples(files: Sequence[str]) -> None:
    """Check that no file contains triples, from which kind `auto` cannot build an index.

    Raises UserError.
    """
    for file in files:
        if file.removesuffix(".gz").removesuffix(".bz2").endswith(".nt"):
            raise UserError(
                f"{file} holds triples, but --kind is {AUTO}, which builds an index of passages: "
                f"give --kind {GRAPH}"
            )


def _index_spec(arguments: argparse.Namespace) -> IndexSpec:
    """Return the specification of an index of passages."""
    if arguments.kind == AUTO:
        _refuse_triples(arguments.corpus or ())
    source = getattr(arguments, "embeddings", None)
    embedder = None
    if arguments.kind != "bm25" and source is None:
        embedder = find_embedder(arguments.embedder or DEFAULT_EMBEDDER, arguments.prefixes)
    corpus = corpus_files(arguments.corpus or ())
    return IndexSpec(
        kind=arguments.kind,
        corpus=corpus,
        chunking=_chunking(arguments, corpus),
        source=source,
        skip=arguments.skip,
        tokeniser=arguments.tokenizer or "default",
        embedder=embedder,
        storage=arguments.storage or "bfloat16",
        recall_target=getattr(arguments, "recall_target", None),
    )


def _chunking(arguments: argparse.Namespace, corpus: Sequence[str]) -> Chunking:
    """Return the size of the passages that documents are cut into. Raises UserError."""
    chosen = {
        name: value
        for name, value in (
            ("chunk_tokens", arguments.chunk_tokens),
            ("overlap_tokens", arguments.chunk_overlap),
        )
        if value is not None
    }
    if chosen and not any(map(is_document, corpus)):
        raise UserError(
            "--chunk-tokens and --chunk-overlap are for documents "
            f"({', '.join(DOCUMENT_SUFFIXES)}), but the corpus holds none: leave them out"
        )
    chunking = Chunking(**chosen)
    chunking.check()
    return chunking


def _graph_spec(arguments: argparse.Namespace) -> GraphSpec:
    """Return the specification of a graph."""
    return GraphSpec(
        files=tuple(arguments.corpus),
        languages=tuple(tag.lower() for tag in arguments.languages or sparql.LANGUAGES),
        properties=tuple(dict.fromkeys(arguments.properties or ())),
        skip=arguments.skip,
    )


def _open_index(arguments: argparse.Namespace) -> Index:
    """Open the index of passages that a command names."""
    return open_index(
        arguments.index,
        arguments.embedder,
        prefixes=arguments.prefixes,
        recall_target=arguments.recall_target,
    )


async def _triples(
    graph: KnowledgeGraph, index: str, name: str, limit: int | None
) -> list[dict[str, Any]]:
    """Return the triples of the likeliest entity with this name.

    Raises UserError if there is no such entity, and RetrievalError if the graph fails.
    """
    keys = await graph.find(name)
    if not keys:
        raise UserError(
            f"{index} knows no entity {name!r}: give a Q-id, or a label or an alias exactly as the "
            f"graph writes it (languages: {', '.join(graph.languages)})"
        )
    if len(keys) > 1:
        namesakes = ", ".join(keys[1 : 1 + MAX_NAMESAKES])
        if len(keys) > 1 + MAX_NAMESAKES:
            namesakes += ", ..."
        print(
            f"{len(keys)} entities are called {name!r}; these are the triples of {keys[0]}, and not "
            f"those of {namesakes}",
            file=sys.stderr,
        )
    return [dataclasses.asdict(triple) for triple in await graph.triples_of(keys[0], limit)]


def _kind(text: str) -> str:
    """Return the text if it is a kind of index. Raises argparse's error otherwise."""
    if text not in KINDS:
        raise argparse.ArgumentTypeError(
            f"unknown kind {text!r}; {nearest(FORMER_KINDS.get(text, text), KINDS)}"
        )
    return text


def _share(text: str) -> float:
    """Return the text as a number between 0 and 1. Raises argparse's error for any other text."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value < 1:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with one sub-command for each function above."""
    parser = argparse.ArgumentParser(
        prog=program_name("index"),
        description=_description(
            "", "Build, measure, query and serve indexes of passages and graphs."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # The help text lists the commands in this order.
    estimate_parser = _add_command(
        commands, estimate, "Print how many bytes an index will take, as one JSON line."
    )
    build_parser = _add_command(
        commands,
        build,
        "Build an index of a corpus. If a build is killed, run the same command again to continue.",
    )
    recall_parser = _add_command(
        commands,
        recall,
        "Print the share of gold titles that an index finds for questions, as one JSON line.",
    )
    query_parser = _add_command(
        commands,
        query,
        "Print the passages found for a query, or the triples of an entity in a graph.",
    )
    serve_parser = _add_command(
        commands,
        serve,
        "Serve an index of passages over HTTP: POST /search and /retrieve, GET /healthz and /metrics.",
    )

    _add_estimate_flags(estimate_parser)
    _add_build_flags(build_parser)
    for command_parser in (build_parser, estimate_parser):
        _add_content_flags(command_parser)
    _add_recall_flags(recall_parser)
    _add_query_flags(query_parser)
    _add_serve_flags(serve_parser)
    for command_parser in (recall_parser, query_parser, serve_parser):
        command_parser.add_argument(
            "--index", required=True, metavar="DIR", help="directory of the index"
        )
    for command_parser in (build_parser, estimate_parser):
        _add_embedder_flags(command_parser, default=f"default: {DEFAULT_EMBEDDER}")
    for command_parser in (recall_parser, query_parser, serve_parser):
        _add_embedder_flags(command_parser, default="default: the embedder of the build")
    for command_parser in (build_parser, recall_parser, query_parser, serve_parser):
        command_parser.add_argument(
            "--recall-target",
            type=_share,
            metavar="SHARE",
            help="search an index of kind exact approximately, and find about this share of the k "
            "best passages (default: exact search)",
        )
    return parser


def _add_command(
    commands: Any, run: Callable[[argparse.Namespace], None], summary: str
) -> argparse.ArgumentParser:
    """Add a sub-command that calls a function and has its name."""
    command_parser = commands.add_parser(
        run.__name__,
        help=summary,
        description=_description(run.__name__, summary),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_parser.set_defaults(run=run)
    return command_parser


def _description(command: str, summary: str) -> str:
    """Return what the help of a sub-command says before its flags."""
    prog = f"{program_name('index')} {command}".strip()
    lines = [*textwrap.wrap(summary, width=80), "", "examples:"]
    for words, meaning in EXAMPLES[command].items():
        lines += [f"  {prog} {words}", f"      {meaning}"]
    return "\n".join(lines)


def _add_estimate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `estimate` has."""
    parser.add_argument(
        "--corpus", nargs="+", required=True, metavar="FILE", help="files of passages or triples"
    )
    parser.add_argument(
        "--passages",
        type=int,
        help="assume this number of passages (default: count the passages of the corpus)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        help="number of accelerators of the host that will search an index of kind exact "
        "(default: the number on this host)",
    )


def _add_build_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `build` has."""
    parser.add_argument(
        "--corpus",
        nargs="+",
        metavar="FILE",
        help="files of passages (JSON arrays, JSON Lines, Parquet, tar), documents (.pdf, .html, .md, "
        ".txt) or folders of them, or files of triples (.tsv, .nt)",
    )
    parser.add_argument(
        "--embeddings",
        metavar="INDEX",
        help="take passages and embeddings from this dense index instead of a corpus",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the index")


def _add_content_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that specify the content of an index."""
    parser.add_argument(
        "--kind",
        type=_kind,
        default=AUTO,
        metavar=f"{{{','.join(KINDS)}}}",
        help="kind of index. exact: compare embeddings with every passage. scann: approximate "
        "search of embeddings. bm25: search by words. graph: triples. auto: exact up to "
        f"{MAX_EXACT_PASSAGES:,} passages, scann above (default: auto)",
    )
    parser.add_argument(
        "--tokenizer",
        choices=("default", "elasticsearch"),
        help="tokenizer of a bm25 index (default: default)",
    )
    parser.add_argument(
        "--languages",
        nargs="+",
        metavar="TAG",
        help="languages of labels and texts in a graph, the preferred one first (default: en mul)",
    )
    parser.add_argument(
        "--properties",
        nargs="+",
        metavar="NAME",
        help="properties to keep in a graph, such as P57 or full addresses (default: all)",
    )
    parser.add_argument(
        "--storage",
        choices=("bfloat16", "int8"),
        help="number type of the embeddings on disk (default: bfloat16)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens (words and punctuation marks) of a passage that is cut from "
        f"a document (default: {DEFAULT_CHUNKING.chunk_tokens})",
    )
    parser.add_argument(
        "--chunk-overlap",
        type=int,
        metavar="N",
        help="maximum number of tokens that neighbouring passages of a document share (default: "
        f"{DEFAULT_CHUNKING.overlap_tokens})",
    )
    parser.add_argument(
        "--skip",
        action="store_true",
        help="skip and count invalid passages or lines, instead of ending with an error",
    )


def _add_recall_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `recall` has."""
    parser.add_argument(
        "--questions",
        required=True,
        metavar="FILE",
        help="file of records with the fields question and supporting_facts",
    )
    parser.add_argument(
        "--k",
        type=int,
        nargs="+",
        default=[2, 5, 20],
        help="numbers of passages at which recall is measured (default: 2 5 20)",
    )


def _add_query_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `query` has."""
    parser.add_argument(
        "text",
        metavar="QUERY",
        help="words to search for; for a graph the Q-id, label or alias of an entity",
    )
    parser.add_argument(
        "--k",
        type=int,
        help=f"print at most this number of results (default: {DEFAULT_K} passages, all triples)",
    )


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `serve` has."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts connections from other hosts (default: "
        "127.0.0.1)",
    )
    parser.add_argument("--port", type=int, default=8600, help="port to listen on (default: 8600)")
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        help="number of queries that may wait; further queries get status 429 (default: 1024)",
    )
    parser.add_argument(
        "--deadline-seconds",
        type=float,
        default=30.0,
        help="seconds after which an unanswered query fails (default: 30)",
    )


def _add_embedder_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that name the embedder. `default` describes the embedder without them."""
    parser.add_argument(
        "--embedder",
        metavar="NAME",
        help=f"embedder: a folder, minilm, or a Hugging Face name ({default})",
    )
    parser.add_argument(
        "--prefixes",
        choices=("none", "bge", "e5"),
        help="prefixes of queries and passages (default: chosen by the name of the embedder)",
    )
