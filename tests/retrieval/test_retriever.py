"""The retriever over an index: queries together, the same one once, results kept, faults typed,
deadlines held.
"""

import asyncio
import threading

import pytest

from mujica_jax.retrieval import search_cache
from mujica_jax.retrieval.errors import (
    RetrieverOverloadedError,
    RetrieverRefusedError,
    RetrieverTimeoutError,
    RetrieverUnavailableError,
)
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.text.corpus import Passage
from tests.helpers.patience import HANG_SECONDS

PASSAGES = [Passage(id=str(n), title=f"title {n}", text="text") for n in range(10)]


class RecordingIndex:
    """Finds the passages from the query's length on, and records what was searched together."""

    def __init__(self) -> None:
        self.passages = PASSAGES
        self.version = "version1"
        self.batches: list[list[str]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Semaphore(0)
        self.answered = threading.Event()
        self.fault: Exception | None = None

    async def is_searched(self) -> None:
        """Wait until one more search has begun."""
        assert await asyncio.to_thread(self.entered.acquire, True, HANG_SECONDS)

    def encode(self, queries):
        self.entered.release()
        self.hold.wait(HANG_SECONDS)
        self.batches.append(list(queries))
        if self.fault is not None:
            raise self.fault
        return queries

    def search_encoded(self, queries, k):
        self.answered.set()
        return [self._hits(query, k) for query in queries]

    def _hits(self, query, k):
        return [(len(query) + n, 1.0 / (1 + n)) for n in range(k)]

    def search(self, queries, k):
        return self.search_encoded(self.encode(queries), k)


@pytest.fixture
def index():
    index = RecordingIndex()
    yield index
    index.hold.set()


async def together(retriever, *queries, k=2):
    return await asyncio.gather(*(retriever.search(query, k) for query in queries))


@pytest.mark.parametrize("inline", [True, False])
def test_queries_that_arrive_together_are_searched_together_and_each_gets_its_own(index, inline):
    retriever = IndexRetriever(index, inline=inline)
    answers = asyncio.run(together(retriever, "a", "bbb", "cc", "a"))
    expected = [["1", "2"], ["3", "4"], ["2", "3"], ["1", "2"]]
    for answer, expected_ids in zip(answers, expected, strict=True):
        assert [passage.id for passage in answer] == expected_ids
    assert index.batches == [["a", "bbb", "cc"]]
    statistics = retriever.statistics
    assert statistics.queries == 4
    assert statistics.shared == 1
    assert statistics.batches == 1
    assert statistics.cached == 0
    assert statistics.waiting_seconds >= statistics.encode_seconds >= 0
    assert "4 searches" in statistics.sentence()


def test_what_arrives_during_a_search_is_the_next_batch(index):
    async def play(retriever):
        index.hold.clear()
        first = asyncio.ensure_future(retriever.search("a", 1))
        await index.is_searched()
        rest = asyncio.gather(*(retriever.search(query, 1) for query in ("bb", "a", "ccc")))
        # They wait now.
        await asyncio.sleep(0)
        index.hold.set()
        return await first, await rest

    asyncio.run(play(IndexRetriever(index)))
    assert index.batches == [["a"], ["bb", "ccc"]], "the second a is the first one's"


def test_results_are_kept_on_disk_for_the_version_of_the_index(index, tmp_path):
    first = IndexRetriever(index, cache=SearchCache(tmp_path, index.version))
    answers = asyncio.run(together(first, "a", "bb"))
    reopened = IndexRetriever(index, cache=SearchCache(tmp_path, index.version))
    assert asyncio.run(together(reopened, "bb", "a", "ccc"))[:2] == [answers[1], answers[0]]
    assert reopened.statistics.cached == 2
    assert reopened.statistics.batches == 1
    assert index.batches == [["a", "bb"], ["ccc"]]
    asyncio.run(together(reopened, "a", k=3))
    assert index.batches[-1] == ["a"], "another k is another search"
    other = IndexRetriever(index, cache=SearchCache(tmp_path, "version2"))
    asyncio.run(together(other, "a"))
    assert other.statistics.cached == 0


def test_a_query_that_is_no_text_fails_alone(index, tmp_path):
    retriever = IndexRetriever(index, cache=SearchCache(tmp_path, index.version))

    async def play():
        asked = (retriever.search(query, 1) for query in ("a", "\ud800", "bb"))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = asyncio.run(play())
    assert first == [PASSAGES[1]]
    assert third == [PASSAGES[2]]
    assert index.batches == [["a", "bb"]]
    assert isinstance(second, RetrieverRefusedError)
    assert r"'\ud800' cannot be written as UTF-8" in str(second)
    assert retriever.statistics.queries == 3
    assert retriever.statistics.failed == 1
    assert asyncio.run(together(retriever, "a", k=1)) == [[PASSAGES[1]]]
    assert retriever.statistics.cached == 1


@pytest.mark.parametrize(
    "stored",
    [
        "[[10, 0.5]]",
        "[[-1, 0.5]]",
        "[[1e999, 0.5]]",
        "[[0.7, 0.5]]",
        "[[1, 0.5], [2, 0.4]]",
        "no json",
        "[3]",
        "[" * 10**5,
    ],
    ids=lambda stored: stored[:20],
)
def test_what_is_no_result_of_the_index_is_searched_again(index, tmp_path, stored):
    cache = SearchCache(tmp_path, index.version)
    cache.write([("a", 1, stored)])
    retriever = IndexRetriever(index, cache=cache)
    assert asyncio.run(together(retriever, "a", k=1)) == [[PASSAGES[1]]]
    # The damaged result is replaced.
    assert retriever.statistics.cached == 0
    assert cache.read("a", 1) == "[[1, 1.0]]"


def test_the_cache_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(search_cache, "MAX_BYTES", 200_000)
    cache = SearchCache(tmp_path, "version1")
    long = "a" * (search_cache.MAX_QUERY_CHARACTERS + 1)
    cache.write([(long, 1, "x"), (long[1:], 1, "y")])
    assert cache.read(long, 1) is None
    assert cache.read(long[1:], 1) == "y"
    queries = [f"{number} {'b' * 2000}" for number in range(400)]
    for query in queries:
        cache.write([(query, 1, "x")])
    assert not caplog.records
    assert cache.path.stat().st_size <= 200_000
    is_cached = [cache.read(query, 1) is not None for query in queries]
    assert is_cached[-1]
    assert not is_cached[0]
    assert 10 < sum(is_cached) < 100
    assert is_cached == sorted(is_cached), "the older ones went"


def test_a_damaged_cache_is_left_alone_and_that_is_said_once(index, tmp_path, caplog):
    (tmp_path / "version1.sqlite").write_bytes(
        b"this is no database, and longer than its header" * 10
    )
    retriever = IndexRetriever(index, cache=SearchCache(tmp_path, index.version))
    for _ in range(2):
        assert [passage.id for passage in asyncio.run(retriever.search("a", 1))] == ["1"]
    (message,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("search_cache")
    ]
    assert "version1.sqlite is switched off" in message
    caplog.clear()
    (tmp_path / "file").write_text("")
    SearchCache(tmp_path / "file" / "folder", "v")
    assert "is switched off" in caplog.text


@pytest.mark.parametrize("fault", [OSError("the disk is gone"), RuntimeError("out of memory")])
def test_faults_of_the_index_are_typed_and_do_not_end_the_retriever(index, fault):
    async def play(retriever):
        index.fault = fault
        results = await asyncio.gather(
            retriever.search("a", 1), retriever.search("bb", 1), return_exceptions=True
        )
        index.fault = None
        return results, await retriever.search("a", 1)

    retriever = IndexRetriever(index)
    (first, second), later = asyncio.run(play(retriever))
    assert type(first) is type(second) is RetrieverUnavailableError
    assert str(fault) in str(first)
    assert later == [PASSAGES[1]]
    assert retriever.statistics.failed == 2


def test_a_fault_of_the_program_keeps_its_type(index):
    index.fault = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(IndexRetriever(index).search("a", 1))


async def test_an_answer_that_came_while_the_event_loop_was_held_up_is_not_late(
    turned_clock, index
):
    retriever = IndexRetriever(index, deadline_seconds=0.3)
    index.hold.clear()
    search = asyncio.create_task(retriever.search("a", 1))
    await index.is_searched()
    index.hold.set()
    # This holds up the event loop, as a compilation does.
    assert index.answered.wait(HANG_SECONDS)
    turned_clock.turn(0.31)
    assert await search


async def test_a_search_that_hangs_ends_at_its_deadline(index):
    index.hold.clear()
    try:
        with pytest.raises(RetrieverTimeoutError, match=r"within the deadline of 0\.1 s"):
            await IndexRetriever(index, deadline_seconds=0.1).search("a", 1)
        with pytest.raises(RetrieverTimeoutError):
            await IndexRetriever(index, deadline_seconds=0.1).health()
    finally:
        index.hold.set()


async def test_a_full_line_is_refused(index):
    retriever = IndexRetriever(index, max_waiting=2)
    index.hold.clear()
    waiting = [asyncio.ensure_future(retriever.search("a", 1))]
    await index.is_searched()
    waiting += [asyncio.ensure_future(retriever.search(query, 1)) for query in ("bb", "ccc")]
    # They wait now.
    await asyncio.sleep(0)
    with pytest.raises(
        RetrieverOverloadedError, match="2 searches are waiting, and the limit is 2"
    ):
        await retriever.search("dddd", 1)
    index.hold.set()
    await asyncio.gather(*waiting)
    assert await retriever.search("dddd", 1) == [PASSAGES[4]]


def test_who_goes_away_takes_nothing_from_the_others(index):
    async def play(retriever):
        index.hold.clear()
        first, second = (asyncio.ensure_future(retriever.search("a", 1)) for _ in range(2))
        await index.is_searched()
        first.cancel()
        index.hold.set()
        return await second

    retriever = IndexRetriever(index)
    assert asyncio.run(play(retriever)) == [PASSAGES[1]]
    assert asyncio.run(retriever.search("a", 1)) == [PASSAGES[1]], "in another event loop"


def test_health_is_a_real_search_past_the_cache(index, tmp_path):
    retriever = IndexRetriever(index, cache=SearchCache(tmp_path, index.version))
    for _ in range(2):
        health = asyncio.run(retriever.health())
    assert health.version == "version1"
    assert health.passages == 10
    assert len(index.batches) == 2
    index.fault = OSError("gone")
    with pytest.raises(RetrieverUnavailableError):
        asyncio.run(retriever.health())
