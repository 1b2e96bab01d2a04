"""The reranker: the best of more candidates, searches together, scores kept, faults typed; over an
index, a service and a server of another project.
"""

import asyncio
import json
import re
import threading

import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.retrieval.client import open_remote
from mujica_jax.retrieval.embedding.find_cross_encoder import find_cross_encoder
from mujica_jax.retrieval.errors import RetrieverOverloadedError, RetrieverUnavailableError
from mujica_jax.retrieval.reranker import (
    RerankedIndex,
    Reranker,
    best_places,
    encodable,
    open_reranker,
)
from mujica_jax.retrieval.retrieve_protocol import open_protocol
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.service import make_app
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.tasks.content import content_version
from mujica_jax.tasks.environment import TextEnvironment
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.served_app import app_served
from tests.helpers.tiny_cross_encoder import tiny_cross_encoder
from tests.helpers.tiny_embedder import WORDS

PASSAGES = [Passage(id=str(n), title=f"title {n}", text="text") for n in range(10)]


class InOrder:
    """An index that finds the passages in the order of the corpus."""

    def __init__(self) -> None:
        self.passages = PASSAGES
        self.version = "version1"
        self.asked: list[tuple[list[str], int]] = []

    def encode(self, queries):
        return list(queries)

    def search_encoded(self, queries, k):
        self.asked.append((queries, k))
        return [[(position, 1.0) for position in range(k)] for _ in queries]

    def search(self, queries, k):
        return self.search_encoded(self.encode(queries), k)


