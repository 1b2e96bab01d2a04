"""Our driver of JetStream's interface: on our engine, on one that is computed by hand, and on a
foreign one.
"""

import asyncio
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.generator import Capabilities, PolicyGenerator, check_temperatures
from mujica_jax.inference.queueing import RequestLimits
from mujica_jax.inference.requests import (
    DeadlineError,
    EngineError,
    PolicyError,
    RequestError,
    SamplingParams,
)
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.runs.parts import open_generator
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.random_traffic import PIECES, actions, at_rest, engines, play, policy
from tests.helpers.tiny_engine import (
    MODEL,
    NO_STOP,
    POSITIONS,
    decoder,
    make_engine,
    next_token_logits,
    random_tokens,
)
from tests.helpers.tiny_models import filled_decoder
from tests.helpers.traffic import (
    cached,
    complete_all,
    letter,
    make_generator,
    nodes_of,
    params,
    run,
    settle,
    streamed,
)

GREEDY = Capabilities(sampling_per_request=False, log_probabilities=False)
ENGINE = EngineConfig(
    kind="jetstream",
    max_num_seqs=3,
    decode_steps_per_call=4,
    prefill_tokens=128,
    page_tokens=8,
    prefix_reuse=True,
)


def adapter(engine: Any, **settings: Any) -> Any:
    """Return our engine behind JetStream's interface.

    The import is late because it brings TensorFlow.
    """
    module = importlib.import_module("mujica_jax.inference.jetstream.engine")
    return module.JetStreamEngine(engine, **settings)


def driver(
    jetstream_engine: Any,
    *,
    slots: int,
    positions: int,
    vocabulary: int,
    name: str = "the engine",
    token_bytes: Callable[[int], bytes] = letter,
    **settings: Any,
) -> Any:
    module = importlib.import_module("mujica_jax.inference.jetstream.generator")
    limits = RequestLimits(slots=slots, positions=positions, vocabulary=vocabulary)
    return module.JetStreamGenerator(
        jetstream_engine, limits, name=name, token_bytes=token_bytes, **settings
    )


def countable(engine: CountableEngine, *, reuse: bool = True, **settings: Any) -> Any:
    """Return a driver of the engine whose completions are computed by hand.

    Its tokens are letters: 0 is "a", 1 is "b".
    """
    generator = driver(
        adapter(engine, prefix_reuse=reuse),
        slots=engine.slots,
        positions=engine.positions,
        vocabulary=engine.config.vocab_size,
        stop_token_ids=engine.stop_token_ids,
        **settings,
    )
    generator.set_weights(policy(0), 0)
    return generator


def by_hand(
    engine: CountableEngine, prompt: list[int], wanted: SamplingParams
) -> tuple[list[int], str]:
    tokens, _ = engine.by_hand(prompt, wanted)
    return tokens, "stop" if tokens[-1] in engine.stop_token_ids else "length"


def outcome(completion: Any) -> tuple[list[int], str]:
    assert completion.logprobs is None
    assert completion.sampling_logprobs is None
    return list(completion.token_ids), completion.finish_reason


