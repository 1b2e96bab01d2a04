"""The commands of `python -m mujica_jax.index` for graphs."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mujica_jax.errors import UserError
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.graph import sparql
from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
from mujica_jax.retrieval.graph.files import Choice
from mujica_jax.retrieval.graph.index import GraphRecipe, build, open_graph

if TYPE_CHECKING:
    from mujica_jax.report import Progress
    from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
    from mujica_jax.retrieval.text.index import Reporter

MOST_NAMED = 5  # other entities of one name that are told of


def recipe(given: argparse.Namespace) -> GraphRecipe:
    choice = Choice(
        languages=tuple(tag.lower() for tag in given.languages or sparql.LANGUAGES),
        properties=tuple(dict.fromkeys(given.properties or ())),
    )
    return GraphRecipe(files=tuple(given.corpus), choice=choice, skip=given.skip)


def build_graph(given: argparse.Namespace, progress: "Progress", reporter: "Reporter") -> None:
    manifest, found = build(Path(given.out), recipe(given), reporter)
    if manifest["skipped"]:
        progress.line(f"{manifest['skipped']:,} lines were left out; the first one: {manifest['first_skipped']}")
    names = f" and {manifest['names']:,} names" if manifest["names"] else ""  # tables name entities in their triples
    progress.line(
        f"{given.out}: {manifest['triples']:,} triples{names}, version {manifest['version']}"
        f"{' (was there already)' * found}"
    )


def estimate_graph(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.graph import estimates as graph_estimates

    print(json.dumps(dataclasses.asdict(graph_estimates.estimate_graph(recipe(given)))))


def query_graph(given: argparse.Namespace) -> None:
    graph = open_endpoint(given.index) if given.index.startswith(SCHEME) else open_graph(given.index)
    try:
        asyncio.run(_print_triples(graph, given.index, given.text, given.k))
    except RetrievalError as error:
        raise UserError(error.reason) from error


def serve_graph(given: argparse.Namespace) -> None:
    from mujica_jax.retrieval.graph.index import STORE
    from mujica_jax.retrieval.graph.query_pool import GraphReaders
    from mujica_jax.retrieval.graph.service import GraphQueries, make_graph_app
    from mujica_jax.retrieval.service import address_of, open_port, serve_until_told

    opened = open_port(given.host, given.port)
    with contextlib.closing(opened):
        version = open_graph(given.index).version
        readers = GraphReaders(Path(given.index) / STORE, deadline_seconds=given.deadline_seconds)
        queries = GraphQueries(
            readers, version=version, most_waiting=given.most_waiting, deadline_seconds=given.deadline_seconds
        )
        told = f"serving {given.index} (version {version}) at {SCHEME}{address_of(opened)}/sparql"
        serve_until_told(make_graph_app(queries), opened, told)
    counted = queries.statistics
    print(
        f"{counted.queries:,} queries ({counted.failed:,} failed), {counted.search_seconds:.1f} s searching", flush=True
    )


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
        others = ", ".join(keys[1 : 1 + MOST_NAMED]) + ", ..." * (len(keys) > 1 + MOST_NAMED)
        print(
            f"{len(keys)} entities are called {text!r}: these are the triples of {keys[0]}, not of {others}",
            file=sys.stderr,
        )
    for triple in await graph.triples_of(keys[0], limit):
        shown = dataclasses.asdict(triple)
        print(json.dumps(shown, ensure_ascii=False))
