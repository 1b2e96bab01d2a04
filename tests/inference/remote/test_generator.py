"""Retries, deadlines, the queue and what is never shown, against a real server on this machine that
misbehaves.
"""

import asyncio
import email.utils
import socket
import threading
import time

import pytest

from mujica_jax.config.methods import RemoteConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.remote.generator import RemoteGenerator
from mujica_jax.inference.requests import DeadlineError, RequestError
from tests.helpers.local_endpoint import Answer, LocalEndpoint, Request, serving
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.turned_clock import TurnedClock
from tests.inference.remote.test_formats import (
    END,
    PROMPT,
    TOKENIZER,
    WORDS,
    generator,
    openai,
    params,
    vllm,
)

GOOD = Answer(content=vllm([*WORDS, END]))
KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def clock(turned_clock) -> TurnedClock:
    """Turn the clock by hand: no test of this module depends on the speed of the machine."""
    return turned_clock


def first(count: int, fault: Answer):
    """Return the behaviour of a server that has this fault `count` times and then gives a good
    answer.
    """
    return lambda request, before: fault if before < count else GOOD


def ask(
    endpoint: LocalEndpoint, *, seed: int = 7, deadline_seconds: float | None = None, **options
):
    remote = generator(endpoint, **options)
    completion = asyncio.run(
        remote.generate(PROMPT, params(seed=seed, deadline_seconds=deadline_seconds))
    )
    assert completion.token_ids == (*WORDS, END)
    return remote.statistics


# --- faults that pass ---


@pytest.mark.parametrize(
    "fault",
    [
        *(
            Answer(content={"error": {"message": "busy"}}, status=status)
            for status in (408, 409, 425, 429, 500, 502, 503, 529)
        ),
        Answer(fault="hang up"),
        Answer(content=vllm([*WORDS, END]), fault="cut"),
        Answer(content=b"<html>Bad gateway</html>"),
        Answer(content=b"[" * 100_000),
        Answer(content=[1, 2]),
        Answer(content=b""),
    ],
    ids=lambda fault: f"{fault.status} {fault.fault or str(fault.content)[:20]}",
)
def test_what_may_pass_is_tried_again(fault):
    with serving(first(2, fault)) as endpoint:
        statistics = ask(endpoint)
    assert len(endpoint.requests) == 3
    assert all(request.body == endpoint.requests[0].body for request in endpoint.requests), (
        "the same seed above all"
    )
    assert statistics.requests == 1
    assert statistics.retries == 2
    assert statistics.failed == 0


@pytest.mark.parametrize("fault", ["silent", "trickle"])
def test_a_try_without_a_whole_answer_is_given_up(clock, fault):
    late = Answer(
        content=GOOD.content,
        fault=fault,
        meanwhile=lambda: clock.turn(0.1 if fault == "trickle" else 1.1),
    )
    start_time = clock.now
    with serving(first(1, late)) as endpoint:
        assert ask(endpoint, timeout_seconds=1.0).retries == 1
    assert len(endpoint.requests) == 2
    assert clock.now - start_time >= 1.0


def test_after_the_last_try_one_sentence_names_the_address_and_the_reason():
    with serving(
        first(99, Answer(status=503, content={"error": {"message": "overloaded"}}))
    ) as endpoint:
        remote = generator(endpoint, max_attempts=3)
        with pytest.raises(RequestError) as refused:
            asyncio.run(remote.generate(PROMPT, params()))
    address = f"{endpoint.base_url}/completions"
    assert str(refused.value).startswith(
        f"{address} failed 3 times, the last time with status 503 (overloaded): "
    )
    assert len(endpoint.requests) == 3
    assert remote.statistics.failed == 1


def test_an_endpoint_that_is_down_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        config = RemoteConfig(base_url=address, model="m", mode="completions")
        remote = RemoteGenerator(config, TOKENIZER, max_attempts=2, first_wait_seconds=0.01)
        with pytest.raises(
            RequestError,
            match=rf"{address}/completions failed 2 times, the last time with ConnectError",
        ):
            asyncio.run(remote.generate(PROMPT, params()))


