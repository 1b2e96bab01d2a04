"""The gRPC server over a real socket: streams, refusals, deadlines, clients that leave, and
overload.
"""

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from mujica_jax.errors import UserError
from mujica_jax.inference.background import BackgroundGenerator
from mujica_jax.inference.counters import LiveCounters, serve_metrics
from mujica_jax.inference.engine.base import SlotState
from mujica_jax.inference.jetstream.server import Server
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.models.tokenizer import Tokenizer
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_engine import make_engine, random_tokens
from tests.helpers.traffic import assert_nothing_is_held

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, seed=0)


class SlowEngine(CountableEngine):
    """An engine whose decode calls take some time, as on a device."""

    seconds = 0.01
    max_running = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def decode(self, state: SlotState) -> Any:
        self.may_go_on.wait(HANG_SECONDS)
        time.sleep(self.seconds)
        self.max_running = max(self.max_running, int(np.count_nonzero(state.remaining)))
        return super().decode(state)


def busy_for_long() -> SlowEngine:
    """Return an engine with one slot in which no request ends before its 900 tokens.

    They take minutes, unless the test makes `seconds` smaller.
    """
    engine = SlowEngine(slots=1, positions=1024)
    engine.seconds = 0.2
    engine.stop_token_ids = frozenset()
    return engine


@contextlib.contextmanager
def serving(
    generator: BatchedGenerator,
    sampling: SamplingParams = GREEDY,
    *,
    queue_size: int = 8,
    **options: Any,
) -> Iterator[tuple[Server, Any]]:
    """Serve and yield the server and a client's stub."""
    background = BackgroundGenerator.of(generator, queue_size=queue_size)
    background.start()
    server = Server(background, sampling, **options)
    port = server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, jetstream_pb2_grpc.OrchestratorStub(channel)
    finally:
        server.stop(grace_seconds=0.1)
        background.stop()


def generator_of(engine: CountableEngine) -> BatchedGenerator:
    return BatchedGenerator(engine, prefix_reuse=True)


def background_of(engine: CountableEngine) -> BackgroundGenerator:
    background = BackgroundGenerator.of(generator_of(engine), queue_size=8)
    background.start()
    return background


def tokens_request(prompt: Sequence[int], max_tokens: int = 0) -> Any:
    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt)
    return jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)


def streamed(stub: Any, request: Any, **options: Any) -> tuple[list[int], str, int]:
    """Return the token ids, the text and the messages of an answer."""
    options.setdefault("timeout", HANG_SECONDS)
    samples = [response.stream_content.samples[0] for response in stub.Decode(request, **options)]
    token_ids = [id for sample in samples for id in sample.token_ids]
    text = "".join(sample.text for sample in samples)
    return token_ids, text, len(samples)


