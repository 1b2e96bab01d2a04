"""A SPARQL endpoint that misbehaves, is slow, or asks to be asked less: what passes is survived,
what does not is a typed error.
"""

import asyncio
import dataclasses
import itertools
import json

import pyoxigraph
import pytest

from mujica_jax.errors import UserError
from mujica_jax.http.retry import RetryPolicy
from mujica_jax.retrieval.errors import (
    RetrieverRefusedError,
    RetrieverTimeoutError,
    RetrieverUnavailableError,
)
from mujica_jax.retrieval.graph.endpoint import SparqlEndpoint, _rows, open_endpoint
from mujica_jax.retrieval.search_cache import SearchCache
from tests.helpers.little_graph import FILM, graph_in_memory, texts, write_dump
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.turned_clock import TurnedClock

POLICY = RetryPolicy(timeout_seconds=1.0, deadline_seconds=20.0, first_wait_seconds=0.01)
NOTHING = {"head": {"vars": ["property"]}, "results": {"bindings": []}}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> pyoxigraph.Store:
    return graph_in_memory(write_dump(tmp_path_factory.mktemp("graph") / "dump.nt")).store


def truth(store: pyoxigraph.Store, request) -> Answer:
    solutions = store.query(request.body["query"])
    return Answer(content=solutions.serialize(format=pyoxigraph.QueryResultsFormat.JSON))


def endpoint_at(url: str, **options) -> SparqlEndpoint:
    return SparqlEndpoint(url, **{"queries_per_second": 1e6, "policy": POLICY} | options)


def asked(work):
    return asyncio.run(work)


@pytest.fixture(autouse=True)
def clock(turned_clock) -> TurnedClock:
    """No test of this module depends on how fast the machine is."""
    return turned_clock


MISBEHAVIOUR = {
    "500": Answer(status=500, content=b"java.util.concurrent.TimeoutException"),
    "502": Answer(status=502),
    "429 with a wish": Answer(status=429, headers={"Retry-After": "0.05"}),
    "hang up": Answer(fault="hang up"),
    "cut": Answer(content=NOTHING, fault="cut"),
    "no JSON": Answer(content=b"<html>gateway</html>"),
    "half of a JSON": Answer(
        content=b'{"head": {"vars": ["entity"]}, "results": {"bindings": [{"entity": {"type"'
    ),
    "no results": Answer(content={"head": {"vars": []}}),
    "another JSON": Answer(content=[1, 2]),
    "a yes": Answer(content={"head": {}, "boolean": True}),
    "other columns": Answer(
        content={
            "head": {"vars": ["x"]},
            "results": {"bindings": [{"x": {"type": "literal", "value": "1"}}]},
        }
    ),
    "no UTF-8": Answer(content=json.dumps(NOTHING).encode()[:-4] + b"\xff\xff"),
    "no IRI": Answer(
        content={
            "head": {"vars": ["x"]},
            "results": {"bindings": [{"x": {"type": "uri", "value": "no IRI"}}]},
        }
    ),
    "late": Answer(fault="silent"),
    "trickle": Answer(content=NOTHING, fault="trickle"),
}