def mixed_requests(
    count: int, vocabulary: int, *, longest: int, limit: int
) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of up to twice `longest` tokens, with limits and stop strings.

    Every second one shares its beginning with others.
    """
    draw = np.random.default_rng(0)
    shared = draw.integers(1, vocabulary, longest).tolist()
    requests = []
    for number in range(count):
        beginning = shared[: int(draw.integers(0, longest + 1))] if number % 2 else []
        prompt = (
            beginning + draw.integers(1, vocabulary, int(draw.integers(1, longest + 1))).tolist()
        )
        stops = ("ab", "c", "zzz") if number % 4 == 0 else ()
        new_tokens = int(draw.integers(1, limit + 1))
        requests.append(
            (prompt, params(new_tokens, temperature=0.0, seed=number, stop_strings=stops))
        )
    return requests


# --- the same tokens as the native generator's ---


@functools.cache
def tiny_pair() -> tuple[Any, Any]:
    """Return the native generator and the driver, on engines of the same decoder.

    The second engine is short of pages.
    """
    native = make_generator(make_engine(slots=8))
    generator = driver(
        adapter(make_engine(slots=8, pages=60)),
        slots=8,
        positions=POSITIONS,
        vocabulary=MODEL.vocab_size,
        stop_token_ids=frozenset({NO_STOP}),
    )
    generator.set_weights(nnx.state(decoder()), 0)
    return native, generator


def test_greedy_outputs_equal_those_of_native_token_by_token():
    native, generator = tiny_pair()
    requests = mixed_requests(60, MODEL.vocab_size, longest=50, limit=9)
    expected = [
        (list(completion.token_ids), completion.finish_reason)
        for completion in complete_all(native, requests)
    ]
    outcomes = [outcome(completion) for completion in complete_all(generator, requests)]
    assert outcomes == expected
    assert {reason for _, reason in expected} == {"length", "stop_string"}
    assert generator.statistics.cache_hit_rate > 0.1, "prompts share what they begin with"
    assert generator.statistics.evicted_pages > 0, "memory was short"


def test_hundreds_of_requests_with_stop_strings_and_shared_beginnings_end_as_by_native():
    engines = [CountableEngine(slots=8, vocabulary=60, positions=96, pages=60) for _ in range(2)]
    requests = mixed_requests(400, 60, longest=35, limit=20)
    native = complete_all(make_generator(engines[0]), requests)
    generator = countable(engines[1])
    tokens = [outcome(completion) for completion in complete_all(generator, requests)]
    assert tokens == [
        (list(completion.token_ids), completion.finish_reason) for completion in native
    ]
    assert {reason for _, reason in tokens} == {"stop", "length", "stop_string"}
    assert generator.statistics.evicted_pages > 0, "memory was short"


def test_each_request_is_sampled_with_its_own_seed_temperature_and_filters_as_by_native():
    native, generator = tiny_pair()
    filters = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}]
    requests = [
        (
            random_tokens(5 + number, seed=number),
            params(20, temperature=0.5 * (number % 3), seed=number, **filters[number % 4]),
        )
        for number in range(24)
    ]
    expected = complete_all(native, requests)
    completions = complete_all(generator, requests)
    for completion, expected_completion in zip(completions, expected, strict=True):
        assert list(completion.token_ids) == list(expected_completion.token_ids)


@given(
    actions=actions,
    engine=engines,
    reuse=st.sampled_from([True, True, False]),
)
@settings(max_examples=100, deadline=None)
def test_whatever_comes_everyone_gets_their_own_result_and_nothing_is_left_behind(
    actions, engine, reuse
):
    generator = countable(engine, reuse=reuse, token_bytes=PIECES.__getitem__)
    play(actions, engine, generator)
    statistics = generator.statistics
    pages = generator._engine._pages
    assert (statistics.running, statistics.waiting) == (0, 0)
    assert pages.free + len(cached(pages)) == pages.count
    assert all(node.users == 0 for node in nodes_of(pages))


@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize("pages", [16, 48])
def test_completions_are_those_computed_by_hand_with_memory_short_or_not(decode_steps, pages):
    engine = CountableEngine(decode_steps=decode_steps, pages=pages)
    generator = countable(engine)
    requests = [
        ([n % 3 + 1] * (5 + 3 * n) + [4], params(9, temperature=float(n % 2), seed=n))
        for n in range(12)
    ]
    for completion, request in zip(complete_all(generator, requests), requests, strict=True):
        assert outcome(completion) == by_hand(engine, *request)
    statistics = generator.statistics
    assert statistics.requests == 12
    assert statistics.running == 0
    assert statistics.waiting == 0
    assert statistics.refused == 0
    assert statistics.prompt_tokens == sum(len(prompt) for prompt, _ in requests)
    assert statistics.generated_tokens == sum(
        len(by_hand(engine, *request)[0]) for request in requests
    )


def test_it_is_a_policy_generator():
    generator = countable(CountableEngine())
    assert isinstance(generator, PolicyGenerator)
    assert (generator.slots, generator.stop_token_ids) == (3, frozenset({0}))
    assert generator.capabilities == Capabilities(
        sampling_per_request=True, log_probabilities=False
    )


# --- where a request ends ---


def long_completion(engine: CountableEngine, length: int = 20) -> tuple[list[int], list[int]]:
    """Return a prompt and the tokens that answer it."""
    for first in range(1, 20):
        tokens, _ = engine.by_hand([first], params(length, temperature=0.0))
        if len(tokens) == length:
            return [first], tokens
    raise AssertionError("every prompt is answered with a stop token")


@pytest.mark.parametrize("first", [0, 3, 17])
@pytest.mark.parametrize("decode_steps", [1, 5])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(first, decode_steps):
    engine = CountableEngine(decode_steps=decode_steps)
    prompt, tokens = long_completion(engine)
    letters = b"".join(map(letter, tokens)).decode()
    stop = letters[first : first + 3]
    end = letters.index(stop) + 3
    generator = countable(engine)
    wanted = params(20, temperature=0.0, stop_strings=("zzz", stop))
    (completion,) = complete_all(generator, [(prompt, wanted)])
    assert outcome(completion) == (tokens[:end], "stop_string")
    assert completion.stop_string == stop
    assert generator.statistics.generated_tokens == end, (
        "what lies beyond it was generated for nobody"
    )

    assert run(streamed(generator, prompt, wanted)) == tokens[:end]


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_stop_tokens_and_limits_end_a_request(decode_steps):
    engine = CountableEngine(decode_steps=decode_steps)
    prompt, tokens = long_completion(engine)
    place = next(n for n in range(2, 20) if tokens[n] not in tokens[:n])
    generator = countable(engine)
    for wanted, reason in (
        (params(20, temperature=0.0, stop_token_ids=(tokens[place],)), "stop"),
        (params(place + 1, temperature=0.0), "length"),
    ):
        (completion,) = complete_all(generator, [(prompt, wanted)])
        assert outcome(completion) == (tokens[: place + 1], reason)


# --- requests that are given up, refused or fail ---


async def test_cancelled_and_expired_requests_free_their_slots_and_others_go_on():
    engine = CountableEngine(slots=1, decode_steps=1)
    engine.stop_token_ids = frozenset()
    generator = countable(engine)
    cancelled = asyncio.create_task(generator.generate([3], params(60)))
    expired = asyncio.create_task(generator.generate([4], params(60, deadline_seconds=1e-6)))
    waits = asyncio.create_task(generator.generate([5, 6], params(4)))
    while not engine.decode_calls:
        await asyncio.sleep(0)
    cancelled.cancel()
    assert isinstance(await settle(expired), DeadlineError)
    assert isinstance(await settle(cancelled), asyncio.CancelledError)
    assert outcome(await waits) == by_hand(engine, [5, 6], params(4))
    await at_rest(generator)
    assert generator.statistics.running == 0
    assert not engine.tables


async def test_a_request_that_runs_has_a_deadline():
    engine = CountableEngine(slots=1, decode_steps=1)
    engine.stop_token_ids = frozenset()
    generator = countable(engine)
    task = asyncio.create_task(generator.generate([3], params(60, deadline_seconds=1000.0)))
    while not engine.decode_calls:
        await asyncio.sleep(0)
    generator._expire(generator._running[0])
    error = await settle(task)
    assert isinstance(error, DeadlineError)
    assert "of up to 60 tokens" in str(error)
    await at_rest(generator)
    assert not engine.tables


async def test_those_that_go_on_with_a_conversation_overtake_the_others():
    engine = CountableEngine(slots=1, decode_steps=1)
    generator = countable(engine)
    ended: list[str] = []

    async def ask(name: str, continues: bool) -> None:
        await generator.generate([3, 4], params(3), continues=continues)
        ended.append(name)

    await asyncio.gather(ask("first", False), ask("second", False), ask("goes on", True))
    assert ended == ["goes on", "first", "second"]


@pytest.mark.parametrize(
    ("prompt", "wanted", "sentence"),
    [
        ([], params(3), "the prompt is empty"),
        ([20], params(3), "are outside the vocabulary of 20"),
        (
            [3] * 60,
            params(5),
            "60 prompt tokens and 5 new ones do not fit the engine's 64 positions",
        ),
        ([3], params(0), "max_new_tokens is 0"),
        ([3], params(3, top_p=0.0), "top_p is 0.0"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(prompt, wanted, sentence):
    generator = countable(CountableEngine())
    with pytest.raises(RequestError, match=sentence):
        await generator.generate(prompt, wanted)
    assert generator.statistics.refused == 1


async def test_a_request_larger_than_all_memory_fails_alone():
    engine = CountableEngine(pages=8)  # 32 tokens
    generator = countable(engine)
    large = ([3] * 30, params(3))
    fits = ([3] * 29, params(3))
    refused, completion = await asyncio.gather(
        *(generator.generate(*request) for request in (large, fits)), return_exceptions=True
    )
    assert isinstance(refused, EngineError)
    assert "need 9 pages of KV cache" in str(refused)
    assert outcome(completion) == by_hand(engine, *fits)


@pytest.mark.parametrize("method", ["prefill", "insert"])
async def test_an_error_of_one_request_is_its_own(method):
    engine = CountableEngine()
    generator = countable(engine)
    works = getattr(generator._engine, method)
    calls: list[int] = []

    def fails_once(*positional: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bad\nrow")
        return works(*positional, **named)

    setattr(generator._engine, method, fails_once)
    requests = [([3 + n], params(6, seed=n)) for n in range(5)]
    outcomes = await asyncio.gather(
        *(generator.generate(*request) for request in requests), return_exceptions=True
    )
    assert isinstance(outcomes[1], EngineError)
    assert str(outcomes[1]) == "the engine failed at this request (RuntimeError: a bad row)"
    for number in (0, 2, 3, 4):
        assert outcome(outcomes[number]) == by_hand(engine, *requests[number])


async def test_a_fault_of_the_engine_fails_those_that_run_and_the_others_go_on():
    engine = CountableEngine(slots=2, decode_steps=1)
    engine.stop_token_ids = frozenset()
    engine.fails_at_call = 2
    generator = countable(engine)
    requests = [([3 + n], params(6, seed=n)) for n in range(5)]
    outcomes = await asyncio.gather(
        *(generator.generate(*request) for request in requests), return_exceptions=True
    )
    for failed in outcomes[:2]:
        assert (
            str(failed)
            == "the engine failed while this request ran (RuntimeError: the device is gone)"
        )
        assert isinstance(failed, EngineError)
    for number in (2, 3, 4):
        assert outcome(outcomes[number]) == by_hand(engine, *requests[number])
    assert generator.statistics.refused == 2


@pytest.mark.parametrize("decode_steps", [1, 4])
async def test_a_policy_whose_numbers_are_not_finite_fails_the_request_alone(decode_steps):
    engine = CountableEngine(decode_steps=decode_steps)
    engine.broken_seed = 7
    generator = countable(engine)
    broken, fine = await asyncio.gather(
        generator.generate([3, 4], params(6, seed=7)),
        generator.generate([3, 4], params(6)),
        return_exceptions=True,
    )
    assert isinstance(broken, PolicyError)
    assert (
        "after 0 tokens without a stop token: the policy gave a number that is not finite"
        in str(broken)
    )
    assert outcome(fine) == by_hand(engine, [3, 4], params(6))


def test_a_generator_goes_on_in_another_event_loop():
    engine = CountableEngine(slots=1, decode_steps=1)
    engine.stop_token_ids = frozenset()
    generator = countable(engine)

    async def left_behind() -> None:
        task = asyncio.create_task(generator.generate([3], params(60)))
        while not engine.decode_calls:
            await asyncio.sleep(0)
        assert not task.done()

    run(left_behind())
    (completion,) = complete_all(generator, [([5, 6], params(4))])
    assert outcome(completion) == by_hand(engine, [5, 6], params(4))


# --- policies ---


def test_new_weights_replace_the_policy_and_released_ones_are_gone():
    engine = CountableEngine()
    generator = countable(engine)
    prompt = [3, 4, 5, 6, 7, 8]
    wanted = params(6)
    before = outcome(complete_all(generator, [(prompt, wanted)])[0])
    generator.release_weights()
    generator.set_weights(policy(5), 9)
    (completion,) = complete_all(generator, [(prompt, wanted)])
    assert engine.policy == 5
    assert outcome(completion) == by_hand(engine, prompt, wanted) != before
    assert completion.policy_version == generator.policy_version == 9
    assert generator.statistics.prefilled_tokens == 2 * 5, "nothing of the old policy is in memory"


def test_an_emptied_cache_makes_results_depend_on_their_own_requests_alone():
    engine = CountableEngine()
    generator = countable(engine)
    prompt = [*range(1, 14)]
    for _ in range(2):
        complete_all(generator, [(prompt, params(2))])
    assert generator.statistics.prefilled_tokens == 12, "found in memory the second time"
    generator.reset_cache()
    complete_all(generator, [(prompt, params(2))])
    assert generator.statistics.prefilled_tokens == 24


# --- engines of others ---


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(["plain"]), 300)


@functools.cache
def small_decoder(seed: int = 0) -> Any:
    """Return a decoder with the vocabulary of the tokenizer. Another seed gives other weights."""
    decoder = filled_decoder(dataclasses.replace(MODEL, vocab_size=300))
    if seed:
        weights = nnx.state(decoder, nnx.Param)
        nnx.update(decoder, nnx.map_state(lambda _, leaf: leaf.replace(-leaf.get_value()), weights))
    return decoder


def opened(
    factory: str | None, decoder: Any = None, *, positions: int = 64, **settings: Any
) -> Any:
    engine = dataclasses.replace(ENGINE, factory=factory, **settings)
    return open_generator(
        small_decoder() if decoder is None else decoder,
        engine,
        tokenizer(),
        positions=positions,
    )


def greedy(decoder: Any, prompt: list[int], limit: int) -> list[int]:
    """Return the greedy continuation by the decoder's full forward pass, up to a stop token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and tokens[-1] not in tokenizer().stop_token_ids:
        tokens.append(int(next_token_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_foreign_engine_gives_the_tokens_of_ours_and_of_the_forward_pass():
    requests = mixed_requests(12, 256, longest=25, limit=10)
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    assert foreign.capabilities == GREEDY
    tokens = [outcome(completion) for completion in complete_all(foreign, requests)]
    assert tokens == [outcome(completion) for completion in complete_all(opened(None), requests)]
    unstopped = [number for number, (_, wanted) in enumerate(requests) if not wanted.stop_strings][
        :2
    ]
    for number in unstopped:
        prompt, wanted = requests[number]
        assert tokens[number][0] == greedy(small_decoder(), prompt, wanted.max_new_tokens)
    engine = foreign._engine
    assert set(engine.prefill_lengths) <= {16, 32, 64}, "prompts are padded to powers of two"
    assert len(engine.freed) == len(requests), "each slot is given back"
    statistics = foreign.statistics
    prompt_tokens = sum(len(prompt) for prompt, _ in requests)
    assert statistics.prompt_tokens == prompt_tokens
    assert statistics.prefilled_tokens == prompt_tokens
    assert statistics.free_pages is None, "the interface does not say"
    assert statistics.compiled_programs is None, "the interface does not say"


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        ([[300, 1, 1]] * 3, EngineError, "generated token 300, but the model has only 300 tokens"),
        ([[-1, 1, 1]] * 3, EngineError, "generated token -1, but"),
        ([[5, 0, 1]] * 3, PolicyError, "ended this request after 1 tokens without a stop token"),
        (None, EngineError, "failed while this request ran"),
        ([5, 1, 1], EngineError, "failed while this request ran"),
    ],
)
async def test_wrong_results_of_a_foreign_engine_fail_the_request_and_not_the_generator(
    data, error, sentence
):
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    wanted = params(3, temperature=0.0)
    works = foreign._engine.generate
    result_type = importlib.import_module("jetstream.engine.engine_api").ResultTokens

    def generate(_: Any, state: Any) -> Any:
        columns = importlib.import_module("tests.helpers.foreign_engine").COLUMNS
        return state, None if data is None else result_type(data=np.asarray(data), **columns)

    foreign._engine.generate = generate
    with pytest.raises(error, match=sentence):
        await foreign.generate([5, 6, 7], wanted)
    foreign._engine.generate = works
    assert outcome(await foreign.generate([5, 6, 7], wanted))[0] == greedy(
        small_decoder(), [5, 6, 7], 3
    )


