"""The engine for TPUs around its kernel, which runs on no CPU (not even interpreted: it reshapes
references). Here numpy stands in for it, after its documentation and compared with the reference
that comes with it; `test_tpu_compile.py` compiles the real one.
"""

import asyncio
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from mujica_jax.errors import UserError
from mujica_jax.inference.engine import ragged
from mujica_jax.inference.engine.base import EngineOptions, PrefillRow, SlotState, page_bytes
from mujica_jax.inference.engine.ragged import Layout, RaggedEngine, check_tiles, pages_shape
from mujica_jax.inference.requests import Completion, SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from tests.helpers.tiny_engine import (
    MODEL,
    NO_STOP,
    decoded,
    decoder,
    log_probs_of,
    make_engine,
    random_tokens,
)

SLOTS = 3
POSITIONS = 64
PAGE_TOKENS = 8
PAGES_A_SLOT = POSITIONS // PAGE_TOKENS


def attention_by_hand(query, pages, lengths, tables, query_ends, count, sm_scale) -> np.ndarray:
    """Return causal attention of every sequence's queries, which are its last tokens, over its
    pages. Key and value heads alternate in a page.
    """
    mixed = np.zeros_like(query)
    for sequence in range(int(count[0])):
        first = query_ends[sequence]
        last = query_ends[sequence + 1]
        length = lengths[sequence]
        cached = pages[tables[sequence]].reshape(-1, *pages.shape[2:])[:length]
        keys = cached[:, 0::2]
        values = cached[:, 1::2]
        for place in range(first, last):
            before = length - (last - place) + 1
            for head in range(query.shape[1]):
                of_head = head * keys.shape[1] // query.shape[1]
                scores = keys[:before, of_head] @ query[place, head] * sm_scale
                weights = np.exp(scores - scores.max())
                mixed[place, head] = weights @ values[:before, of_head] / weights.sum()
    return mixed


def on_host(
    query,
    pages,
    lengths,
    tables,
    query_ends,
    count,
    *,
    sm_scale: float,
    k_scale,
    v_scale,
    **blocks: int,
) -> jax.Array:
    """Compute the attention by hand, with the signature of the kernel."""
    assert blocks["num_kv_pages_per_block"] <= tables.shape[1]
    assert blocks["num_queries_per_block"] <= query.shape[0]

    scale = None if pages.dtype == query.dtype else 1.0
    # With a scale, the kernel computes in the type of the queries.
    assert k_scale == scale
    assert v_scale == scale

    def call(query: Any, pages: Any, *rest: Any) -> np.ndarray:
        pages = np.asarray(pages).astype(query.dtype)
        return attention_by_hand(np.asarray(query), pages, *map(np.asarray, rest), sm_scale)

    result = jax.ShapeDtypeStruct(query.shape, query.dtype)
    return jax.pure_callback(call, result, query, pages, lengths, tables, query_ends, count)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(ragged, "ragged_paged_attention", on_host)
    ragged._prefill.clear_cache()
    ragged._decode.clear_cache()
    yield
    ragged._prefill.clear_cache()
    ragged._decode.clear_cache()


def make_ragged(
    *,
    slots: int = SLOTS,
    num_pages: int = SLOTS * PAGES_A_SLOT,
    prefill_tokens: int = 64,
    decode_steps: int = 2,
    **settings: Any,
) -> RaggedEngine:
    options = EngineOptions(
        slots=slots,
        positions=POSITIONS,
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages,
        prefill_tokens=prefill_tokens,
        decode_steps=decode_steps,
        stop_token_ids=[NO_STOP],
        **settings,
    )
    return RaggedEngine(decoder(), options)


def test_attention_by_hand_is_the_kernels_reference():
    draw = np.random.default_rng(0)
    pages = draw.normal(size=(7, 4, 4, 8)).astype(np.float32)  # two heads of keys, two of values
    query = draw.normal(size=(9, 4, 8)).astype(np.float32)
    lengths = np.asarray([10, 3, 5], np.int32)
    ends = np.asarray([0, 4, 5, 9], np.int32)
    tables = np.asarray([[3, 1, 6], [2, 0, 0], [5, 4, 0]], np.int32)
    count = np.asarray([3], np.int32)
    arrays = map(jnp.asarray, (query, pages, lengths, tables, ends, count))
    expected = ref_ragged_paged_attention(*arrays, sm_scale=0.3)
    by_hand = attention_by_hand(query, pages, lengths, tables, ends, count, 0.3)
    np.testing.assert_allclose(by_hand, expected, atol=1e-5)


