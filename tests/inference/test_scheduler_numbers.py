"""The answer to a request depends on the request alone: not on the batch, on chunks, on pages, or
on the faults of others.
"""

import asyncio
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.inference.engine.base import Engine, EngineOptions
from mujica_jax.inference.engine.contiguous import ContiguousEngine
from mujica_jax.inference.requests import Completion, RequestError
from mujica_jax.models.decoder import Decoder
from tests.helpers.tiny_engine import (
    DECODE_STEPS,
    MODEL,
    NO_STOP,
    PAGE_TOKENS,
    PAGES_A_SLOT,
    POSITIONS,
    decoder,
    log_probs_of,
    make_engine,
    random_tokens,
    without_kernels,
)
from tests.helpers.tiny_models import filled_decoder
from tests.helpers.traffic import (
    FAR,
    assert_nothing_is_held,
    complete_all,
    make_generator,
    params,
    run,
    settle,
)

EXACT = 1e-5  # float32, the same sums in another order
BROKEN = MODEL.vocab_size - 1  # a token whose embedding is not finite, in the decoder below


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [completion.token_ids for completion in ours] == [
        completion.token_ids for completion in theirs
    ]
    for completion, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=EXACT)


def engine_of(
    model: Decoder,
    *,
    slots: int = 4,
    num_pages: int = PAGES_A_SLOT,
    prefill_tokens: int = 128,
    decode_steps: int = DECODE_STEPS,
) -> Engine:
    options = EngineOptions(
        slots=slots,
        positions=POSITIONS,
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages,
        prefill_tokens=prefill_tokens,
        decode_steps=decode_steps,
        stop_token_ids=[NO_STOP],
    )
    return ContiguousEngine(model, options)