# --- faults that stay ---


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_a_refusal_is_not_sent_again(status):
    answer = Answer(
        status=status,
        content={"error": {"message": "no such model"}},
        headers={"Location": "/elsewhere"},
    )
    with (
        serving(first(9, answer)) as endpoint,
        pytest.raises(RequestError, match=f"with status {status}: no such model"),
    ):
        ask(endpoint)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"error": {"message": "one\ntwo\x1b[31m"}}, "one two [31m"),
        ({"object": "error", "message": "as old vLLM says it"}, "as old vLLM says it"),
        ({"detail": "Not Found"}, "Not Found"),
        (b"plain words", "plain words"),
        ({"error": {"message": "x" * 5000}}, "x" * 200 + "..."),
        (b"", "no message"),
    ],
)
def test_what_a_server_says_is_one_line_of_bounded_length(content, shown):
    with serving(first(9, Answer(status=400, content=content))) as endpoint:
        with pytest.raises(RequestError) as refused:
            ask(endpoint)
        assert (
            str(refused.value)
            == f"{endpoint.base_url}/completions refused the request with status 400: {shown}"
        )


def test_an_answer_without_end_is_not_read_to_its_end():
    refused = pytest.raises(RequestError, match="sent more than 16,777,216 bytes")
    with serving(first(9, Answer(content=b" " * 50_000_000))) as endpoint, refused:
        ask(endpoint)
    assert len(endpoint.requests) == 1


# --- deadlines ---


@pytest.mark.parametrize("kind", ["seconds", "date"])
def test_a_server_may_say_when_to_come_back(clock, kind):
    date = email.utils.formatdate(time.time() + 3600, usegmt=True)
    value = "3600" if kind == "seconds" else date
    start_time = clock.now
    with serving(first(1, Answer(status=429, headers={"Retry-After": value}))) as endpoint:
        ask(endpoint, deadline_seconds=9000.0)
    # A date is read by the machine's clock, so that some of the hour is over when it is.
    assert 3600 - HANG_SECONDS < clock.now - start_time < 3601


@pytest.mark.parametrize("value", ["soon", "-5", "nan", "inf", ""])
def test_a_time_that_cannot_be_read_is_ignored(value):
    with serving(first(1, Answer(status=429, headers={"Retry-After": value}))) as endpoint:
        assert ask(endpoint).retries == 1


def test_coming_back_after_the_deadline_is_no_use(clock):
    start_time = clock.now
    with (
        serving(first(9, Answer(status=429, headers={"Retry-After": "3600"}))) as endpoint,
        pytest.raises(
            DeadlineError,
            match=r"within the deadline of 20 s \(1 attempts; the last one ended with status 429 .*3600",
        ),
    ):
        ask(endpoint, deadline_seconds=20.0)
    assert clock.now == start_time, "it waits for nothing"


@pytest.mark.parametrize("of_the_request", [True, False])
def test_the_deadline_covers_all_tries(clock, of_the_request):
    """Two tries take 0.2 s each. The third one is cut off after 0.5 s in all."""
    limit = {"deadline_seconds": 0.5} if of_the_request else {}

    def answer(request, before):
        return Answer(fault="silent", meanwhile=lambda: clock.turn(0.21 if before < 2 else 0.1))

    with serving(answer) as endpoint:
        remote = generator(
            endpoint,
            timeout_seconds=0.2,
            max_attempts=99,
            deadline_seconds=60.0 if of_the_request else 0.5,
        )
        with pytest.raises(
            DeadlineError,
            match=r"no answer within the deadline of 0\.5 s \(2 attempts; .*no complete answer within 0\.2 s",
        ):
            asyncio.run(remote.generate(PROMPT, params(**limit)))
    assert len(endpoint.requests) == 3
    assert remote.statistics.failed == 1


def test_the_deadline_covers_the_waiting(clock):
    async def both(remote, endpoint):
        slow = asyncio.create_task(remote.generate(PROMPT, params()))
        await endpoint.has_requests(1)
        waiting = asyncio.create_task(remote.generate(PROMPT, params(deadline_seconds=0.2)))
        await asyncio.sleep(0)  # it has begun to wait
        clock.turn(0.3)
        with pytest.raises(
            DeadlineError, match=r"deadline of 0\.2 s \(no connection became free in this time\)"
        ):
            await waiting
        slow.cancel()
        return remote.statistics

    with serving(first(9, Answer(fault="silent"))) as endpoint:
        statistics = asyncio.run(both(generator(endpoint, concurrency=1), endpoint))
    assert len(endpoint.requests) == 1
    assert statistics.waiting_seconds == pytest.approx(0.3)


def test_the_waiting_between_tries_doubles_and_follows_from_the_seed(monkeypatch):
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float, *rest):
        waits.append(seconds)
        await sleep(0)

    def waited(seed: int) -> list[float]:
        waits.clear()
        with serving(first(5, Answer(status=503))) as endpoint:
            ask(endpoint, seed=seed, first_wait_seconds=1.0)
        return list(waits)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    waits_of_seed = waited(1)
    assert waited(1) == waits_of_seed
    assert waited(2) != waits_of_seed
    assert len(waits_of_seed) == 5
    for place, wait in enumerate(waits_of_seed):
        assert 0.5 * 2**place <= wait <= 1.5 * 2**place