def refusal(stub: Any, request: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        streamed(stub, request, **options)
    return refused.value.code(), refused.value.details()


def by_hand(engine: CountableEngine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the answer without the stop token, which is not part of it."""
    greedy = SamplingParams(max_new_tokens=max_tokens, temperature=0.0, seed=0)
    tokens, _ = engine.by_hand(prompt, greedy)
    return [token for token in tokens if token not in engine.stop_token_ids]


def endless(engine: CountableEngine, tokens: int) -> list[int]:
    """Return a prompt that is answered with this number of tokens."""
    for token in range(20):
        if len(by_hand(engine, [token, 3], tokens)) == tokens:
            return [token, 3]
    raise AssertionError("every prompt is answered with a stop token")


def eventually(condition: Any) -> bool:
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.005)
    return False


async def test_an_answer_streams_in_parts_and_is_what_the_generator_gives():
    prompt = random_tokens(30, seed=3)
    alone = BatchedGenerator(make_engine(), prefix_reuse=True)
    expected = list((await alone.generate(prompt, GREEDY)).token_ids)
    with serving(BatchedGenerator(make_engine(), prefix_reuse=True)) as (_, stub):
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=HANG_SECONDS).is_live
        tokens, text, messages = streamed(stub, tokens_request(prompt, 24))
        assert tokens == expected
        assert text == ""
        assert messages == 6
        assert streamed(stub, tokens_request(prompt))[0] == expected, (
            "max_tokens left out: as many as the server allows"
        )
        assert streamed(stub, tokens_request(prompt, 3))[0] == expected[:3]


def test_an_answer_ends_before_its_stop_token():
    engine = CountableEngine()
    prompt = next([token] for token in range(20) if 0 in engine.by_hand([token], GREEDY)[0][1:])
    with serving(generator_of(engine)) as (_, stub):
        assert streamed(stub, tokens_request(prompt, 24))[0] == by_hand(engine, prompt, 24)


def test_text_is_whole_wherever_token_borders_fall():
    """A token is one byte, so characters of two, three and four bytes arrive in parts."""
    tokenizer = Tokenizer.train(iter(["plain"]), 300)
    told = tokenizer.encode_trusted("aé€𝄞.")
    assert len(told) == 1 + 2 + 3 + 4 + 1

    class Telling(CountableEngine):
        def decode(self, state: SlotState) -> Any:
            state, decoded = super().decode(state)
            for step, slot in zip(*np.nonzero(decoded.valid), strict=True):
                place = int(state.position[slot]) - int(decoded.valid[:, slot].sum()) + int(step)
                decoded.tokens[step, slot] = told[place]
            return state, decoded

    engine = Telling(vocabulary=tokenizer.vocab_size, decode_steps=1)
    engine.stop_token_ids = frozenset({tokenizer.vocab_size})
    request = jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text="x"), max_tokens=11
    )
    with serving(generator_of(engine), tokenizer=tokenizer) as (_, stub):
        tokens, text, messages = streamed(stub, request)
        assert tokens == told
        assert text == "aé€𝄞."
        assert messages == 11
        request.max_tokens = 2
        assert streamed(stub, request)[1] == "a\ufffd", "a character that is cut shows as such"


def test_bad_requests_are_refused_and_the_server_goes_on():
    engine = CountableEngine()
    text = jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text="hello")
    )
    named = tokens_request([3])
    named.session_cache = "chat-7"
    refused = {
        "the prompt is empty": tokens_request([]),
        "prompt is empty: send at least": jetstream_pb2.DecodeRequest(),
        "are outside the vocabulary of 20": tokens_request([3, 20]),
        "max_new_tokens is -1": tokens_request([3], -1),
        "do not fit the engine's 64 positions": tokens_request([3] * 60, 5),
        "this server has no tokenizer: send token_content": text,
        "session_cache is 'chat-7'": named,
    }
    with serving(generator_of(engine)) as (server, stub):
        for sentence, request in refused.items():
            status, details = refusal(stub, request)
            assert status == grpc.StatusCode.INVALID_ARGUMENT
            assert sentence in details
        assert streamed(stub, tokens_request([3, 4], 9))[0] == by_hand(engine, [3, 4], 9)
        assert server.statistics.refused == len(refused)


def test_a_fault_of_the_engine_is_an_internal_error_and_the_server_goes_on():
    engine = CountableEngine()
    engine.fails_at_call = 2
    prompt = endless(engine, 20)
    with serving(generator_of(engine)) as (_, stub):
        status, details = refusal(stub, tokens_request(prompt, 20))
        assert status == grpc.StatusCode.INTERNAL
        assert "RuntimeError" in details
        assert streamed(stub, tokens_request(prompt, 20))[0] == by_hand(engine, prompt, 20)


def test_a_policy_that_is_not_finite_is_not_the_clients_fault():
    engine = CountableEngine()
    engine.broken_seed = 0
    with serving(generator_of(engine)) as (_, stub):
        status, details = refusal(stub, tokens_request([3], 9))
    assert status == grpc.StatusCode.INTERNAL
    assert "not finite" in details


@pytest.mark.parametrize("whose", ["client", "server"])
def test_a_deadline_ends_a_request_and_frees_its_slot(whose):
    engine = busy_for_long()
    prompt = [4, 5, 6]
    generator = generator_of(engine)
    limit = SamplingParams(
        max_new_tokens=8,
        temperature=0.0,
        seed=0,
        deadline_seconds=0.2 if whose == "server" else None,
    )
    with serving(generator, limit) as (_, stub):
        patience = 0.2 if whose == "client" else HANG_SECONDS
        status, _ = refusal(stub, tokens_request(prompt, 900), timeout=patience)
        assert status == grpc.StatusCode.DEADLINE_EXCEEDED
        assert eventually(lambda: generator.statistics.running == 0)
    assert_nothing_is_held(generator)


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_a_client_that_goes_away_makes_room(waiting):
    engine = busy_for_long()
    prompt = [3]
    generator = generator_of(engine)
    with serving(generator, queue_size=1) as (_, stub):
        running = stub.Decode(tokens_request(prompt, 900))
        next(running)
        queued = stub.Decode(tokens_request([4, 5], 9))
        assert eventually(lambda: generator.statistics.waiting == 1)
        assert refusal(stub, tokens_request([6, 7], 9))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        (queued if waiting else running).cancel()
        assert eventually(lambda: generator.statistics.waiting == 0)
        if not waiting:
            engine.seconds = 0.0
            tokens = [id for part in queued for id in part.stream_content.samples[0].token_ids]
            assert tokens == by_hand(engine, [4, 5], 9)
        running.cancel()
        assert eventually(lambda: generator.statistics.running == 0)
        engine.seconds = 0.0
        assert streamed(stub, tokens_request([6, 7], 9))[0] == by_hand(engine, [6, 7], 9)
    assert_nothing_is_held(generator)


def test_four_times_the_load_there_is_room_for_is_answered_or_refused():
    engine = SlowEngine(slots=3, page_tokens=4)
    engine.may_go_on.clear()  # until one is refused
    generator = generator_of(engine)
    queue_size = 9
    capacity = engine.slots + queue_size
    callers = 4 * capacity
    prompts = [[*range(1, 10), caller % 20, caller // 20, 5] for caller in range(callers)]
    together = threading.Barrier(callers)
    largest_load = [0]
    done = threading.Event()

    def ask(caller: int) -> list[int] | grpc.StatusCode:
        together.wait()
        try:
            return streamed(stub, tokens_request(prompts[caller], 20))[0]
        except grpc.RpcError as error:
            engine.may_go_on.set()
            assert "try again later" in error.details()
            return error.code()

    def watch() -> None:
        while not done.wait(0.001):
            statistics = generator.statistics
            largest_load[0] = max(largest_load[0], statistics.running + statistics.waiting)

    with (
        serving(generator, queue_size=queue_size) as (server, stub),
        ThreadPoolExecutor(callers + 1) as pool,
    ):
        watching = pool.submit(watch)
        results = list(pool.map(ask, range(callers)))
        done.set()
        watching.result()
        refused = results.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        answered = [
            (prompt, result)
            for prompt, result in zip(prompts, results, strict=True)
            if isinstance(result, list)
        ]
        assert len(answered) + refused == callers
        assert len(answered) >= capacity
        assert refused > 0
        for prompt, tokens in answered:
            assert tokens == by_hand(engine, prompt, 20)
        assert largest_load[0] <= capacity
        assert server.statistics.refused == refused
        assert server._orchestrator._background.under_way == 0
        assert streamed(stub, tokens_request([3, 4], 9))[0] == by_hand(engine, [3, 4], 9), (
            "and it goes on"
        )
    assert_nothing_is_held(generator)


def test_a_server_that_stops_says_so_to_those_who_wait():
    engine = busy_for_long()
    with serving(generator_of(engine)) as (server, stub):
        running = stub.Decode(tokens_request([3], 900))
        next(running)
        server.stop(grace_seconds=0.05)
        with pytest.raises(grpc.RpcError) as lost:
            list(running)
        assert lost.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert refusal(stub, tokens_request([3], 2))[0] == grpc.StatusCode.UNAVAILABLE


def test_a_port_in_use_is_refused_in_one_sentence():
    server = Server(background_of(CountableEngine()), GREEDY)
    port = server.start()
    try:
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be opened"):
            Server(background_of(CountableEngine()), GREEDY, port=port).start()
    finally:
        server.stop(grace_seconds=0.0)


def test_the_server_is_read_by_prometheus():
    engine = CountableEngine()
    with serving(generator_of(engine)) as (server, stub):
        port, close = serve_metrics(LiveCounters(lambda: server.statistics), port=0)
        try:
            streamed(stub, tokens_request([3, 4], 5))
            refusal(stub, tokens_request([]))
            refusal(stub, jetstream_pb2.DecodeRequest(session_cache="x"))
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS
            ) as answer:
                lines = answer.read().decode().splitlines()
        finally:
            close()
    assert "mujica_requests_total 1.0" in lines
    assert "mujica_refused_total 2.0" in lines
    generated = len(
        engine.by_hand([3, 4], SamplingParams(max_new_tokens=5, temperature=0.0, seed=0))[0]
    )
    assert f"mujica_generated_tokens_total {generated}.0" in lines
    assert "mujica_running 0.0" in lines