def test_a_prompt_is_padded_to_the_engines_longest_where_that_is_no_power_of_two():
    foreign = opened("tests.helpers.foreign_engine:make_engine", positions=50)
    prompts = [[5] * length for length in (1, 16, 17, 33, 49)]
    completions = complete_all(
        foreign, [(prompt, params(1, temperature=0.0)) for prompt in prompts]
    )
    assert foreign._engine.prefill_lengths == [16, 16, 32, 50, 50]
    expected = [greedy(small_decoder(), prompt, 1) for prompt in prompts]
    assert [list(completion.token_ids) for completion in completions] == expected


def test_a_request_for_one_token_needs_no_step_of_a_foreign_engine():
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    foreign._engine.generate = None  # would fail
    (completion,) = complete_all(foreign, [([5, 6, 7], params(1, temperature=0.0))])
    assert outcome(completion) == (greedy(small_decoder(), [5, 6, 7], 1), "length")


def test_a_foreign_engine_that_samples_each_request_gives_the_tokens_of_ours():
    requests = [
        (random_tokens(4 + n, seed=n), params(6, temperature=n / 4, seed=n)) for n in range(6)
    ]
    foreign = opened("tests.helpers.foreign_engine:make_sampling_engine")
    own = opened(None)
    tokens = [outcome(completion) for completion in complete_all(foreign, requests)]
    assert tokens == [outcome(completion) for completion in complete_all(own, requests)]