# --- many requests ---


def test_no_more_requests_than_places_are_under_way(clock):
    three = threading.Barrier(3)

    async def many(remote):
        return await asyncio.gather(
            *(remote.generate(PROMPT, params(seed=seed)) for seed in range(12))
        )

    def answer(request, before):
        three.wait(HANG_SECONDS)  # each is answered when two others are under way
        return Answer(content=GOOD.content, meanwhile=lambda: clock.turn(0.05))

    with serving(answer) as endpoint:
        remote = generator(endpoint, concurrency=3)
        completions = asyncio.run(many(remote))
        asyncio.run(many(remote))  # another event loop
    assert len(completions) == 12
    assert endpoint.most_at_once == 3
    statistics = remote.statistics
    assert (statistics.requests, statistics.failed) == (24, 0)
    assert statistics.prompt_tokens == 24 * len(PROMPT)
    assert statistics.generated_tokens == 24 * (len(WORDS) + 1)
    assert statistics.serving_seconds > 24 * 0.049
    assert statistics.waiting_seconds > 0
    assert statistics.sentence().startswith("24 requests, 0 retries, 0 failed; ")


def test_a_cancelled_request_is_closed_and_its_place_is_free():
    async def cancel(remote, endpoint):
        slow = asyncio.create_task(remote.generate(PROMPT, params()))
        await endpoint.has_requests(1)
        waiting = asyncio.create_task(remote.generate(PROMPT, params()))
        await asyncio.sleep(0)  # it has begun to wait
        waiting.cancel()
        slow.cancel()
        outcomes = await asyncio.gather(slow, waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in outcomes)
        return await remote.generate(PROMPT, params())

    with serving(first(1, Answer(fault="silent"))) as endpoint:
        completion = asyncio.run(cancel(generator(endpoint, concurrency=1), endpoint))
        assert endpoint.abandoned.wait(HANG_SECONDS), "the server saw the connection close"
    assert completion.token_ids == (*WORDS, END)
    assert len(endpoint.requests) == 2


# --- keys and addresses ---


def test_the_key_goes_into_the_header_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)

    def echo(request: Request, before: int) -> Answer:
        sent = request.headers["Authorization"]
        return Answer(
            status=(503, 401)[before], content={"error": {"message": f"bad key {sent} {KEY}"}}
        )

    with serving(echo) as endpoint:
        remote = generator(endpoint, api_key_variable="TEST_KEY")
        with pytest.raises(RequestError) as refused:
            asyncio.run(remote.generate(PROMPT, params()))
    assert endpoint.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(endpoint.requests[0].body)
    assert str(refused.value).endswith("status 401: bad key Bearer *** ***")


def test_without_a_variable_no_key_is_sent():
    with serving(lambda request, before: Answer(content=openai("x"))) as endpoint:
        asyncio.run(generator(endpoint, "chat").generate(PROMPT, params()))
    assert "Authorization" not in endpoint.requests[0].headers


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "TEST_KEY is not set"),
        ("a\nb", "TEST_KEY holds spaces or other characters"),
        ("a b", "TEST_KEY holds"),
    ],
)
def test_a_variable_without_a_key_is_named_and_not_shown(monkeypatch, value, sentence):
    monkeypatch.setenv("TEST_KEY", value)
    with pytest.raises(UserError, match=sentence) as refused:
        config = RemoteConfig(
            base_url="http://localhost/v1", model="m", mode="chat", api_key_variable="TEST_KEY"
        )
        RemoteGenerator(config, TOKENIZER)
    assert not value or value not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("localhost:8000/v1", "names no server: write it as http://HOST:PORT/v1"),
        ("ftp://localhost/v1", "names no server"),
        ("http:///v1", "names no server"),
        ("http://localhost:port/v1", "cannot be read"),
        ("http://me:hidden@localhost/v1", "holds a password"),
        ("http://localhost/v1?key=hidden", "holds a password, a query or a fragment"),
    ],
)
def test_an_address_that_is_none_is_explained(address, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        RemoteGenerator(RemoteConfig(base_url=address, model="m", mode="chat"), TOKENIZER)
    assert "hidden" not in str(refused.value)


def test_a_slash_at_the_end_of_an_address_does_not_matter():
    with serving(lambda request, before: GOOD) as endpoint:
        endpoint.base_url += "/"
        ask(endpoint)
    assert endpoint.requests[0].path == "/v1/completions"
