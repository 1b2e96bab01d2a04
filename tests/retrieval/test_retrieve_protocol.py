"""POST /retrieve: our service for clients of Search-R1 and verl, and our client for their servers."""

import asyncio

import httpx
import pytest

from mujica_jax.errors import UserError
from mujica_jax.http.retry import RetryPolicy
from mujica_jax.retrieval.errors import RetrieverUnavailableError
from mujica_jax.retrieval.retrieve_protocol import ProtocolRetriever, open_protocol
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.service import make_app
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.served_app import app_served

PASSAGES = [
    Passage(id="a", title="Tisby", text="Tisby is a town."),
    Passage(id="b", title='The "Quina"', text="A river.\nIt is long."),
    Passage(id="c", title="", text="Corham has a port."),
]


@pytest.fixture
def address():
    """Return the address of a running service over three passages."""
    retriever = IndexRetriever(Bm25Index(PASSAGES, "default"))
    with app_served(make_app(retriever, "bm25")) as url:
        yield url


def as_search_r1_calls_it(url: str, queries: list[str], topk: int) -> list[list[str]]:
    """Return the passages as the client of Search-R1 and the tool of verl read an answer."""
    payload = {"queries": queries, "topk": topk, "return_scores": True}
    response = httpx.post(f"{url}/retrieve", json=payload, timeout=HANG_SECONDS)
    response.raise_for_status()
    results = response.json()["result"]
    texts = []
    for hits in results:
        texts.append([])
        for hit in hits:
            title, *lines = hit["document"]["contents"].split("\n")
            plain_title = title.strip('"')
            texts[-1].append(f"{plain_title}: {' '.join(lines)}")
            assert hit["score"] > 0
    return texts


def test_a_client_of_search_r1_gets_passages(address):
    assert as_search_r1_calls_it(address, ["a town", "Corham's port"], 1) == [
        ["Tisby: Tisby is a town."],
        [": Corham has a port."],
    ]


def test_scores_are_left_out_and_topk_has_a_default(address):
    answer = httpx.post(f"{address}/retrieve", json={"queries": ["town"]}, timeout=HANG_SECONDS)
    assert answer.json() == {"result": [[{"id": "a", "contents": '"Tisby"\nTisby is a town.'}]]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"queries": "town"}, 'the request needs "queries" (a list of strings)'),
        ({"queries": []}, "the request has 0 queries"),
        ({"queries": ["x"], "topk": 0}, "topk is 0: give 1 to 1000"),
        ({"queries": ["x"], "topk": True}, "topk is True: give 1 to 1000"),
        ({"queries": ["x"], "return_scores": "yes"}, "return_scores is 'yes': give true or false"),
    ],
)
def test_a_wrong_request_is_answered_with_one_sentence(address, body, sentence):
    answer = httpx.post(f"{address}/retrieve", json=body, timeout=HANG_SECONDS)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


def test_the_service_has_a_page(address):
    for route in ("/", "/docs"):
        page = httpx.get(f"{address}{route}", timeout=HANG_SECONDS)
        assert page.status_code == 200
        assert "an index of kind bm25 with 3 passages" in page.text
        assert '"topk": 3' in page.text


def test_our_client_reads_our_service_and_the_forms_of_other_servers(address):
    retriever = open_protocol(address, 2)
    assert retriever.version == address
    assert asyncio.run(retriever.search("a town", 2)) == [PASSAGES[0]]
    (river,) = asyncio.run(ProtocolRetriever(address).search("a long river", 1))
    assert (river.title, river.text) == ('The "Quina"', "A river.\nIt is long.")

    hits = [
        {"document": {"contents": '"Tisby"\nA town.'}, "score": 0.5},
        {"id": 7, "title": "Quina", "text": "A river."},
    ]
    answer = Answer(content={"result": [hits]})
    with serving(lambda request, number: answer) as server:
        first, second = asyncio.run(ProtocolRetriever(server.base_url).search("x", 2))
    assert (first.title, first.text) == ("Tisby", "A town.")
    assert len(first.id) == 16
    assert second == Passage(id="7", title="Quina", text="A river.")


def test_what_our_client_sends_is_the_protocol():
    with serving(lambda request, number: Answer(content={"result": [[]]})) as server:
        asyncio.run(ProtocolRetriever(server.base_url).search("a town", 4))
    (request,) = server.requests
    assert request.path == "/v1/retrieve"
    assert request.body == {"queries": ["a town"], "topk": 4, "return_scores": True}


@pytest.mark.parametrize(
    "content",
    [
        {"results": [[]]},
        {"result": [["a text"]]},
        {"result": [[{"document": "a text"}]]},
        {"result": [[{"document": {"id": "1"}}]]},
        {"result": [[], []]},
        {"result": 5},
    ],
)
def test_a_server_that_answers_something_else_is_refused(content, turned_clock):
    with serving(lambda request, number: Answer(content=content)) as server:
        with pytest.raises(UserError, match="does not answer POST /retrieve as Search-R1's"):
            open_protocol(server.base_url, 1)
        quick = RetryPolicy(max_attempts=1)
        with pytest.raises(RetrieverUnavailableError):
            asyncio.run(ProtocolRetriever(server.base_url, policy=quick).search("x", 1))
