"""The retrieval service and its client: over a real socket, under overload, and against a server
that misbehaves.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.http.client import TransientError
from mujica_jax.http.retry import RetryPolicy
from mujica_jax.retrieval import service
from mujica_jax.retrieval.client import RemoteRetriever, open_remote
from mujica_jax.retrieval.errors import (
    RetrieverRefusedError,
    RetrieverTimeoutError,
    RetrieverUnavailableError,
)
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.service import MAX_REQUEST_BYTES, make_app, open_port
from tests.helpers.local_endpoint import Answer, serving
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.served_app import app_served
from tests.helpers.tiny_embedder import write_corpus
from tests.helpers.turned_clock import TurnedClock
from tests.retrieval.test_retriever import PASSAGES, RecordingIndex

HIT = {"id": "1", "title": "title 1", "text": "text", "score": 0.5}


post = functools.partial(httpx.post, timeout=HANG_SECONDS)
get = functools.partial(httpx.get, timeout=HANG_SECONDS)


@pytest.fixture(autouse=True)
def clock(turned_clock) -> TurnedClock:
    """Return the clock of the clients, so that the speed of the machine does not matter to them.

    The service has the real one.
    """
    return turned_clock


@contextlib.contextmanager
def served(searched: RecordingIndex, **options):
    """The address of a running service."""
    with app_served(make_app(IndexRetriever(searched, **options), "exact")) as address:
        try:
            yield address
        finally:
            searched.hold.set()


async def together(retriever, *queries, k=2):
    return await asyncio.gather(
        *(retriever.search(query, k) for query in queries), return_exceptions=True
    )


def client(url: str, *, concurrency: int = 8, **policy) -> RemoteRetriever:
    return RemoteRetriever(
        url, concurrency=concurrency, policy=RetryPolicy(**{"first_wait_seconds": 0.01} | policy)
    )


def test_the_client_finds_what_the_index_finds_in_one_request():
    searched = RecordingIndex()
    with served(searched) as url:
        remote = client(url)
        answers = asyncio.run(together(remote, "a", "bbb", "cc", "a"))
        assert answers == [PASSAGES[1:3], PASSAGES[3:5], PASSAGES[2:4], PASSAGES[1:3]]
        assert searched.batches == [["a", "bbb", "cc"]]
        assert asyncio.run(remote.search("dddd", 1)) == [PASSAGES[4]], "in another event loop"
        health = remote.check()
    assert health.version == "version1"
    assert health.passages == 10
    assert health.kind == "exact"
    assert remote.version == "version1"
    statistics = remote.statistics
    assert statistics.queries == 5
    assert statistics.shared == 1
    assert statistics.batches == 2
    assert statistics.failed == 0


def test_a_full_line_is_answered_with_429_at_once_and_the_client_comes_back(monkeypatch):
    searched = RecordingIndex()
    told_to_come_back = threading.Semaphore(0)
    with served(searched, max_waiting=3) as url:
        searched.hold.clear()
        statuses: list[int] = []

        def ask(number: int) -> None:
            response = post(f"{url}/search", json={"queries": [f"query {number}"], "k": 1})
            statuses.append(response.status_code)
            if response.status_code == 429:
                assert response.headers["retry-after"] == "1"
                assert "searches are waiting" in response.json()["error"]
                told_to_come_back.release()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        threads[0].start()
        assert searched.entered.acquire(timeout=HANG_SECONDS)
        for thread in threads[1:]:
            thread.start()
        # One is searched and three wait.
        for _ in range(12):
            assert told_to_come_back.acquire(timeout=HANG_SECONDS)
        assert statuses == [429] * 12, "nobody else has been answered"

        remote = client(url)
        send = remote._client.post

        async def send_until_refused(body):
            try:
                return await send(body)
            except TransientError:
                # Now the line becomes empty.
                searched.hold.set()
                for thread in threads:
                    thread.join()
                raise

        monkeypatch.setattr(remote._client, "post", send_until_refused)
        assert len(asyncio.run(remote.search("late", 1))) == 1
        metrics = get(f"{url}/metrics").text
    assert statuses.count(429) == 12
    assert statuses.count(200) == 4
    assert remote.statistics.retries == 1
    assert 'mujica_retrieval_answers_total{status="429"}' in metrics
    assert "mujica_retrieval_encode_seconds_total" in metrics


def test_a_request_that_can_never_wait_here_is_told_so_and_the_client_sends_less():
    searched = RecordingIndex()
    with served(searched, max_waiting=3) as url:
        response = post(f"{url}/search", json={"queries": ["a", "bb", "ccc", "dddd", "a"], "k": 1})
        assert response.status_code == 413
        assert (
            "has 4 different queries, but the queue of this service holds at most 3: send fewer at "
            "once" in response.json()["error"]
        )
        assert (
            post(f"{url}/search", json={"queries": ["a", "bb", "a", "a"], "k": 1}).status_code
            == 200
        )
        answers = asyncio.run(
            together(client(url, concurrency=1), *("x" * n for n in range(7)), k=1)
        )
        assert answers == [[PASSAGES[n]] for n in range(7)]


def test_an_answer_that_would_be_too_large_is_asked_for_in_parts(monkeypatch):
    monkeypatch.setattr(service, "MAX_ANSWER_BYTES", 250)
    with served(RecordingIndex()) as url:
        remote = client(url)
        assert asyncio.run(together(remote, "", "a", "bb", "ccc", "dddd")) == [
            PASSAGES[n : n + 2] for n in range(5)
        ]
        assert remote.statistics.batches == 3, "of 5 queries 2 and 3, of the 3 1 and 2"
        with pytest.raises(
            RetrieverRefusedError,
            match="more than 250 bytes: send fewer queries at once, or a smaller k",
        ):
            asyncio.run(remote.search("a", 8))


def test_however_many_ask_for_its_health_one_search_answers_them():
    searched = RecordingIndex()
    app = make_app(IndexRetriever(searched), "exact")
    arrived = threading.Semaphore(0)

    async def counting(scope, receive, send):
        if scope["type"] == "http":
            arrived.release()
        await app(scope, receive, send)

    with app_served(counting) as url:
        searched.hold.clear()
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(get(f"{url}/healthz").status_code))
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert arrived.acquire(timeout=HANG_SECONDS)
        searched.hold.set()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 20
        assert len(searched.batches) < 20
        before = len(searched.batches)
        assert get(f"{url}/healthz").status_code == 200
        assert len(searched.batches) == before + 1


def test_a_request_that_stops_half_way_is_given_up(monkeypatch):
    monkeypatch.setattr(service, "MAX_READING_SECONDS", 0.2)
    with (
        served(RecordingIndex()) as url,
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), HANG_SECONDS) as half,
    ):
        half.sendall(
            b'POST /search HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{"queries"'
        )
        with half.makefile("rb") as answer:
            reply = answer.read()
    # The reading has ended, so the connection was closed.
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 s" in reply


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'needs "queries"'),
        (b'{"queries": "who?", "k": 1}', 'needs "queries"'),
        (b'{"queries": [], "k": 1}', "has 0 queries"),
        (json.dumps({"queries": ["a"] * 257, "k": 1}).encode(), "has 257 queries"),
        (b'{"queries": ["a"], "k": 11}', "k is 11: give 1 to 10"),
        (b'{"queries": ["a"], "k": true}', "k is True"),
        (b'{"queries": ["\\ud800"], "k": 1}', "cannot be written as UTF-8"),
        (b" " * (MAX_REQUEST_BYTES + 1), "more than"),
    ],
    ids=range(10),
)
def test_a_bad_request_is_told_what_is_wrong(body, complaint):
    with served(RecordingIndex()) as url:
        response = post(f"{url}/search", content=body)
        assert response.status_code == (413 if complaint == "more than" else 400)
        assert complaint in response.json()["error"]
        assert post(f"{url}/search", json={"queries": ["a"], "k": 1}).status_code == 200


def test_an_index_that_breaks_shows_in_status_and_health():
    searched = RecordingIndex()
    with served(searched) as url:
        searched.fault = OSError("the disk is gone")
        assert post(f"{url}/search", json={"queries": ["a"], "k": 1}).status_code == 503
        assert get(f"{url}/healthz").status_code == 503
        with pytest.raises(UserError, match=r"is unhealthy .*the disk is gone"):
            open_remote(url, "dense", 5)
        searched.fault = None
        assert open_remote(url, "dense", 5).version == "version1"
        with pytest.raises(
            UserError, match=r"retriever is 'bm25', but .* serves an index of kind 'exact'"
        ):
            open_remote(url, "bm25", 4)


def test_an_index_that_hangs_shows_in_the_status():
    searched = RecordingIndex()
    with served(searched, deadline_seconds=0.2) as url:
        searched.hold.clear()
        assert post(f"{url}/search", json={"queries": ["a"], "k": 1}).status_code == 504


MISBEHAVIOUR = {
    "500": Answer(status=500),
    "429 with a wish": Answer(status=429, headers={"Retry-After": "0.05"}),
    "hang up": Answer(fault="hang up"),
    "cut": Answer(content={"version": "v", "results": [[HIT]]}, fault="cut"),
    "no JSON": Answer(content=b"<html>gateway</html>"),
    "no object": Answer(content=[]),
    "too few results": Answer(content={"version": "v", "results": []}),
    "too many passages": Answer(content={"version": "v", "results": [[HIT] * 3]}),
    "no title": Answer(content={"version": "v", "results": [[{"id": "1", "text": "text"}]]}),
    "a number for a title": Answer(content={"version": "v", "results": [[HIT | {"title": 3}]]}),
    "late": Answer(fault="silent"),
}


@pytest.mark.parametrize("fault", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
def test_the_client_survives_what_passes(clock, fault):
    fault = dataclasses.replace(
        fault, meanwhile=lambda: clock.turn(1.1 if fault.fault == "silent" else 0.0)
    )
    good = Answer(content={"version": "v", "results": [[HIT]]})
    with serving(lambda request, before: fault if before < 2 else good) as endpoint:
        remote = client(endpoint.base_url, timeout_seconds=1.0)
        assert asyncio.run(remote.search("a", 2)) == [PASSAGES[1]]
        assert len(endpoint.requests) == 3
        assert remote.statistics.retries == 2
        assert endpoint.requests[0].body == {"queries": ["a"], "k": 2}


def test_the_client_gives_up_with_a_type():
    with serving(lambda *_: Answer(status=503, content={"error": "busy"})) as endpoint:
        with pytest.raises(
            RetrieverUnavailableError,
            match=r"failed 3 times, the last time with status 503 \(busy\)",
        ):
            asyncio.run(client(endpoint.base_url, max_attempts=3).search("a", 1))
        with pytest.raises(RetrieverTimeoutError, match=r"within the deadline of 0\.3 s"):
            asyncio.run(
                client(endpoint.base_url, deadline_seconds=0.3, max_attempts=1000).search("a", 1)
            )
    with serving(lambda *_: Answer(status=400, content={"error": "k is 99"})) as endpoint:
        with pytest.raises(RetrieverRefusedError, match="status 400: k is 99"):
            asyncio.run(client(endpoint.base_url).search("a", 1))
        assert len(endpoint.requests) == 1, "what is refused is not sent again"
    with pytest.raises(RetrieverUnavailableError, match="failed 2 times"):
        # nobody listens any more
        asyncio.run(client(endpoint.base_url, max_attempts=2).search("a", 1))
    with pytest.raises(RetrieverUnavailableError, match=r"cannot read the health .*index serve"):
        client(endpoint.base_url).check()


@pytest.mark.parametrize("health", [b"[" * 100_000, b"<html>", [], {"version": "v"}, "well"])
def test_a_health_that_is_none_is_a_typed_error(health):
    with (
        serving(lambda *_: Answer(content=health)) as endpoint,
        pytest.raises(RetrieverUnavailableError, match="cannot read the health"),
    ):
        client(endpoint.base_url).check()
    assert [request.path for request in endpoint.requests] == ["/v1/healthz"]


def test_another_version_of_the_index_in_the_middle_of_a_run_is_refused():
    with serving(
        lambda _, before: Answer(content={"version": f"v{before}", "results": [[HIT]]})
    ) as endpoint:
        remote = client(endpoint.base_url)
        assert asyncio.run(remote.search("a", 1)) == [PASSAGES[1]]
        with pytest.raises(
            RetrieverRefusedError,
            match="serves index version v1, but this run has searched version v0",
        ):
            asyncio.run(remote.search("bb", 1))


def test_no_more_requests_at_once_than_there_are_places():
    two = threading.Barrier(2)

    def answer(request, before):
        # There are five. Each of the first four is answered when another one is under way.
        if before < 4:
            two.wait(HANG_SECONDS)
        return Answer(content={"version": "v", "results": [[HIT]] * len(request.body["queries"])})

    with serving(answer) as endpoint:
        remote = client(endpoint.base_url, concurrency=2)
        answers = asyncio.run(together(remote, *[f"query {n}" for n in range(300)], k=1))
        assert answers == [[PASSAGES[1]]] * 300
        assert len(endpoint.requests) == 5
        assert endpoint.most_at_once == 2


def serving_process(folder: Path) -> subprocess.Popen:
    corpus = write_corpus(folder / "corpus.jsonl", 20)
    assert (
        index.main(
            ["build", "--corpus", str(corpus), "--kind", "bm25", "--out", str(folder / "index")]
        )
        == 0
    )
    command = [
        sys.executable,
        "-m",
        "mujica_jax.index",
        "serve",
        "--index",
        str(folder / "index"),
        "--port",
        "0",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_serve_from_the_command_line_until_sigterm(tmp_path):
    with serving_process(tmp_path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            assert get(f"{url}/healthz").status_code == 200, "whoever has read the line is answered"
            (passages,) = asyncio.run(together(open_remote(url, "bm25", 4), "title word3", k=4))
            assert len(passages) == 4
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "1 searches" in out, err
    assert "Traceback" not in err, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_right_after_the_line_ends_it(tmp_path, number):
    with serving_process(tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.send_signal(number)
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_one_sentence():
    with contextlib.closing(open_port("127.0.0.1", 0)) as opened:
        opened.listen()
        with pytest.raises(UserError, match=r"cannot be opened .*choose another --host or --port"):
            open_port("127.0.0.1", opened.getsockname()[1])
    with pytest.raises(UserError, match="cannot be opened"):
        open_port("127.0.0.1", 70_000)
