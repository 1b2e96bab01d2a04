"""A graph behind HTTP: what it answers, what it refuses, and how it is bounded."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from little_graph import DIRECTOR, FILM, texts, write_dump
from served_app import app_served

from mujica_jax import index
from mujica_jax.retrieval.graph_index import graph_in_memory
from mujica_jax.retrieval.graph_service import GraphQueries, asks_others, make_graph_app
from mujica_jax.retrieval.graph_store import GraphStore
from mujica_jax.retrieval.sparql_endpoint import SparqlEndpoint
from mujica_jax.retrieval.tries import Tries

ROOT = Path(__file__).resolve().parent.parent
ALL = "SELECT * WHERE { ?s ?p ?o }"


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> GraphStore:
    return graph_in_memory(write_dump(tmp_path_factory.mktemp("graph") / "dump.nt"))


@contextlib.contextmanager
def served(graph, most_waiting: int = 64, deadline_seconds: float = 30.0):
    queries = GraphQueries(graph, most_waiting=most_waiting, deadline_seconds=deadline_seconds)
    with app_served(make_graph_app(queries)) as address:
        yield address


class SlowStore:
    """A store that answers when it is told to."""

    def __init__(self, graph: GraphStore) -> None:
        self._store, self.go = graph.store, threading.Event()

    def query(self, text: str):
        if text == ALL:
            assert self.go.wait(30)
        return self._store.query(text)


def test_our_client_says_what_the_store_says(graph):
    with served(graph) as url:
        remote = SparqlEndpoint(f"sparql+{url}/sparql", queries_per_second=1e6)
        assert texts(asyncio.run(remote.triples_of("Q1"))) == FILM
        assert texts(asyncio.run(remote.triples_of("I. Vand"))) == DIRECTOR
        asyncio.run(remote.check())
        metrics = httpx.get(f"{url}/metrics").text
        health = httpx.get(f"{url}/healthz").json()
    assert (
        'mujica_retrieval_answers_total{status="200"} 4.0' in metrics
        and "mujica_retrieval_queries_total 4.0" in metrics
    )
    assert health["kind"] == "graph" and health["seconds"] > 0


def test_other_clients_ask_in_their_own_ways(graph):
    with served(graph) as url:
        ways = [
            httpx.get(f"{url}/sparql", params={"query": ALL}),
            httpx.post(f"{url}/sparql", data={"query": ALL}),
            httpx.post(f"{url}/sparql", content=ALL, headers={"Content-Type": "application/sparql-query"}),
        ]
        assert [way.status_code for way in ways] == [200] * 3
        assert ways[0].headers["Content-Type"] == "application/sparql-results+json"
        assert ways[0].json() == ways[1].json() == ways[2].json()
        assert len(ways[0].json()["results"]["bindings"]) == len(graph.store)
        assert httpx.get(f"{url}/sparql", params={"query": "ASK { ?s ?p ?o }"}).json()["boolean"] is True


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ({"query": "SELECT"}, 400, "the query is no SPARQL"),
        ({"query": "DELETE WHERE { ?s ?p ?o }"}, 400, "the query is no SPARQL"),
        ({"query": "CONSTRUCT { ?s ?p ?o } WHERE { ?s ?p ?o }"}, 400, "ask with SELECT or ASK"),
        ({"query": ""}, 400, "needs a SPARQL query"),
        ({"update": "CLEAR ALL"}, 400, "needs a SPARQL query"),
        ({"query": "SELECT * { SERVICE <http://127.0.0.1:1/> { ?s ?p ?o } }"}, 400, "other hosts are not asked"),
        (b"query=\xff", 400, "no UTF-8"),
        (b"query=" + b" " * 5_000_000, 413, "more than"),
    ],
    ids=range(8),
)
def test_a_bad_request_is_told_what_is_wrong(graph, content, status, said):
    before = len(graph.store)
    with served(graph) as url:
        if isinstance(content, dict):
            response = httpx.post(f"{url}/sparql", data=content)
        else:
            response = httpx.post(f"{url}/sparql", content=content)
        assert response.status_code == status and said in response.json()["error"]
        assert httpx.get(f"{url}/healthz").status_code == 200
    assert len(graph.store) == before


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * { service<http://h/>{?s ?p ?o} }",
        "SELECT * { FILTER(1 < 2) SERVICE <http://h/> { ?s ?p ?o } }",
        "SELECT * { ?s ?p 1SERVICE <http://h/> { ?a ?b ?c } }",
        "# it's\nSELECT * { SERVICE <http://h/> { } } # it's",
        '# """\nSELECT * { SERVICE <http://h/> { } } # """',
        'SELECT * { ?s ?p """a"b""" . SERVICE <http://h/> { ?a ?b """c"d""" } }',
        "SELECT * { \\u0053ERVICE <http://h/> { } }",
        "SELECT * { ?s ex:a\\#b ?o . SERVICE <http://h/> { } }",
        'SELECT * { ?s ?p "\\"" . SERVICE <http://h/> { ?a ?b "" } }',
        "SELECT * { ?s ?p '\\'' . SERVICE <http://h/> { ?a ?b '' } }",
    ],
)
def test_other_hosts_are_never_asked(query):
    assert asks_others(query)


@pytest.mark.parametrize(
    "term",
    [
        '"Secret Service"@en',
        "'a service'",
        '"""self "service" area"""',
        "<http://h/service>",
        "?service",
        "# service\n?x",
    ],
)
def test_the_word_may_stand_in_names(term):
    assert not asks_others(f"SELECT * {{ ?s ?p {term} }}")


def test_what_is_under_way_is_bounded_and_late_queries_keep_their_place(graph):
    slow = SlowStore(graph)
    stand_in: object = slow
    with served(GraphStore(stand_in, version="v", languages=("en",)), 3, 0.3) as url:  # pyright: ignore[reportArgumentType]
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(httpx.post(f"{url}/sparql", data={"query": ALL}, timeout=30).status_code)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(statuses) == [429] * 9 + [504] * 3
        busy = httpx.post(f"{url}/sparql", data={"query": "ASK { ?s ?p ?o }"})
        assert busy.status_code == 429 and busy.headers["Retry-After"] == "1"
        assert httpx.get(f"{url}/healthz").status_code == 503
        slow.go.set()
        patient = SparqlEndpoint(f"{url}/sparql", limits=Tries(first_wait_seconds=0.05), queries_per_second=1e6)
        assert texts(asyncio.run(patient.triples_of("Q1"))) == FILM
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_serve_of_a_graph_starts_answers_and_ends(tmp_path):
    dump = str(write_dump(tmp_path / "dump.nt"))
    assert index.main(["build", "--corpus", dump, "--kind", "graph", "--out", str(tmp_path / "index")]) == 0
    command = [sys.executable, "-m", "mujica_jax.index", "serve", "--index", str(tmp_path / "index"), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert address.startswith("sparql+http://127.0.0.1:") and address.endswith("/sparql")
        remote = SparqlEndpoint(address, limits=Tries(first_wait_seconds=0.1))
        assert texts(asyncio.run(remote.triples_of("Q2"))) == DIRECTOR
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=30)
        assert "1 queries (0 failed)" in out and "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


def test_a_graph_is_not_served_with_an_embedder(tmp_path, capsys):
    dump = str(write_dump(tmp_path / "dump.nt"))
    assert index.main(["build", "--corpus", dump, "--kind", "graph", "--out", str(tmp_path / "index")]) == 0
    assert index.main(["serve", "--index", str(tmp_path / "index"), "--embedder", "x"]) == 2
    assert "--embedder is x and a graph does not read it" in capsys.readouterr().err
