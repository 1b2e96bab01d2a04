"""Traffic that comes, goes and changes its mind, on an engine whose completions are computed by
hand and whose memory is short.
"""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.inference.requests import Completion, DeadlineError, RequestError
from mujica_jax.inference.scheduler import MAX_DEFERRED_CALLS, BatchedGenerator
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.random_traffic import PIECES, actions, at_rest, engines, play
from tests.helpers.traffic import (
    FAR,
    assert_by_hand,
    assert_nothing_is_held,
    complete_all,
    make_generator,
    params,
    run,
    settle,
    streamed,
)


@given(
    actions=actions,
    engine=engines,
    reuse=st.sampled_from([True, True, False]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_everyone_gets_their_own_result_and_nothing_is_left_behind(
    actions, engine, reuse
):
    generator = make_generator(engine, prefix_reuse=reuse, token_bytes=PIECES.__getitem__)
    play(actions, engine, generator)
    assert_nothing_is_held(generator)


# --- memory ---


async def test_a_request_that_needs_more_pages_than_there_are_is_refused_and_others_go_on():
    engine = CountableEngine(pages=8)  # 32 tokens; a slot could have 64
    generator = make_generator(engine)
    large = ([3] * 30, params(3))
    fits = ([3] * 29, params(3))
    refused, completion = await asyncio.gather(
        *(generator.generate(*request) for request in (large, fits)), return_exceptions=True
    )
    assert isinstance(refused, RequestError)
    assert "needs 9 pages of KV cache, but the engine has 8" in str(refused)
    assert_by_hand(engine, completion, [3] * 29, params(3))


def test_where_memory_is_short_requests_wait_for_each_other():
    engine = CountableEngine(slots=3, pages=16)
    generator = make_generator(engine)
    requests = [([7 + n] * 30, params(10, seed=n)) for n in range(5)]  # ten pages each

    async def main() -> list[Completion]:
        tasks = [asyncio.create_task(generator.generate(*request)) for request in requests]
        while not all(task.done() for task in tasks):
            assert len(generator._running) <= 1
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    for completion, request in zip(run(main()), requests, strict=True):
        assert_by_hand(engine, completion, *request)
    assert generator.statistics.evicted_pages > 0
    assert_nothing_is_held(generator)


def test_a_request_that_needs_all_memory_is_served_although_a_page_of_it_holds_its_beginning():
    engine = CountableEngine(slots=1, pages=2, positions=8)
    generator = make_generator(engine)
    complete_all(generator, [([5, 6, 7], params(1))])
    (completion,) = complete_all(generator, [([5, 6, 9], params(5))])
    assert_by_hand(engine, completion, [5, 6, 9], params(5))


def test_a_prompt_computed_twice_leaves_each_request_the_pages_that_its_slot_reads():
    """The second is still computed when the first ends and leaves its pages to all."""
    engine = CountableEngine(slots=2, pages=40, prefill_tokens=4, decode_steps=1)
    engine.stop_token_ids = frozenset()
    generator = make_generator(engine)
    prompt = [(7 * n) % 19 + 1 for n in range(13)]
    requests = [
        (prompt, params(3)),
        (prompt, params(30, seed=1)),
        *(([9 + n] * 30, params(5)) for n in range(4)),
    ]

    async def main() -> list[Completion]:
        tasks = [asyncio.create_task(generator.generate(*requests[0]))]
        while not engine.decode_calls:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(generator.generate(*request)) for request in requests[1:]]
        return await asyncio.gather(*tasks)

    for completion, request in zip(run(main()), requests, strict=True):
        assert list(completion.token_ids) == engine.by_hand(*request)[0]
    assert generator.statistics.prefilled_tokens == 2 * 12 + 4 * 29


@pytest.mark.parametrize("prefill_tokens", [3, 64])
def test_two_long_prompts_that_are_alike_and_come_together_are_computed_once(prefill_tokens):
    engine = CountableEngine(prefill_tokens=prefill_tokens)
    generator = make_generator(engine)
    prompt = [n % 19 + 1 for n in range(41)]  # ten pages and the token that is decoded
    for seed, completion in enumerate(
        complete_all(generator, [(prompt, params(5, seed=seed)) for seed in range(2)])
    ):
        assert_by_hand(engine, completion, prompt, params(5, seed=seed))
    assert generator.statistics.prefilled_tokens == 40


def test_what_48_requests_begin_with_is_computed_once():
    engine = CountableEngine(slots=16, vocabulary=100, positions=96, prefill_tokens=24)
    generator = make_generator(engine)
    system = [n % 13 + 1 for n in range(64)]
    requests = [([*system, 40 + n, 3, 4, 5], params(4, seed=n)) for n in range(48)]
    for completion, request in zip(complete_all(generator, requests), requests, strict=True):
        assert_by_hand(engine, completion, *request)
    assert generator.statistics.prefilled_tokens == 64 + 48 * 3, "the last token of each is decoded"


def test_prompts_in_chunks_and_at_once_and_memory_short_or_not_make_no_difference():
    requests = [([n % 3 + 1] * (5 + 3 * n) + [4], params(9, seed=n)) for n in range(12)]
    engines = [
        CountableEngine(slots=slots, pages=pages, prefill_tokens=tokens, decode_steps=steps)
        for slots, pages, tokens, steps in [(1, 16, 64, 1), (3, 17, 2, 5), (3, 64, 64, 3)]
    ]
    generators = [make_generator(engine) for engine in engines]
    first, second, third = [complete_all(generator, requests) for generator in generators]
    assert first == second
    assert second == third
    assert generators[1].statistics.evicted_pages > 0
    assert generators[2].statistics.evicted_pages == 0


# --- stop strings and stop tokens ---


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def long_completion(engine: CountableEngine, length: int = 20) -> tuple[list[int], list[int]]:
    """Return a prompt and the tokens that answer it."""
    for first in range(1, 20):
        tokens, _ = engine.by_hand([first], params(length))
        if len(tokens) == length:
            return [first], tokens
    raise AssertionError("every prompt is answered with a stop token")


@pytest.mark.parametrize("first", [0, 1, 3, 5, 17])
@pytest.mark.parametrize("decode_steps", [1, 5])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(first, decode_steps):
    engine = CountableEngine(decode_steps=decode_steps)
    generator = make_generator(engine)
    prompt, tokens = long_completion(engine)
    _, logprobs = engine.by_hand(prompt, params(20))
    stop = letters(tokens[first : first + 3])
    end = letters(tokens).index(stop) + 3
    (completion,) = complete_all(generator, [(prompt, params(20, stop_strings=("zzz", stop)))])
    assert (completion.finish_reason, completion.stop_string) == ("stop_string", stop)
    assert (list(completion.token_ids), list(completion.logprobs)) == (tokens[:end], logprobs[:end])
    assert list(completion.sampling_logprobs) == [2 * logprob for logprob in logprobs[:end]]
    assert generator.statistics.generated_tokens == end, (
        "what lies beyond it was generated for nobody"
    )
    assert_nothing_is_held(generator)


@pytest.mark.parametrize("decode_steps", [1, 5])
@pytest.mark.parametrize(
    ("spoken_pieces", "thought_open", "end"),
    [
        (["<thi", "nk>", "</answer>", "</th", "ink>", " a ", "</answer>", " b"], False, 7),
        (["</ans", "wer>", "</th", "ink>", " a ", "</ans", "wer>b", " b"], True, 7),
        (["</ans", "wer>", "</th", "ink>", " a ", "</ans", "wer>b", " b"], False, 2),
        (["<think>", "</answer>", "<stop>"], False, 20),
    ],
)
def test_stop_strings_sleep_in_thoughts(decode_steps, spoken_pieces, thought_open, end):
    engine = CountableEngine(decode_steps=decode_steps, vocabulary=5000)
    prompt, tokens = long_completion(engine)
    assert len(set(tokens)) == len(tokens), "each token says what it is given to say"
    pieces = dict(zip(tokens, (piece.encode() for piece in spoken_pieces), strict=False))
    generator = BatchedGenerator(
        engine, prefix_reuse=True, token_bytes=lambda token: pieces.get(token, b"")
    )
    wanted = params(20, stop_strings=("</answer>",), thought_open=thought_open)
    (completion,) = complete_all(generator, [(prompt, wanted)])
    assert list(completion.token_ids) == tokens[:end]
    assert completion.finish_reason == ("stop_string" if end < 20 else "length")


def test_a_stop_token_a_stop_string_and_a_length_limit_are_told_apart():
    engine = CountableEngine(decode_steps=4)
    prompt, tokens = long_completion(engine)
    place = next(n for n in range(2, 20) if tokens[n] not in tokens[:n])
    last = tokens[place]
    stop = letters(tokens[place : place + 1])
    for wanted, reason, stop_string in [
        (params(20, stop_token_ids=(last,)), "stop", None),
        (params(20, stop_strings=(stop,)), "stop_string", stop),
        (params(place + 1), "length", None),
        # A stop token counts first, and the length last.
        (params(20, stop_strings=(stop,), stop_token_ids=(last,)), "stop", None),
        (params(place + 1, stop_strings=(stop,)), "stop_string", stop),
    ]:
        (completion,) = complete_all(make_generator(engine), [(prompt, wanted)])
        assert list(completion.token_ids) == tokens[: place + 1]
        assert completion.finish_reason == reason
        assert completion.stop_string == stop_string


async def test_a_stream_ends_with_the_token_that_completes_a_stop_string():
    engine = CountableEngine(decode_steps=5)
    prompt, tokens = long_completion(engine)
    wanted = params(20, stop_strings=(letters(tokens[6:9]),))
    assert await streamed(make_generator(engine), prompt, wanted) == tokens[:9]


def test_stop_tokens_of_one_request_end_no_other():
    engine = CountableEngine()
    prompt, tokens = long_completion(engine)
    place = next(n for n in range(2, 20) if tokens[n] not in tokens[:n])
    stopped, whole = complete_all(
        make_generator(engine),
        [(prompt, params(20, stop_token_ids=(tokens[place], 10**6))), (prompt, params(20))],
    )
    assert (list(stopped.token_ids), stopped.finish_reason) == (tokens[: place + 1], "stop")
    assert (list(whole.token_ids), whole.finish_reason) == (tokens, "length")


@pytest.mark.parametrize(("decode_steps", "computed"), [(5, 2), (3, 3)])
def test_a_conversation_goes_on_from_a_turn_that_a_stop_string_ended(decode_steps, computed):
    """There are one prompt token, 9 generated ones and 3 new ones, the last of which is left to
    decoding. Of these 12 tokens the first 10 are in memory where the engine decoded beyond the
    ninth, and the first 9 where its call ended there.
    """
    engine = CountableEngine(decode_steps=decode_steps)
    generator = make_generator(engine)
    prompt, tokens = long_completion(engine)
    assert letters(tokens).index(letters(tokens[6:9])) == 6
    (completion,) = complete_all(
        generator, [(prompt, params(20, stop_strings=(letters(tokens[6:9]),)))]
    )
    assert list(completion.token_ids) == tokens[:9]
    before = generator.statistics.prefilled_tokens
    tokens_so_far = [*prompt, *completion.token_ids, 3, 3, 3]
    (after,) = complete_all(generator, [(tokens_so_far, params(6))])
    assert_by_hand(engine, after, tokens_so_far, params(6))
    assert generator.statistics.prefilled_tokens - before == computed
    assert_nothing_is_held(generator)


def test_stop_strings_are_refused_where_nobody_knows_the_text_of_tokens():
    generator = BatchedGenerator(CountableEngine(), prefix_reuse=True)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        complete_all(generator, [([3], params(stop_strings=("a",)))])


# --- parameters that arrays cannot hold ---

EXTREMES: dict[str, dict[str, Any]] = {
    "top_k beyond the vocabulary": {"top_k": 2**70},
    "a temperature beyond float32": {"temperature": 1e300},
    "a temperature below float32": {"temperature": 1e-300},
    "a top_p below float32": {"top_p": 1e-300},
    "a stop token beyond int32": {"stop_token_ids": (2**40,)},
    "a deadline that never comes": {"deadline_seconds": math.inf},
}
BAD = {
    "a stop string is empty": {"stop_strings": ("",)},
    "cannot be encoded as UTF-8": {"stop_strings": ("\ud800",)},
    "top_k is -1": {"top_k": -1},
    "top_p is 0": {"top_p": 0.0},
    "top_p is nan": {"top_p": math.nan},
    "min_p is 1.5": {"min_p": 1.5},
    "temperature is inf": {"temperature": math.inf},
    "stop_token_ids contain -3": {"stop_token_ids": (-3,)},
    "deadline_seconds is 0": {"deadline_seconds": 0.0},
    "deadline_seconds is nan": {"deadline_seconds": math.nan},
}


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_an_extreme_parameter_is_served_and_harms_nobody(extreme):
    engine = CountableEngine()
    requests = [
        ([5, 6], params(6)),
        ([5, 7], dataclasses.replace(params(6, seed=3), **extreme)),
    ]
    for completion, request in zip(
        complete_all(make_generator(engine), requests), requests, strict=True
    ):
        assert_by_hand(engine, completion, *request)


@pytest.mark.parametrize("sentence", BAD)
async def test_a_parameter_that_nobody_can_honour_fails_its_request_alone(sentence):
    engine = CountableEngine()
    generator = make_generator(engine)
    good = ([5, 6], params(6))
    requests = (good, ([5, 7], params(**BAD[sentence])), good)
    first, error, last = await asyncio.gather(
        *(generator.generate(*request) for request in requests), return_exceptions=True
    )
    assert isinstance(error, RequestError)
    assert sentence in str(error)
    assert_by_hand(engine, first, *good)
    assert_by_hand(engine, last, *good)


async def test_a_completion_that_is_not_finite_fails_its_request_alone():
    engine = CountableEngine()
    engine.broken_seed = 5
    generator = make_generator(engine)
    requests = [([n % 3 + 1] * 9, params(6, seed=n)) for n in range(9)]
    outcomes = await asyncio.gather(
        *(generator.generate(*request) for request in requests), return_exceptions=True
    )
    assert isinstance(outcomes[5], RequestError)
    assert "not finite" in str(outcomes[5])
    for n, request in enumerate(requests):
        if n != 5:
            assert_by_hand(engine, outcomes[n], *request)
    assert_nothing_is_held(generator)


# --- deadlines and cancellation ---


BUSY = ([1] * 3, params(60, seed=4, deadline_seconds=FAR))  # over twenty calls


def busy_engine(**settings: Any) -> CountableEngine:
    engine = CountableEngine(positions=200, decode_steps=1, **settings)
    engine.stop_token_ids = frozenset()
    return engine


# (slots, prompt, new tokens): what the request is at when its deadline passes, beside one that runs
# already
STATES: dict[str, tuple[int, list[int], int]] = {
    "waiting": (1, [2, 3], 5),
    "prefilling": (2, [2] * 100, 5),
    "decoding": (2, [2, 3], 100),
}


def state_of(generator: BatchedGenerator, prompt: list[int]) -> str:
    for request in generator._running.values():
        if request.prompt.tolist() == prompt:
            return "decoding" if request.tokens else "prefilling"
    return "waiting"


def interrupted(
    state: str, interrupt: Callable[[BatchedGenerator, asyncio.Task], Any], **changes: Any
):
    """Interrupt a request in this state beside a busy one.

    Return its outcome. Check that the busy request and a later one are answered as if nothing had
    happened.
    """
    slots, prompt, new_tokens = STATES[state]
    engine = busy_engine(slots=slots, prefill_tokens=2)
    generator = make_generator(engine)

    async def main():
        busy = asyncio.create_task(generator.generate(*BUSY))
        while not any(request.tokens for request in generator._running.values()):
            await asyncio.sleep(0)
        task = asyncio.create_task(generator.generate(prompt, params(new_tokens, **changes)))
        await interrupt(generator, task)
        outcome = await settle(task)
        for _ in range(30):
            await asyncio.sleep(0)
        assert len(generator._running) == (not busy.done()), "the slot is free again"
        after = await generator.generate([4, 5], params(4))
        return outcome, await busy, after

    outcome, busy, after = run(main())
    assert (list(busy.token_ids), list(busy.logprobs)) == engine.by_hand(*BUSY)
    assert list(after.token_ids) == engine.by_hand([4, 5], params(4))[0]
    assert_nothing_is_held(generator)
    return outcome


@pytest.mark.parametrize("state", STATES)
def test_a_deadline_that_passes_frees_the_slot_and_harms_nobody(turned_clock, state):
    async def wait(generator: BatchedGenerator, task: asyncio.Task) -> None:
        while state_of(generator, STATES[state][1]) != state or generator._submitted < 2:
            await asyncio.sleep(0)
        turned_clock.turn(0.05)

    outcome = interrupted(state, wait, deadline_seconds=0.04)
    assert isinstance(outcome, DeadlineError)
    assert "0.04 s passed" in str(outcome)


@pytest.mark.parametrize("state", STATES)
def test_a_request_that_is_cancelled_frees_the_slot_and_harms_nobody(state):
    async def cancel(generator: BatchedGenerator, task: asyncio.Task) -> None:
        while state_of(generator, STATES[state][1]) != state or generator._submitted < 2:
            await asyncio.sleep(0)
        task.cancel()

    assert isinstance(interrupted(state, cancel), asyncio.CancelledError)


async def test_a_stream_that_is_left_frees_its_slot():
    engine = busy_engine(slots=1)
    generator = make_generator(engine)
    stream = generator.stream([2, 3], params(100))
    async for part in stream:
        assert list(part.token_ids) == engine.by_hand([2, 3], params(1))[0]
        break
    await stream.aclose()
    await at_rest(generator)
    assert_nothing_is_held(generator)
    assert engine.decode_calls < 10, "nothing is spent on what nobody reads"


async def test_a_stream_whose_deadline_passes_shows_what_it_has_and_then_the_error(turned_clock):
    engine = busy_engine(slots=1)
    shown: list[int] = []
    with pytest.raises(DeadlineError):
        async for part in make_generator(engine).stream([2, 3], params(100, deadline_seconds=0.05)):
            shown.extend(part.token_ids)
            if len(shown) == 3:
                turned_clock.turn(0.06)
    assert 0 < len(shown) < 100
    assert shown == engine.by_hand([2, 3], params(len(shown)))[0]


# --- more requests than there are slots ---


async def test_streams_wait_for_a_slot_like_every_other_request():
    engine = busy_engine(slots=1)
    generator = make_generator(engine)
    streams = [streamed(generator, [6, n], params(3, seed=n)) for n in range(5)]
    for n, tokens in enumerate(await asyncio.gather(*streams)):
        assert tokens == engine.by_hand([6, n], params(3, seed=n))[0]
    assert generator.statistics.refused == 0
    assert_nothing_is_held(generator)


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_caller_that_leaves_as_its_turn_comes_leaves_it_to_the_next(turns):
    engine = busy_engine(slots=1)
    generator = make_generator(engine)
    tasks = [
        asyncio.create_task(generator.generate([3, n + 1], params(6, seed=n))) for n in range(4)
    ]
    await tasks[0]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[1].cancel()
    outcomes = [await settle(task) for task in tasks]
    await at_rest(generator)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    for n in (0, 2, 3):
        assert list(outcomes[n].token_ids) == engine.by_hand([3, n + 1], params(6, seed=n))[0]
    assert_nothing_is_held(generator)


class Failing(CountableEngine):
    """An engine that cannot be reset."""

    def reset_cache(self) -> None:
        raise RuntimeError("no memory is left")


async def test_an_engine_that_fails_and_cannot_be_reset_leaves_nobody_waiting():
    engine = Failing(slots=1)
    engine.fails_at_call = 1
    generator = make_generator(engine)
    outcomes = await asyncio.gather(
        *(generator.generate([n], params(5)) for n in (3, 4)), return_exceptions=True
    )
    assert generator._driver is not None
    with pytest.raises(RuntimeError, match="no memory is left"):
        await generator._driver
    assert [str(outcome) for outcome in outcomes] == ["the device is gone"] * 2


@pytest.mark.parametrize(("deadline_seconds", "prompt_calls_in_a_row"), [(None, 50), (FAR, 1)])
async def test_a_batch_reads_prompts_first_and_a_watched_request_goes_on_between_chunks(
    deadline_seconds, prompt_calls_in_a_row
):
    calls = []

    class Noted(CountableEngine):
        def prefill(self, rows):
            calls.append("prefill")
            super().prefill(rows)

        def decode(self, state):
            calls.append("decode")
            return super().decode(state)

    engine = Noted(positions=200, decode_steps=1, slots=2, prefill_tokens=2)
    engine.stop_token_ids = frozenset()
    generator = make_generator(engine)
    first = asyncio.create_task(
        generator.generate([1] * 3, params(60, deadline_seconds=deadline_seconds))
    )
    while not any(request.tokens for request in generator._running.values()):
        await asyncio.sleep(0)
    await asyncio.gather(first, generator.generate([2] * 100, params(5)))
    in_a_row = max(
        len(list(group)) for kind, group in itertools.groupby(calls) if kind == "prefill"
    )
    assert in_a_row == prompt_calls_in_a_row


class TiledEngine(CountableEngine):
    """Reads prompts in tiles. Records for each prefill how many calls decoded before it, and how
    many tokens it reads.
    """

    tile_tokens = 4
    min_call_tokens = 16

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.prefills: list[tuple[int, int]] = []

    def prefill(self, rows):
        self.prefills.append((self.decode_calls, sum(len(row.tokens) for row in rows)))
        super().prefill(rows)


async def test_a_prompt_of_a_batch_waits_for_others_to_fill_a_call_but_not_for_long():
    engine = TiledEngine(positions=200, decode_steps=1, slots=16, prefill_tokens=64)
    engine.stop_token_ids = frozenset()
    generator = make_generator(engine)
    many = [asyncio.create_task(generator.generate([1 + n] * 5, params(40))) for n in range(15)]
    while not any(request.tokens for request in generator._running.values()):
        await asyncio.sleep(0)
    late = asyncio.create_task(generator.generate([19] * 6, params(4)))
    await asyncio.gather(late, *many)
    (decodes_before, _), (decodes_before_last, last_tokens) = engine.prefills[-2:]
    assert last_tokens == 5
    assert decodes_before_last - decodes_before == 1 + MAX_DEFERRED_CALLS
