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
from mujica_jax.http.retry import Tries
from mujica_jax.retrieval.graph.endpoint import SparqlEndpoint
from mujica_jax.retrieval.graph.index import STORE, open_graph
from mujica_jax.retrieval.graph.query_pool import MODULE, GraphReaders
from mujica_jax.retrieval.graph.service import GraphQueries, asks_others, make_graph_app

ROOT = Path(__file__).resolve().parent.parent
ALL = "SELECT * WHERE { ?s ?p ?o }"
ENDLESS = f"SELECT (COUNT(*) AS ?n) {{ {' '.join(f'?s{n} ?p{n} ?o{n} .' for n in range(9))} }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("graph")
    dump = str(write_dump(root / "dump.nt"))
    assert index.main(["build", "--corpus", dump, "--kind", "graph", "--out", str(root / "index")]) == 0
    return root / "index"


@contextlib.contextmanager
def served(folder: Path, most_waiting: int = 64, deadline_seconds: float = 30.0):
    readers = GraphReaders(folder / STORE, deadline_seconds=deadline_seconds)
    queries = GraphQueries(readers, version="v", most_waiting=most_waiting, deadline_seconds=deadline_seconds)
    with app_served(make_graph_app(queries)) as address:
        yield address


def children() -> list[int]:
    """The readers of this process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and MODULE.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def asked(url: str, query: str) -> httpx.Response:
    return httpx.post(f"{url}/sparql", data={"query": query}, timeout=60)


def test_our_client_says_what_the_store_says(folder):
    with served(folder) as url:
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


def test_other_clients_ask_in_their_own_ways(folder):
    with served(folder) as url:
        ways = [
            httpx.get(f"{url}/sparql", params={"query": ALL}),
            httpx.post(f"{url}/sparql", data={"query": ALL}),
            httpx.post(f"{url}/sparql", content=ALL, headers={"Content-Type": "application/sparql-query"}),
        ]
        assert [way.status_code for way in ways] == [200] * 3
        assert ways[0].headers["Content-Type"] == "application/sparql-results+json"
        assert ways[0].json() == ways[1].json() == ways[2].json()
        assert len(ways[0].json()["results"]["bindings"]) == len(open_graph(folder).store)
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
def test_a_bad_request_is_told_what_is_wrong(folder, content, status, said):
    before = len(open_graph(folder).store)
    with served(folder) as url:
        if isinstance(content, dict):
            response = httpx.post(f"{url}/sparql", data=content)
        else:
            response = httpx.post(f"{url}/sparql", content=content)
        assert response.status_code == status and said in response.json()["error"]
        assert httpx.get(f"{url}/healthz").status_code == 200
    assert len(open_graph(folder).store) == before


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
        "SELECT * { { OPTIONAL { ?x <http://a\u00a0#b> ?o } SERVICE <http://h/> { ?s ?p ?o } } }",
        "SELECT * { ?a ?b ?x FILTER(?x<'abc>') SERVICE <http://h/> { ?s ?p 'x' } }",
        "PREFIX ex: <http://h/> SELECT * { SERVICEex:a { ?s ?p ?o } }",
        f"PREFIX {'p' * 2000}: <http://h/> SELECT * {{ SERVICE {'p' * 2000}:a {{ ?s ?p ?o }} }}",
        "SELECT * { SERVICE # of others\n ?h { ?s ?p ?o } }",
        "SELECT * { SERVICE SILENT <http://h/> { ?s ?p ?o } }",
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
        "<http://h/service?x>",
        "?service",
        '"the service, as it is: bad"',
    ],
)
def test_the_word_may_stand_in_names(term):
    assert not asks_others(f"SELECT * {{ ?s ?p {term} }}")


def test_what_is_under_way_is_bounded_and_late_queries_are_stopped(folder):
    with served(folder, 3, 1.0) as url:
        responses: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: responses.append(asked(url, ENDLESS))) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(response.status_code for response in responses) == [429] * 9 + [504] * 3
        assert {response.headers.get("Retry-After") for response in responses if response.status_code == 429} == {"1"}
        assert not children(), "none goes on"
    with served(folder, 3) as url:
        patient = SparqlEndpoint(f"{url}/sparql", limits=Tries(first_wait_seconds=0.05), queries_per_second=1e6)
        assert texts(asyncio.run(patient.triples_of("Q1"))) == FILM
        assert len(children()) == 1, "who asks one after the other is answered by the same reader"
    assert not children()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT * WHERE " + "{" * 10_000 + "}" * 10_000, "nested too deep"),
        ("SELECT * WHERE { ?s ?p ?o FILTER(" + "!" * 100_000 + "true) }", "nested too deep"),
        (
            "SELECT * { ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l . ?m ?n ?o }",
            "more than 16,777,216 bytes: ask with LIMIT",
        ),
    ],
    ids=["groups", "operators", "answer"],
)
def test_a_query_that_is_too_much_ends_no_service(folder, query, said):
    with served(folder) as url:
        response = asked(url, query)
        assert response.status_code == 400 and said in response.json()["error"]
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_reader_that_was_killed_is_replaced(folder):
    with served(folder) as url:
        assert asked(url, ALL).status_code == 200
        (reader,) = children()
        os.kill(reader, signal.SIGKILL)
        assert asked(url, ALL).status_code in (200, 503), "503 asks the client to come again"
        assert asked(url, ALL).status_code == 200


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_right_after_the_line_ends_it(folder, number):
    command = [sys.executable, "-m", "mujica_jax.index", "serve", "--index", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(number)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_graph_is_not_served_with_an_embedder(tmp_path, capsys):
    dump = str(write_dump(tmp_path / "dump.nt"))
    assert index.main(["build", "--corpus", dump, "--kind", "graph", "--out", str(tmp_path / "index")]) == 0
    assert index.main(["serve", "--index", str(tmp_path / "index"), "--embedder", "x"]) == 2
    assert "--embedder is x and an index of kind graph does not read it" in capsys.readouterr().err
