"""Scheduling on an engine whose completions are computed by hand, and on a real engine where only
that shows a fault.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mujica_jax.inference.engine import contiguous_programs as resident_programs
from mujica_jax.inference.requests import Completion, RequestError, SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.tiny_engine import (
    MODEL,
    POSITIONS,
    SLOTS,
    decoder,
    log_probs_of,
    make_engine,
    random_tokens,
    without_kernels,
)
from tests.helpers.traffic import assert_by_hand, complete_all, make_generator, params, run

# --- scheduling ---

prompts = st.lists(st.integers(0, 19), min_size=1, max_size=40)
all_params = st.builds(
    params,
    st.integers(1, 20),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 5) | st.sampled_from([-1, 2**32, 2**70]),
)


@given(
    requests=st.lists(st.tuples(prompts, all_params), max_size=12),
    slots=st.integers(1, 4),
    reuse=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_more_requests_than_slots_all_finish_each_with_its_own_result(requests, slots, reuse):
    engine = CountableEngine(slots=slots)
    generator = make_generator(engine, prefix_reuse=reuse)
    completions = complete_all(generator, requests)
    for completion, (prompt, wanted) in zip(completions, requests, strict=True):
        assert_by_hand(engine, completion, prompt, wanted)
    counted = generator.statistics
    assert counted.requests == len(requests)
    assert counted.prompt_tokens == sum(len(prompt) for prompt, _ in requests)
    assert counted.generated_tokens == sum(len(completion.token_ids) for completion in completions)


@given(data=st.data(), slots=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_growing_conversations_are_answered_as_if_each_turn_stood_alone(data, slots):
    """There are more conversations than slots.

    Some begin alike, some are cancelled, some have a short last turn.
    """
    opening = data.draw(prompts)
    turns = st.lists(
        st.tuples(st.lists(st.integers(0, 19), max_size=4), st.integers(1, 5), st.booleans()),
        max_size=3,
    )
    conversations = data.draw(st.lists(st.tuples(st.booleans(), turns), max_size=5))
    engine = CountableEngine(slots=slots, positions=128)
    generator = make_generator(engine)

    async def play(same_opening: bool, turns: list[tuple[list[int], int, bool]]) -> None:
        tokens_so_far = list(opening) if same_opening else [7, *opening]
        for heard, max_new_tokens, cancelled in turns:
            tokens_so_far += heard
            wanted = params(max_new_tokens, seed=len(tokens_so_far))
            task = asyncio.ensure_future(generator.generate(tokens_so_far, wanted, continues=True))
            if cancelled:
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                continue
            completion = await task
            assert_by_hand(engine, completion, tokens_so_far, wanted)
            tokens_so_far += completion.token_ids

    async def main() -> None:
        await asyncio.gather(*(play(*conversation) for conversation in conversations))

    run(main())


def test_a_conversation_that_comes_back_is_prefilled_from_where_it_stopped():
    def prefilled(prefix_reuse: bool) -> int:
        generator = make_generator(CountableEngine(), prefix_reuse=prefix_reuse)

        async def main() -> None:
            tokens_so_far = [*range(1, 13)]
            for _ in range(3):
                completion = await generator.generate(tokens_so_far, params(5), continues=True)
                tokens_so_far += [*completion.token_ids, 3, 4]

        run(main())
        return generator.statistics.prefilled_tokens

    # The last prompt token is decoded: 11 at first; then the last generated token and one of the
    # two new ones.
    assert prefilled(prefix_reuse=True) == 11 + 2 + 2
    assert prefilled(prefix_reuse=False) == 11 + 18 + 25


async def test_the_slot_of_a_conversation_that_will_come_back_is_kept_while_others_are_free():
    engine = CountableEngine(slots=2)
    generator = make_generator(engine)
    opening = [5, 6, 7, 8, 9, 5, 6, 7]
    first = await generator.generate(opening, params(3), continues=True)
    for seed in range(4):
        await generator.generate([10 + seed, 2, 3], params(3, seed=seed))
    before = generator.statistics.prefilled_tokens
    await generator.generate([*opening, *first.token_ids, 4], params(3), continues=True)
    assert generator.statistics.prefilled_tokens == before + 1, (
        "the last generated token alone was not cached"
    )


async def test_a_conversation_that_will_come_back_overtakes_requests_that_will_not():
    generator = make_generator(CountableEngine(slots=1))
    finished = []

    async def ask(name: str, continues: bool) -> None:
        await generator.generate([1, 2, 3], params(9), continues=continues)
        finished.append(name)

    await asyncio.gather(ask("first", False), ask("second", False), ask("continues", True))
    assert finished == ["continues", "first", "second"]


def test_a_stop_token_ends_a_request_and_is_its_last_token():
    engine = CountableEngine()
    prompt = next([token] for token in range(20) if 0 in engine.by_hand([token], params(30))[0][1:])
    (completion,) = complete_all(make_generator(engine), [(prompt, params(30))])
    assert completion.finish_reason == "stop"
    assert completion.token_ids.index(0) == len(completion.token_ids) - 1


BAD_REQUESTS = {
    "the prompt is empty": ([], params()),
    "token ids 3..20 are outside the vocabulary of 20": ([3, 20], params()),
    "token ids -1..3 are outside the vocabulary": ([3, -1], params()),
    "max_new_tokens is 0": ([3], params(max_new_tokens=0)),
    "temperature is -0.5": ([3], params(temperature=-0.5)),
    "temperature is nan": ([3], params(temperature=math.nan)),
    "60 prompt tokens and 5 new ones do not fit the engine's 64 positions": ([3] * 60, params(5)),
}


async def test_bad_requests_are_refused_one_by_one_while_others_go_on():
    engine = CountableEngine()
    generator = make_generator(engine)
    good = [([token, 2, 3], params(10, seed=token)) for token in range(len(BAD_REQUESTS))]
    mixed = [request for pair in zip(good, BAD_REQUESTS.values(), strict=True) for request in pair]
    results = await asyncio.gather(
        *(generator.generate(*request) for request in mixed), return_exceptions=True
    )
    for completion, (prompt, wanted) in zip(results[::2], good, strict=True):
        assert_by_hand(engine, completion, prompt, wanted)
    for error, sentence in zip(results[1::2], BAD_REQUESTS, strict=True):
        assert isinstance(error, RequestError), error
        assert sentence in str(error), error


def test_a_request_may_fill_the_engine_to_its_last_position():
    engine = CountableEngine(positions=64)
    wanted = params(4)
    (completion,) = complete_all(make_generator(engine), [([3] * 60, wanted)])
    assert_by_hand(engine, completion, [3] * 60, wanted)


@pytest.mark.parametrize("wait_calls", [0, 2], ids=["waiting", "running"])
async def test_a_cancelled_request_leaves_the_others_alone(wait_calls):
    engine = CountableEngine(slots=1 if wait_calls == 0 else 2)
    generator = make_generator(engine)
    prompt = next(
        [token] for token in range(20) if len(engine.by_hand([token], params(40))[0]) == 40
    )
    stays = asyncio.ensure_future(generator.generate(prompt, params(40)))
    goes = asyncio.ensure_future(generator.generate(prompt, params(40)))
    while engine.decode_calls < wait_calls or not generator._driver:
        await asyncio.sleep(0)
    goes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await goes
    calls = engine.decode_calls
    after = await generator.generate([4, *prompt], params(5))
    assert engine.decode_calls <= calls + 40, "nothing is spent on a request nobody waits for"
    assert_by_hand(engine, await stays, prompt, params(40))
    assert_by_hand(engine, after, [4, *prompt], params(5))
    started = 2 if wait_calls == 0 else 3
    assert generator.statistics.requests == started, (
        "a request that was cancelled while it waited is never started"
    )
    assert generator.statistics.generated_tokens < 40 + 40 + 5


@given(seed=st.integers(0, 2**32))
@example(seed=6)
@example(seed=7)
@settings(max_examples=40, deadline=None)
def test_requests_that_begin_alike_and_are_read_in_chunks_do_not_touch_each_others_pages(seed):
    """One may end, and leave its pages to others, while another that begins alike is still being
    read.
    """
    draw = np.random.default_rng(seed)
    engine = CountableEngine(
        slots=int(draw.integers(2, 4)),
        positions=96,
        pages=int(draw.integers(48, 73)),
        prefill_tokens=int(draw.integers(3, 9)),
        decode_steps=int(draw.integers(1, 3)),
    )
    engine.stop_token_ids = frozenset()
    generator = make_generator(engine)
    opening = draw.integers(0, 20, 60).tolist()

    async def ask(turns: int, length: int, ending: list[int], wanted: SamplingParams) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        prompt = [*opening[:length], *ending]
        tokens, _ = engine.by_hand(prompt, wanted)
        assert list((await generator.generate(prompt, wanted)).token_ids) == tokens

    async def main() -> None:
        # The order of the draws decides what the examples above show.
        lengths = draw.integers(24, 61, 12).tolist()
        turns = draw.integers(0, 120, 12).tolist()
        max_new_tokens = draw.integers(1, 30, 12).tolist()
        asking = []
        for seed, (after, length, tokens) in enumerate(
            zip(turns, lengths, max_new_tokens, strict=True)
        ):
            ending = [after % 20] * (seed % 2)
            asking.append(ask(after, length, ending, params(tokens, seed=seed)))
        await asyncio.gather(*asking)

    run(main())


@pytest.mark.parametrize("fails_at_call", [1, 3])
def test_a_fault_of_the_engine_reaches_everyone_who_waits(fails_at_call):
    engine = CountableEngine(slots=2)
    engine.fails_at_call = fails_at_call
    generator = make_generator(engine)
    requests = [([token, 5, 6], params(20, seed=token)) for token in range(6)]

    async def main() -> list:
        return await asyncio.gather(
            *(generator.generate(*request) for request in requests), return_exceptions=True
        )

    results = run(main())
    faults = [result for result in results if isinstance(result, RuntimeError)]
    assert len(faults) >= 2
    assert isinstance(results[-1], RuntimeError)
    for result, (prompt, wanted) in zip(results, requests, strict=True):
        if result not in faults:
            assert_by_hand(engine, result, prompt, wanted)
    engine.memory[:] = -1  # what the pages held is lost with the device
    for completion, (prompt, wanted) in zip(
        complete_all(generator, requests), requests, strict=True
    ):
        assert_by_hand(engine, completion, prompt, wanted)


def test_an_event_loop_that_ends_with_requests_under_way_leaves_a_usable_generator():
    engine = CountableEngine(slots=2)
    generator = make_generator(engine)

    async def fails_meanwhile() -> None:
        for seed in range(4):
            asyncio.ensure_future(generator.generate([3, seed], params(40, seed=seed)))  # noqa: RUF006
        while not generator._running:
            await asyncio.sleep(0)
        raise KeyError("something else went wrong")

    with pytest.raises(KeyError):
        asyncio.run(fails_meanwhile())
    generator.reset_cache()
    (completion,) = complete_all(generator, [([3, 0], params(40))])
    assert_by_hand(engine, completion, [3, 0], params(40))


async def test_weights_are_not_swapped_under_running_requests():
    engine = CountableEngine()
    generator = make_generator(engine, prefix_reuse=True, policy_version=1)
    weights = engine._weights
    running = asyncio.ensure_future(generator.generate([3], params(40)))
    while not generator._running:
        await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="while nothing runs"):
        generator.set_weights(nnx.State({}), 2)
    assert engine._weights is weights
    assert (await running).policy_version == 1


# --- with a real engine ---


@pytest.fixture
def generator() -> BatchedGenerator:
    return make_generator(make_engine())


def scaled(factor: float) -> nnx.State:
    return jax.tree.map(lambda array: jnp.asarray(array * factor), nnx.state(decoder()))


def converse(generator: BatchedGenerator, conversations: int, turns: int) -> list[list[Completion]]:
    """Play several conversations at once. Each hears a few tokens between its turns."""

    async def play(number: int) -> list[Completion]:
        tokens_so_far = random_tokens(10 + 7 * number, seed=number)
        completions = []
        for turn in range(turns):
            wanted = params(6 + number, seed=10 * number + turn)
            completions.append(await generator.generate(tokens_so_far, wanted, continues=True))
            tokens_so_far = [
                *tokens_so_far,
                *completions[-1].token_ids,
                *random_tokens(3 + turn, seed=turn),
            ]
        return completions

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(*(play(number) for number in range(conversations)))

    return run(main())


@pytest.mark.parametrize("conversations", [SLOTS, SLOTS + 2])
def test_prefix_reuse_changes_no_token_of_conversations(generator, conversations):
    without = make_generator(make_engine(), prefix_reuse=False)
    reused = converse(generator, conversations, 3)
    recomputed = converse(without, conversations, 3)
    for ours, theirs in zip(reused, recomputed, strict=True):
        assert [completion.token_ids for completion in ours] == [
            completion.token_ids for completion in theirs
        ]
        for completion, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
    assert generator.statistics.prompt_tokens == without.statistics.prompt_tokens
    assert generator.statistics.prefilled_tokens < without.statistics.prefilled_tokens
    if conversations == SLOTS:  # a turn costs what was heard before it: 3 and 4 tokens
        openings = sum(10 + 7 * number - 1 for number in range(SLOTS))
        assert generator.statistics.prefilled_tokens == openings + SLOTS * (3 + 4)


async def test_log_probabilities_of_a_turn_in_a_reused_slot_are_those_of_the_full_forward(
    generator,
):
    tokens_so_far = random_tokens(20)
    for turn in range(3):
        completion = await generator.generate(tokens_so_far, params(9, seed=turn), continues=True)
        tokens_so_far = [*tokens_so_far, *completion.token_ids]
        np.testing.assert_allclose(
            completion.logprobs, log_probs_of(decoder(), tokens_so_far, 9), atol=1e-5
        )
        tokens_so_far += random_tokens(5, seed=turn)
    assert generator.statistics.prefilled_tokens == 19 + 5 + 5


def test_a_request_alone_gets_what_it_gets_in_a_full_batch(generator):
    requests = [
        (random_tokens(3 + 5 * number, seed=number), params(4 + number, temperature, seed=number))
        for number, temperature in enumerate([1.0, 0.0, 0.7, 1.3, 1.0, 0.0, 1.0, 2.0])
    ]
    together = complete_all(generator, requests)
    for completion, request in zip(together, requests, strict=True):
        generator.reset_cache()
        (alone,) = complete_all(generator, [request])
        assert alone.token_ids == completion.token_ids
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)


def test_swapped_weights_show_in_version_and_tokens_and_nothing_cached_is_used(generator):
    prompt = random_tokens(30)
    wanted = params(10)
    (before,) = complete_all(generator, [(prompt, wanted)])
    generator.set_weights(scaled(1.5), policy_version=7)
    (after,) = complete_all(generator, [(prompt, wanted)])
    assert (before.policy_version, after.policy_version) == (0, 7)
    assert generator.statistics.prefilled_tokens == 2 * 29, "the prompt was prefilled again"
    swapped = nnx.merge(nnx.graphdef(decoder()), scaled(1.5))
    np.testing.assert_allclose(
        after.logprobs, log_probs_of(swapped, [*prompt, *after.token_ids], 10), atol=1e-5
    )
    assert np.abs(np.subtract(before.logprobs, after.logprobs)).max() > 1e-2


def test_a_policy_that_is_not_finite_fails_its_requests_and_leaves_no_trace(generator):
    requests = [
        (random_tokens(40, seed=number), params(6, seed=number)) for number in range(SLOTS + 2)
    ]
    expected = complete_all(generator, requests)
    generator.set_weights(scaled(math.nan), policy_version=1)

    async def main() -> list:
        return await asyncio.gather(
            *(generator.generate(*request) for request in requests), return_exceptions=True
        )

    for error in run(main()):
        # at the end of a call
        assert isinstance(error, RequestError)
        assert "not finite after 4 tokens" in str(error)
    generator.set_weights(scaled(1.0), policy_version=2)
    # most of a slot is not written again
    short = [(prompt[:5], wanted) for prompt, wanted in requests]
    assert all(
        np.isfinite(completion.logprobs).all() for completion in complete_all(generator, short)
    )
    after_recovery = complete_all(generator, requests)
    assert [completion.token_ids for completion in after_recovery] == [
        completion.token_ids for completion in expected
    ]


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        # Not all listeners: the counter of `runtime/compilation_cache.py` must stay registered.
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(("kernels", "shapes"), [(True, 1 + 1), (False, 2 + 2)])
def test_lengths_of_all_sizes_share_few_programs_and_a_second_run_compiles_nothing(
    kernels, shapes, monkeypatch
):
    """With kernels, one program prefills 128 tokens and one decodes 4 rows.

    XLA has both for rows of 128 and of 192.
    """
    if not kernels:
        without_kernels(monkeypatch)
    # A model of its own, so that no other test has compiled for it.
    model = decoder(dataclasses.replace(MODEL, num_layers=1, intermediate_size=16))
    lengths = [*range(1, POSITIONS - 4, 7), POSITIONS - 4]
    requests = [(random_tokens(length, seed=length), params(4, seed=length)) for length in lengths]
    copied = jax.tree.map(jnp.copy, nnx.state(model))
    before = resident_programs.prefill._cache_size() + resident_programs.decode._cache_size()
    with counting_compilations() as compiled:
        first = make_generator(make_engine(model))
        completions = complete_all(first, requests)
        programs = (
            resident_programs.prefill._cache_size()
            + resident_programs.decode._cache_size()
            - before
        )
        assert programs == shapes
        assert first.statistics.compiled_programs >= programs, "and a few that move pages"
        assert len(compiled) >= programs, "the count below sees compilations"
        compiled.clear()
        second = make_generator(make_engine(model))
        assert complete_all(second, requests) == completions
        second.set_weights(copied, 0)
        assert complete_all(second, requests) == completions
    assert compiled == []