class LargestNumber:
    """A model that prefers the passage with the largest number in its title."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, str]]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Semaphore(0)
        self.fault: Exception | None = None

    def scores(self, pairs):
        self.entered.release()
        self.hold.wait(HANG_SECONDS)
        self.batches.append(list(pairs))
        if self.fault is not None:
            raise self.fault
        numbers = [re.search(r"\d+", text) for _, text in pairs]
        return np.array([int(number[0]) if number else -1 for number in numbers], np.float32)


def reranker(model: LargestNumber, candidates: int = 4, **options) -> Reranker:
    return Reranker(model, version="model1", candidates=candidates, **options)


def ids(passages) -> list[str]:
    return [passage.id for passage in passages]


async def together(retriever, *queries, k=2):
    return await asyncio.gather(*(retriever.search(query, k) for query in queries))


def test_the_largest_scores_come_first_and_equal_ones_keep_their_order():
    assert best_places([0.5, 2.0, 0.5, 2.0, -1.0], 4) == [(1, 2.0), (3, 2.0), (0, 0.5), (2, 0.5)]


def test_the_best_of_the_candidates_are_shown():
    index = InOrder()
    model = LargestNumber()
    retriever = IndexRetriever(index, reranker=reranker(model))
    assert ids(asyncio.run(retriever.search("query", 2))) == ["3", "2"]
    assert index.asked == [(["query"], 4)]
    assert model.batches == [[("query", f"title {n}\ntext") for n in range(4)]]


def test_there_are_at_least_as_many_candidates_as_results_and_never_more_than_passages():
    index = InOrder()
    retriever = IndexRetriever(index, reranker=reranker(LargestNumber(), candidates=3))
    assert ids(asyncio.run(retriever.search("query", 5))) == ["4", "3", "2", "1", "0"]
    many = IndexRetriever(index, reranker=reranker(LargestNumber(), candidates=50))
    assert ids(asyncio.run(many.search("query", 1))) == ["9"]
    assert [k for _, k in index.asked] == [5, 10]


def test_searches_that_arrive_together_are_scored_together_and_equal_ones_once():
    model = LargestNumber()
    shared = reranker(model)
    # Two retrievers with one reranker, as the questions of the distractor setting have.
    retrievers = [IndexRetriever(InOrder(), inline=True, reranker=shared) for _ in range(2)]

    async def play():
        return await asyncio.gather(
            together(retrievers[0], "a", "b", "a"), together(retrievers[1], "c")
        )

    (first, second) = asyncio.run(play())
    assert [ids(passages) for passages in (*first, *second)] == [["3", "2"]] * 4
    assert [len(batch) for batch in model.batches] == [12]
    statistics = [retriever.statistics for retriever in retrievers]
    assert [entry.reranked for entry in statistics] == [8, 4]
    assert statistics[0].rerank_seconds > 0
    assert "reranking 8 passages" in statistics[0].sentence()


def test_scores_are_stored_and_a_damaged_entry_is_scored_again(tmp_path):
    model = LargestNumber()
    cache = SearchCache(tmp_path, "model1")
    for _ in range(2):
        retriever = IndexRetriever(InOrder(), reranker=reranker(model, cache=cache))
        assert ids(asyncio.run(retriever.search("query", 2))) == ["3", "2"]
    assert len(model.batches) == 1
    assert retriever.statistics.reranked == 0

    for damaged in ("[1, 2]", "[1, 2, 3, NaN]", "{", '["a", 1, 2, 3]'):
        key = cache._database.execute("SELECT query FROM hits").fetchone()[0]  # pyright: ignore
        cache.write([(key, 4, damaged)])
        assert ids(asyncio.run(retriever.search("query", 2))) == ["3", "2"]
    assert len(model.batches) == 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [(RuntimeError("out of memory"), "the reranker failed .out of memory."), (None, "not finite")],
)
def test_a_fault_of_the_model_is_one_of_the_retriever(monkeypatch, fault, message):
    model = LargestNumber()
    model.fault = fault
    if fault is None:
        monkeypatch.setattr(model, "scores", lambda pairs: np.full(len(pairs), np.nan))
    retriever = IndexRetriever(InOrder(), reranker=reranker(model))
    with pytest.raises(RetrieverUnavailableError, match=message):
        asyncio.run(retriever.search("query", 2))
    assert retriever.statistics.failed == 1
    with pytest.raises(RetrieverUnavailableError, match=message):
        asyncio.run(retriever.health())


def test_a_full_queue_refuses():
    model = LargestNumber()
    retriever = IndexRetriever(InOrder(), reranker=reranker(model, max_waiting=1))

    async def play():
        model.hold.clear()
        first = asyncio.ensure_future(retriever.search("a", 1))
        await asyncio.to_thread(model.entered.acquire, True, HANG_SECONDS)
        later = asyncio.gather(
            *(retriever.search(query, 1) for query in "bc"), return_exceptions=True
        )
        while not later.done():
            if retriever.statistics.failed:
                model.hold.set()
            await asyncio.sleep(0)
        return await first, await later

    first, later = asyncio.run(play())
    assert ids(first) == ["3"]
    assert [type(result) for result in later].count(RetrieverOverloadedError) == 1


def test_no_passages_are_not_scored():
    model = LargestNumber()
    counted = IndexRetriever(InOrder())
    assert asyncio.run(reranker(model).best("query", [], 3, counted)) == []
    assert model.batches == []


def test_a_reranked_index_finds_what_a_retriever_finds():
    index = RerankedIndex(InOrder(), LargestNumber(), candidates=4)
    assert index.search(["a", "b"], 2) == [[(3, 3.0), (2, 2.0)]] * 2


def test_the_service_reranks_and_its_version_names_the_model():
    retriever = IndexRetriever(InOrder(), reranker=reranker(LargestNumber()))
    with app_served(make_app(retriever, "exact")) as url:
        remote = open_remote(url, "dense", 2)
        assert ids(asyncio.run(remote.search("query", 2))) == ["3", "2"]
    assert remote.version == "version1-model1-4"


def test_a_client_reranks_what_a_service_finds():
    index = InOrder()
    with app_served(make_app(IndexRetriever(index), "exact")) as url:
        remote = open_remote(url, "dense", 2, reranker(LargestNumber(), candidates=50))
        assert ids(asyncio.run(remote.search("query", 2))) == ["9", "8"]
        assert remote.statistics.reranked == 10
        environment = TextEnvironment(remote, 2)
        assert content_version(environment) == "version1-model1-50"


def test_a_client_reranks_what_the_server_of_another_project_finds():
    with app_served(make_app(IndexRetriever(InOrder()), "exact")) as url:
        remote = open_protocol(url, 2, reranker(LargestNumber(), candidates=6))
        assert ids(asyncio.run(remote.search("query", 2))) == ["5", "4"]


def test_more_candidates_than_a_service_gives_are_refused():
    with (
        app_served(make_app(IndexRetriever(InOrder()), "exact")) as url,
        pytest.raises(UserError, match=r"takes 1001 candidates, but .* at most 1000 passages"),
    ):
        open_remote(url, "dense", 2, reranker(LargestNumber(), candidates=1001))


def test_what_is_searched_changes_with_the_reranker_and_its_candidates():
    versions = {
        content_version(TextEnvironment(IndexRetriever(InOrder(), reranker=stage), 2))
        for stage in (None, reranker(LargestNumber()), reranker(LargestNumber(), candidates=5))
    }
    assert versions == {"version1", "version1-model1-4", "version1-model1-5"}


def test_a_cross_encoder_on_disk_is_a_reranker(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = str(tiny_cross_encoder(tmp_path / "model"))
    passages = [
        Passage(id=str(n), title=f"word{n}", text=" ".join(WORDS[n : n + 5])) for n in range(8)
    ]
    stage = open_reranker(folder, 5)
    counted = IndexRetriever(InOrder())
    best = asyncio.run(stage.best("word1 word2", passages, 3, counted))
    scores = (
        find_cross_encoder(folder)
        .load()
        .scores([("word1 word2", passage.contents) for passage in passages])
    )
    places = np.argsort(-scores, kind="stable")[:3]
    assert best == [(int(place), float(scores[place])) for place in places]
    assert counted.statistics.reranked == 8
    (file,) = (tmp_path / "cache" / "mujica_jax" / "reranked").glob("*.sqlite")
    assert file.stem == find_cross_encoder(folder).version


def test_no_candidates_are_refused(tmp_path):
    with pytest.raises(UserError, match="rerank_candidates is 0: give at least 1"):
        open_reranker(str(tmp_path), 0)


def test_half_a_surrogate_pair_is_made_encodable():
    assert encodable("a\ud800b") == "a?b"
    assert json.dumps(encodable("é")) == '"\\u00e9"'