def test_new_policies_reach_a_foreign_engine_by_load_params():
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    prompt = [5, 6, 7, 8]
    wanted = params(8, temperature=0.0)
    assert outcome(complete_all(foreign, [(prompt, wanted)])[0])[0] == greedy(
        small_decoder(), prompt, 8
    )
    foreign.set_weights(nnx.state(small_decoder(1), nnx.Param), 3)
    assert foreign._engine.loaded == 2
    (completion,) = complete_all(foreign, [(prompt, wanted)])
    assert (
        list(completion.token_ids)
        == greedy(small_decoder(1), prompt, 8)
        != greedy(small_decoder(), prompt, 8)
    )
    assert completion.policy_version == 3


def test_without_arrays_the_policy_comes_later():
    factory = importlib.import_module("mujica_jax.inference.jetstream.factory")
    for name in (None, "tests.helpers.foreign_engine:make_engine"):
        generator = opened(name, factory.without_arrays(small_decoder()))
        generator.set_weights(nnx.state(small_decoder(), nnx.Param), 2)
        (completion,) = complete_all(generator, [([5, 6], params(4, temperature=0.0))])
        assert list(completion.token_ids) == greedy(small_decoder(), [5, 6], 4)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (
            {"temperature": 0.7},
            "samples all requests at temperature 0.0, but this request has temperature 0.7",
        ),
        ({"temperature": 1.0, "top_k": 4}, "but this request has temperature 1.0"),
    ],
)
async def test_sampling_that_an_engine_cannot_do_is_refused_by_name(wanted, sentence):
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    with pytest.raises(RequestError, match=sentence) as refused:
        await foreign.generate([5, 6], params(4, **wanted))
    assert str(refused.value).startswith("engine.factory tests.helpers.foreign_engine:make_engine ")
    assert await foreign.generate([5, 6], params(4, temperature=0.0, top_k=4)), (
        "filters change nothing of greedy"
    )