# Both sides of page borders; some begin alike.
LENGTHS = [
    1,
    2,
    *(PAGE_TOKENS * pages + step for pages in (1, 2, 5, 9) for step in (-1, 0, 1)),
    100,
]
MIXED = [
    ([*random_tokens(length // 2, seed=0), *random_tokens(length - length // 2, seed=length)],
     params(6 + length % 5, temperature, seed=length))
    for length, temperature in zip(LENGTHS, [1.0, 0.0, 0.7, 1.5, 1.0] * 3, strict=True)
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """Complete each request in an empty engine."""
    generator = make_generator(engine_of(decoder()))
    completions = []
    for request in MIXED:
        generator.reset_cache()
        completions += complete_all(generator, [request])
    return completions


def test_log_probabilities_of_prompts_around_page_borders_are_those_of_the_full_forward(alone):
    for (prompt, _), completion in zip(MIXED, alone, strict=True):
        expected = log_probs_of(
            decoder(), [*prompt, *completion.token_ids], len(completion.token_ids)
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


@pytest.mark.slow
def test_a_request_among_64_gets_what_it_gets_alone(alone):
    others = [
        (random_tokens(3 + n, seed=1000 + n), params(5 + n % 9, seed=n))
        for n in range(64 - len(MIXED))
    ]
    generator = make_generator(make_engine(slots=64, pages=16 * PAGES_A_SLOT))
    assert_same(complete_all(generator, [*MIXED, *others])[: len(MIXED)], alone)


def test_prompts_computed_in_chunks_give_what_whole_prompts_give(alone):
    generator = make_generator(engine_of(decoder(), prefill_tokens=7))
    assert_same(complete_all(generator, MIXED), alone)


def test_pages_that_are_shared_evicted_and_filled_again_give_what_fresh_memory_gives(alone):
    """Every request comes three times, in another order each time, with pages for little more than
    one.
    """
    generator = make_generator(engine_of(decoder()))
    for round in range(3):
        order = np.random.default_rng(round).permutation(len(MIXED))
        completions = complete_all(generator, [MIXED[n] for n in order])
        assert_same(completions, [alone[n] for n in order])
    assert generator.statistics.evicted_pages > 3 * PAGES_A_SLOT
    assert generator.statistics.cache_hit_rate > 0.05
    assert_nothing_is_held(generator)


def test_filters_of_some_requests_change_no_token_of_the_others(alone):
    filters = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
    ]
    filtered = [
        (prompt, dataclasses.replace(wanted, **filters[number % 4]))
        for number, (prompt, wanted) in enumerate(MIXED)
    ]
    completions = complete_all(make_generator(engine_of(decoder())), [*filtered, *MIXED])
    assert_same(completions[len(MIXED) :], alone)
    for (_, wanted), completion in zip(filtered, completions, strict=False):
        if wanted.top_k == 1:
            assert completion.sampling_logprobs == (0.0,) * len(completion.token_ids), (
                "one token is left"
            )


@pytest.fixture(scope="module")
def fragile() -> Decoder:
    """Return a decoder in which one token's embedding is not a number.

    Only requests that read it are lost.
    """
    model = filled_decoder(dataclasses.replace(MODEL, num_layers=1, tie_word_embeddings=False))
    model.embedding[...] = model.embedding[...].at[BROKEN].set(jnp.nan)
    return model


COMMON = [token % BROKEN for token in random_tokens(PAGE_TOKENS + 2, seed=5)]
GOOD = (
    [*COMMON, 5, 6],
    params(6),
)  # short: what lies behind it in its page and its row stays there while it decodes


@pytest.fixture(scope="module")
def expected(fragile) -> list[Completion]:
    return complete_all(
        make_generator(engine_of(fragile, slots=2, prefill_tokens=16, num_pages=2 * PAGES_A_SLOT)),
        [GOOD],
    )


def beside_a_lost_one(
    fragile: Decoder, prompt: list[int], cancelled_at: int | None = None
) -> tuple[Any, Completion]:
    """Return the outcome of a request whose prompt is not finite, and the completion of the good
    request that took its slot.
    """
    generator = make_generator(
        engine_of(fragile, slots=2, prefill_tokens=16, num_pages=2 * PAGES_A_SLOT)
    )

    async def main() -> tuple[Any, Completion]:
        busy = asyncio.create_task(
            generator.generate([7] * 4, params(100, 0.0, deadline_seconds=FAR))
        )  # never draws BROKEN
        while not any(request.tokens for request in generator._running.values()):
            await asyncio.sleep(0)
        lost = asyncio.create_task(generator.generate(prompt, params(6)))
        await asyncio.sleep(0)
        good = asyncio.create_task(generator.generate(*GOOD))
        while cancelled_at and not any(
            request.prefilled_tokens >= cancelled_at for request in generator._running.values()
        ):
            await asyncio.sleep(0)
        if cancelled_at:
            lost.cancel()
        outcome = await settle(lost)
        completion = await good
        assert not busy.done(), "it took the slot that was given up"
        await busy
        return outcome, completion

    outcome, completion = run(main())
    assert_nothing_is_held(generator)
    return outcome, completion


def test_a_prompt_that_is_not_finite_fails_alone_although_its_pages_were_shared(fragile, expected):
    """They were shared before anybody saw a logit.

    The good request begins in the middle of one of them.
    """
    error, completion = beside_a_lost_one(fragile, [*COMMON, *[3] * 5, BROKEN, *[3] * 20])
    assert isinstance(error, RequestError)
    assert "not finite" in str(error)
    assert_same([completion], expected)


def test_a_prompt_that_is_not_finite_and_is_cancelled_before_anybody_knows_leaves_no_trace(
    fragile, expected
):
    outcome, completion = beside_a_lost_one(
        fragile, [*[9] * 40, BROKEN, *[9] * 68], cancelled_at=48
    )
    assert isinstance(outcome, asyncio.CancelledError)
    assert_same([completion], expected)


def test_a_request_that_is_cancelled_before_its_prompt_is_read_takes_nobodys_row(monkeypatch):
    """The second prompt takes the whole call, so the third is cancelled while it has a slot and no
    row.
    """
    without_kernels(monkeypatch)
    requests = [
        (random_tokens(5, seed=1), params(40, deadline_seconds=FAR)),
        (random_tokens(33, seed=2), params(20)),
    ]

    def new_engine() -> Engine:
        return engine_of(
            decoder(), slots=8, prefill_tokens=16, decode_steps=1, num_pages=8 * PAGES_A_SLOT
        )

    expected = []
    for request in requests:
        expected += complete_all(make_generator(new_engine()), [request])
    engine = new_engine()
    generator = make_generator(engine)

    async def main() -> list[Completion]:
        first = asyncio.create_task(generator.generate(*requests[0]))
        while not any(request.tokens for request in generator._running.values()):
            await asyncio.sleep(0)
        second = asyncio.create_task(generator.generate(*requests[1]))
        await asyncio.sleep(0)
        third = asyncio.create_task(generator.generate(random_tokens(60, seed=3), params(20)))
        while len(generator._running) < 3:
            await asyncio.sleep(0)
        assert engine._slot_caches[2].row == -1
        assert engine._slot_caches[1].row == engine._num_rows - 1
        third.cancel()
        return [await first, await second]

    assert_same(run(main()), expected)


BEGINNINGS = (
    [],
    random_tokens(8 * PAGE_TOKENS + 3, seed=50),
    random_tokens(19, seed=51),
)  # the second is long enough for a group
TRAFFIC = st.lists(
    st.tuples(
        st.sampled_from(BEGINNINGS),
        st.integers(1, 30),
        st.integers(1, 6),
        st.none() | st.integers(0, 4),
    ),
    min_size=1,
    max_size=9,
)


@functools.cache
def busy_engine() -> Engine:
    """Return one engine for all examples, so that it compiles once."""
    return engine_of(decoder(), slots=6, num_pages=3 * PAGES_A_SLOT, prefill_tokens=48)


@pytest.mark.slow
@given(waves=st.lists(TRAFFIC, min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_random_traffic_on_rows_and_groups_gives_everyone_the_numbers_of_a_full_forward_pass(waves):
    """There are few pages, prompts in chunks, conversations that come back, and requests that are
    cancelled after some turns of the loop. With kernels all of it takes at most 11 programs.
    """
    generator = make_generator(busy_engine())
    generator.reset_cache()

    async def converse(
        number: int, beginning: list[int], own: int, new: int, cancelled_after: int | None
    ) -> None:
        prompt = [*beginning, *random_tokens(own, seed=number)]
        task = asyncio.ensure_future(generator.generate(prompt, params(new, seed=number)))
        if cancelled_after is not None:
            for _ in range(3 * cancelled_after):
                await asyncio.sleep(0)
            task.cancel()
        outcome = await settle(task)
        if not isinstance(outcome, asyncio.CancelledError):
            assert isinstance(outcome, Completion)
            assert len(outcome.token_ids) == new
            expected = log_probs_of(decoder(), [*prompt, *outcome.token_ids], new)
            np.testing.assert_allclose(outcome.logprobs, expected, atol=EXACT)

    async def main() -> None:
        for wave in waves:
            await asyncio.gather(*(converse(number, *asked) for number, asked in enumerate(wave)))
        while generator._running:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert_nothing_is_held(generator)
    assert generator.statistics.compiled_programs <= 11