@pytest.mark.parametrize("fault", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
def test_what_passes_is_survived(store, clock, fault):
    """An answer that is late or trickles takes longer than a try may."""
    turned = {"silent": 1.1, "trickle": 0.1}.get(fault.fault, 0.0)
    fault = dataclasses.replace(fault, meanwhile=lambda: clock.turn(turned))
    with serving(
        lambda request, before: fault if before < 2 else truth(store, request)
    ) as endpoint:
        graph = endpoint_at(endpoint.base_url)
        assert texts(asked(graph.triples_of("Q1"))) == FILM
        assert len(endpoint.requests) == 3
        assert graph.statistics.retries == 2


@pytest.mark.parametrize(
    ("fault", "options", "kind", "message"),
    [
        (
            Answer(status=500),
            {"max_attempts": 3},
            RetrieverUnavailableError,
            "failed 3 times, the last time with status 500",
        ),
        (
            Answer(content=b"no"),
            {"max_attempts": 2},
            RetrieverUnavailableError,
            "an answer that is not a SPARQL result",
        ),
        (
            Answer(status=400, content=b"bad query"),
            {},
            RetrieverRefusedError,
            "refused the request with status 400: bad query",
        ),
        (Answer(status=403, content=b"banned"), {}, RetrieverRefusedError, "status 403: banned"),
        (
            Answer(status=429, headers={"Retry-After": "3600"}),
            {"deadline_seconds": 0.5},
            RetrieverTimeoutError,
            r"of 0\.5 s",
        ),
        (
            Answer(fault="silent"),
            {"deadline_seconds": 0.5},
            RetrieverTimeoutError,
            "within the deadline",
        ),
    ],
)
def test_what_does_not_pass_is_a_typed_error(clock, fault, options, kind, message):
    limits = {
        "timeout_seconds": 20.0,
        "deadline_seconds": 20.0,
        "first_wait_seconds": 0.01,
    } | options
    fault = dataclasses.replace(
        fault, meanwhile=lambda: clock.turn(0.6 if fault.fault == "silent" else 0.0)
    )
    start_time = clock.now
    with serving(lambda request, before: fault) as endpoint:
        graph = endpoint_at(endpoint.base_url, policy=RetryPolicy(**limits))
        with pytest.raises(kind, match=message):
            asked(graph.triples_of("Q1"))
        assert clock.now - start_time < 1.0, "nothing waits longer than the deadline"
        assert graph.statistics.queries == 1
        assert graph.statistics.failed == 1


@pytest.mark.parametrize(
    "row",
    [
        {
            "property": {"type": "bnode", "value": "b"},
            "other": {"type": "uri", "value": "http://x/y"},
        },
        {
            "entity": {"type": "uri", "value": "http://x/y"},
            "rank": {"type": "literal", "value": "first"},
        },
    ],
)
def test_a_table_of_something_else_is_a_typed_error(row, tmp_path):
    variables = ["entity", "rank"]
    if "other" in row:
        variables = ["inverse", "property", "name", "other", "label", "own", "same"]
    other = Answer(content={"head": {"vars": variables}, "results": {"bindings": [row]}})
    with serving(lambda request, before: other) as endpoint:
        graph = endpoint_at(endpoint.base_url, cache=SearchCache(tmp_path, "a"))
        # The second time the answer comes from the cache.
        for _ in range(2):
            with pytest.raises(RetrieverUnavailableError, match="does not fit the query"):
                asked(graph.triples_of("Nobody" if "rank" in row else "Q1"))


def quoted(depth: int, name: str = "triple") -> str:
    """Return a term in JSON that quotes a triple, which quotes another one, `depth` times."""
    subject = '{"type": "uri", "value": "http://x/s"}'
    begun = (
        f'{{"type": "{name}", "value": {{"subject": {subject}, "predicate": {subject}, "object": '
    )
    return begun * depth + subject + "}}" * depth


@pytest.mark.parametrize("name", ["triple", r"\u0074riple"])
def test_triples_quoted_in_one_another_are_a_typed_error(name):
    """A parser without a bound would recurse until the process dies."""
    row = '{"head": {"vars": ["entity", "rank"]}, "results": {"bindings": [{"entity": %s}]}}'
    for answer in (row % quoted(50_000, name), (row % quoted(50_000, name))[:1_000_000]):
        deep = Answer(content=answer.encode())
        with serving(lambda request, before, deep=deep: deep) as endpoint:
            graph = endpoint_at(endpoint.base_url, policy=RetryPolicy(max_attempts=1))
            with pytest.raises(
                RetrieverUnavailableError, match=r"not a SPARQL result \(RecursionError"
            ):
                asked(graph.find("Nobody"))
    rows = _rows(row % quoted(2, name), "SELECT ?entity ?rank WHERE")
    assert rows == [{"entity": None, "rank": None}], "a few are a table"


def test_terms_are_read_as_our_own_store_has_them(store):
    query = "SELECT ?s ?p ?o ?nothing WHERE { { ?s ?p ?o } UNION { BIND(BNODE() AS ?s) } }"
    names = ("s", "p", "o", "nothing")
    solutions = store.query(query)
    text = solutions.serialize(format=pyoxigraph.QueryResultsFormat.JSON).decode()
    expected = pyoxigraph.parse_query_results(text, pyoxigraph.QueryResultsFormat.JSON)
    assert isinstance(expected, pyoxigraph.QuerySolutions)
    for row, expected_row in zip(_rows(text, query), expected, strict=True):
        assert [row[name] for name in names] == [expected_row[name] for name in names]


def test_answers_are_kept_on_disk_by_endpoint_and_query(store, tmp_path):
    with serving(lambda request, before: truth(store, request)) as endpoint:
        first = endpoint_at(endpoint.base_url, cache=SearchCache(tmp_path, "a"))
        triples = asked(first.triples_of("Q1"))
        reopened = endpoint_at(endpoint.base_url, cache=SearchCache(tmp_path, "a"))
        assert asked(reopened.triples_of("Q1")) == triples
        assert reopened.statistics.cached == 1
        assert reopened.statistics.batches == 0
        assert len(endpoint.requests) == 1
        asked(reopened.triples_of("Q2"))
        other = endpoint_at(endpoint.base_url, cache=SearchCache(tmp_path, "b"))
        asked(other.triples_of("Q1"))
        assert len(endpoint.requests) == 3


def test_what_is_damaged_in_the_cache_is_asked_again_and_failures_are_not_kept(store, tmp_path):
    cache = SearchCache(tmp_path, "a")
    with serving(
        lambda request, before: truth(store, request) if before else Answer(status=400)
    ) as endpoint:
        graph = endpoint_at(endpoint.base_url, cache=cache)
        with pytest.raises(RetrieverRefusedError):
            asked(graph.triples_of("Q1"))
        assert texts(asked(graph.triples_of("Q1"))) == FILM
        query = endpoint.requests[0].body["query"]
        cache.write([(query, 0, "{")])
        assert texts(asked(graph.triples_of("Q1"))) == FILM
        assert len(endpoint.requests) == 3
        assert texts(asked(graph.triples_of("Q1"))) == FILM
        assert len(endpoint.requests) == 3


def test_the_same_question_at_the_same_time_goes_there_once(store):
    async def together(graph, *keys):
        return await asyncio.gather(*(graph.triples_of(key) for key in keys))

    with serving(lambda request, before: truth(store, request)) as endpoint:
        graph = endpoint_at(endpoint.base_url, concurrency=2)
        answers = asked(together(graph, "Q1", "Q1", "Q2", "Q1", "Q3", "Q4", "Q5"))
        assert answers[0] == answers[1] == answers[3]
        assert texts(answers[0]) == FILM
        assert len(endpoint.requests) == 5
        assert graph.statistics.shared == 2
        assert endpoint.most_at_once <= 2
        assert asked(together(graph, "Q1", "Q2"))[0] == answers[0], "in another event loop"


def test_requests_go_no_faster_than_allowed_and_all_wait_when_asked_to(store, clock, monkeypatch):
    moments: list[float] = []
    paused: list[float] = []

    def answer(request, before):
        if before == 2:
            return Answer(status=429, headers={"Retry-After": "0.5"})
        return truth(store, request)

    async def together(graph):
        return await asyncio.gather(*(graph.triples_of(f"Q{number}") for number in range(1, 16)))

    with serving(answer) as endpoint:
        graph = endpoint_at(endpoint.base_url, queries_per_second=20, concurrency=3)
        exchange = graph._client.exchange
        pause = graph._pause

        async def timed_exchange(content, headers):
            moments.append(clock.now)
            return await exchange(content, headers)

        def timed_pause(error):
            paused.append(clock.now)
            pause(error)

        monkeypatch.setattr(graph._client, "exchange", timed_exchange)
        monkeypatch.setattr(graph, "_pause", timed_pause)
        asked(together(graph))
    assert len(moments) == 16
    assert all(later - earlier > 0.0499 for earlier, later in itertools.pairwise(moments)), (
        "20 a second"
    )
    (asked_to_wait,) = paused
    assert moments[-1] > asked_to_wait + 0.499, "what the endpoint asked for"
    assert not any(asked_to_wait < moment < asked_to_wait + 0.499 for moment in moments), (
        "by all of them"
    )


def test_an_endpoint_is_tried_before_a_run(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(lambda request, before: truth(store, request)) as endpoint:
        graph = open_endpoint(f"sparql+{endpoint.base_url}")
        assert texts(asked(graph.triples_of("Q1"))) == FILM
        assert texts(asked(open_endpoint(f"sparql+{endpoint.base_url}").triples_of("Q1"))) == FILM
        assert len(endpoint.requests) == 3, "each is tried, and the triples are kept"
    with (
        serving(lambda request, before: Answer(content=NOTHING)) as endpoint,
        pytest.raises(UserError) as error,
    ):
        open_endpoint(f"sparql+{endpoint.base_url}")
    assert (
        "its graph has no wikibase:directClaim: give an endpoint with a graph in Wikidata's vocabulary"
        in str(error.value)
    )
    with pytest.raises(
        UserError, match=r"names no server: write it as sparql\+https://HOST/sparql"
    ):
        open_endpoint("sparql+https:///")
    with pytest.raises(UserError, match="failed 3 times"):
        open_endpoint("sparql+http://127.0.0.1:9/sparql")