@pytest.mark.parametrize(("name", "value"), [("top_k", 4), ("top_p", 0.5), ("min_p", 0.1)])
async def test_filters_that_an_engine_cannot_do_are_refused_by_name(name, value):
    foreign = opened("tests.helpers.foreign_engine:make_engine")
    foreign._engine.capabilities = dataclasses.replace(GREEDY, temperature=0.7)
    with pytest.raises(RequestError, match=f"this request has {name} {value}"):
        await foreign.generate([5, 6], params(4, temperature=0.7, **{name: value}))


def test_temperatures_of_a_configuration_are_checked_at_the_start():
    check_temperatures(GREEDY, {"eval.temperature": 0.0}, "engine.factory a:b")
    check_temperatures(
        Capabilities(sampling_per_request=True, log_probabilities=False),
        {"temperature": 0.3},
        "own",
    )
    with pytest.raises(
        UserError,
        match=r"engine.factory a:b samples .* temperature 0.0, but temperature is 1.0: use 0.0",
    ):
        check_temperatures(GREEDY, {"temperature": 1.0}, "engine.factory a:b")


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("nowhere:make", "engine.factory is 'nowhere:make', but there is no module nowhere"),
        (
            "tests.helpers.foreign_engine",
            "engine.factory is 'tests.helpers.foreign_engine': name it as module:name",
        ),
        ("tests.helpers.foreign_engine:", "name it as module:name"),
        (":make_engine", "name it as module:name"),
        (
            "tests.helpers.foreign_engine:make_motor",
            "the module tests.helpers.foreign_engine has no make_motor; did you mean make_",
        ),
        ("tests.helpers.foreign_engine:not_a_function", "but this is a int: name a function"),
        (
            "tests.helpers.foreign_engine:fail",
            r"failed \(RuntimeError: no such chip\): it is called with one EngineRequest",
        ),
        (
            "tests.helpers.foreign_engine:make_nothing",
            "returned a str: it must return a jetstream.engine.engine_api.Engine",
        ),
        (
            "tests.helpers.foreign_engine:make_small_engine",
            "with 2 slots, but engine.max_num_seqs is 3: lower engine.max_num_seqs to 2",
        ),
        (
            "tests.helpers.foreign_engine:make_short_engine",
            "at most 32 tokens, but conversations may have 64",
        ),
        (
            "tests.helpers.foreign_engine:make_short_cache",
            "holds 63 tokens per slot, but conversations may have 64",
        ),
        (
            "tests.helpers.foreign_engine:make_log_probabilities",
            "declares log_probabilities, but JetStream's interface passes none",
        ),
        (
            "tests.helpers.foreign_engine:make_alike",
            "declares sampling_per_request, but its insert has no parameter sampling",
        ),
        ("tests.helpers.foreign_engine:make_without_record", "attribute capabilities is a dict"),
        (
            "tests.helpers.foreign_engine:make_without_memory",
            r"cannot start with 3 slots of 64 tokens \(MemoryError: no room\)",
        ),
        (
            "tests.helpers.foreign_engine:make_silent_engine",
            r"does not say how large it is \(NotImplementedError\)",
        ),
        ("tests.helpers.foreign_engine:make_two_samples", "with 2 samples per slot"),
        ("tests.helpers.foreign_engine:make_deaf_engine", r"define load_params\(self, weights\)"),
        (
            "tests.helpers.foreign_engine:make_engine_of_another_model",
            r"cannot load the weights .*has shape .*EngineRequest.model",
        ),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_in_one_sentence(factory, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        opened(factory)
    assert factory in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "import a_missing_package",
            "cannot be imported: ModuleNotFoundError: No module named 'a_missing_package'",
        ),
        ("def make(", "cannot be imported: SyntaxError: "),
        (
            "def make(): pass",
            "failed (TypeError: make() takes 0 positional arguments but 1 was given)",
        ),
    ],
)
def test_a_module_that_does_not_load_is_named_in_one_sentence(
    tmp_path, monkeypatch, source, sentence
):
    name = f"engine_module_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as refused:
        opened(f"{name}:make")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_an_engine_that_samples_each_request_must_not_draw_the_first_token_in_prefill(
    monkeypatch,
):
    foreign = opened("tests.helpers.foreign_engine:make_sampling_engine")
    plain = importlib.import_module("tests.helpers.foreign_engine").ForeignEngine
    monkeypatch.setattr(type(foreign._engine), "prefill", plain.prefill)
    with pytest.raises(EngineError, match="let prefill return the prefix alone"):
        await foreign.generate([5, 6], params(3, temperature=0.5))


def test_quantized_weights_are_not_for_a_foreign_engine():
    with pytest.raises(
        UserError,
        match=r"engine.weights is int8, but engine.factory tests.helpers.foreign_engine:make_engine",
    ):
        opened("tests.helpers.foreign_engine:make_engine", weights="int8")