def test_tokens_and_log_probabilities_are_those_of_the_full_forward(kernel):
    """The prompts end on both sides of a page's border.

    One slot is idle, and another slot computed the beginning of one prompt.
    """
    engine = make_ragged()
    prompts = {0: random_tokens(PAGE_TOKENS + 1), 2: random_tokens(21, seed=3)}
    engine.prefill(
        [
            PrefillRow(slot, range(slot * PAGES_A_SLOT, (slot + 1) * PAGES_A_SLOT), 0, prompt[:-1])
            for slot, prompt in prompts.items()
        ]
    )
    # Slot 1 begins as slot 2 does: two whole pages of it, and a copy of the third that holds four
    # of its tokens.
    prompts[1] = [*prompts[2][:19], *random_tokens(4, seed=5)]
    engine.copy_pages([(2 * PAGES_A_SLOT + 2, PAGES_A_SLOT + 2)])
    pages = [2 * PAGES_A_SLOT, 2 * PAGES_A_SLOT + 1, *range(PAGES_A_SLOT + 2, 2 * PAGES_A_SLOT)]
    engine.prefill([PrefillRow(1, pages, 19, prompts[1][19:-1])])
    state = SlotState.idle(SLOTS)
    for slot, prompt in prompts.items():
        state.token[slot] = prompt[-1]
        state.position[slot] = len(prompt) - 1
        state.temperature[slot] = 1.0
        state.remaining[slot] = 5 + slot
    for slot, (tokens, log_probs) in decoded(engine, state).items():
        assert len(tokens) == 5 + slot
        expected = log_probs_of(decoder(), prompts[slot] + tokens, len(tokens))
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def test_conversations_get_the_tokens_that_the_resident_engine_gives_them(kernel):
    def converse(engine) -> list[Completion]:
        generator = BatchedGenerator(engine, prefix_reuse=True)
        system = random_tokens(18, seed=9)

        async def play(number: int) -> list[Completion]:
            tokens_so_far = [*system, *random_tokens(3 + number, seed=number)]
            completions = []
            for turn in range(2):
                wanted = SamplingParams(
                    max_new_tokens=4 + number, temperature=1.0, seed=10 * number + turn
                )
                completions.append(await generator.generate(tokens_so_far, wanted, continues=True))
                tokens_so_far = [
                    *tokens_so_far,
                    *completions[-1].token_ids,
                    *random_tokens(3, seed=turn),
                ]
            return completions

        async def main() -> list[list[Completion]]:
            return await asyncio.gather(*(play(number) for number in range(SLOTS + 1)))

        return [completion for completions in asyncio.run(main()) for completion in completions]

    for ours, theirs in zip(converse(make_ragged()), converse(make_engine()), strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.slow)]
)
def test_a_narrow_cache_gives_the_numbers_of_the_resident_engine(kernel, dtype):
    prompts = {slot: random_tokens(11 + slot, seed=slot) for slot in range(SLOTS)}
    answers = []
    for engine in (make_ragged(cache_dtype=dtype), make_engine(cache_dtype=dtype)):
        state = SlotState.idle(SLOTS)
        for slot, prompt in prompts.items():
            engine.prefill(
                [
                    PrefillRow(
                        slot, range(slot * PAGES_A_SLOT, (slot + 1) * PAGES_A_SLOT), 0, prompt[:-1]
                    )
                ]
            )
            state.token[slot] = prompt[-1]
            state.position[slot] = len(prompt) - 1
            state.remaining[slot] = 6
        answers.append(decoded(engine, state))
    for slot in prompts:
        assert answers[0][slot][0] == answers[1][slot][0]
        np.testing.assert_allclose(answers[0][slot][1], answers[1][slot][1], atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "tensor", "dtype", "fits"),
    [
        (4, 4, jnp.bfloat16, True),
        (4, 4, jnp.int8, False),
        (4, 2, jnp.int8, True),
        (8, 4, jnp.int8, True),
        (6, 2, jnp.bfloat16, False),
    ],
)
def test_heads_that_the_kernel_cannot_read_are_refused(heads, tensor, dtype, fits):
    """Of the published models, Qwen2.5-7B has 4 key and value heads and Llama-3.1-8B has 8.

    `make test-slow` asks the kernel itself.
    """
    model = dataclasses.replace(MODEL, num_heads=24, num_kv_heads=heads)
    if fits:
        check_tiles(model, tensor, dtype)
    else:
        with pytest.raises(
            UserError,
            match=(
                f"{heads} key and value heads over engine.tensor_parallel_size {tensor} are "
                f"{heads // tensor} per device"
            ),
        ):
            check_tiles(model, tensor, dtype)


def test_pages_that_are_broken_are_emptied_in_every_layer(kernel):
    engine = make_ragged()
    engine._weights = jax.tree.map(lambda array: array * np.nan, nnx.state(decoder()))
    engine.prefill([PrefillRow(1, range(PAGES_A_SLOT), 0, random_tokens(20))])
    assert not np.isfinite(engine._pages).all()
    engine.free_slot(1, broken_pages=range(3))
    assert np.isfinite(engine._pages).all()


def test_small_heads_are_filled_up_for_the_kernel():
    assert MODEL.head_dim < ragged.LANES
    assert make_ragged()._pages.shape == (
        2 * SLOTS * PAGES_A_SLOT,
        PAGE_TOKENS,
        2 * MODEL.num_kv_heads,
        ragged.LANES,
    )


def test_the_size_of_a_page_counts_what_heads_are_filled_up_with():
    engine = make_ragged()
    size = page_bytes(MODEL, PAGE_TOKENS, jnp.float32, ragged.LANES)
    assert engine.num_pages * size == engine._pages.nbytes


def test_a_wide_model_needs_no_filling():
    wide = dataclasses.replace(MODEL, head_dim=256)
    assert pages_shape(wide, Layout(num_pages=1, page_tokens=8, mesh=None))[-1] == 256
