"""Prefill and decode, compared with the decoder's full forward pass and with the trainer."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax.config.schema import EngineConfig
from mujica_jax.inference.engine import contiguous_programs as resident_programs
from mujica_jax.inference.engine import factory
from mujica_jax.inference.engine.base import (
    Engine,
    FlushRow,
    PrefillRow,
    SlotState,
    advance,
    bucket,
    narrowed,
)
from mujica_jax.inference.engine.contiguous_programs import DecodeCall, Places, Tiles
from mujica_jax.inference.engine.contiguous_programs import decode as decode_program
from mujica_jax.inference.engine.contiguous_programs import prefill as prefill_program
from mujica_jax.inference.sampling import sample, uniforms
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.packing import pack
from tests.helpers.packed_rows import conversation
from tests.helpers.tiny_engine import (
    DECODE_STEPS,
    NO_STOP,
    PAGE_TOKENS,
    PAGES_A_SLOT,
    POSITIONS,
    PREFILL_TOKENS,
    SLOTS,
    decoded,
    decoder,
    log_probs_of,
    make_engine,
    next_token_logits,
    pages_of_slot,
    random_tokens,
)

SEQUENCE = random_tokens(40)
EXACT = 1e-5  # float32, the same sums in another order


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return a shared engine. Every test writes the slots that it reads."""
    return make_engine()


@pytest.fixture(scope="module")
def one_step() -> Engine:
    return make_engine(decode_steps=1)


def idle(slots: int = SLOTS) -> SlotState:
    return SlotState.idle(slots)._replace(temperature=np.ones(slots, np.float32))


def started(engine: Engine, prompts: dict[int, list[int]], new_tokens: int, **changes) -> SlotState:
    """Prefill one prompt a slot. Return the state."""
    state = idle(engine.slots)._replace(**changes)
    for slot, prompt in prompts.items():
        engine.prefill([PrefillRow(slot, pages_of_slot(slot), 0, prompt[:-1])])
        state.token[slot] = prompt[-1]
        state.position[slot] = len(prompt) - 1
        state.remaining[slot] = new_tokens
    return state


@jax.jit
def drawn_from(logits, seeds, positions):
    """Return tokens and log-probabilities at temperature 1."""
    return sample(logits, jnp.ones(len(logits)), uniforms(seeds, positions))[:2]


@pytest.mark.parametrize("seed", [0, 1])
def test_after_a_prefill_of_any_length_the_next_token_is_that_of_the_full_forward(engine, seed):
    positions = np.arange(len(SEQUENCE), dtype=np.int32)
    seeds = np.full(len(SEQUENCE), seed, np.uint32)
    expected = drawn_from(next_token_logits(decoder(), SEQUENCE), seeds, positions)
    outputs = []
    for first in range(1, len(SEQUENCE) + 1, SLOTS):
        prompts = {slot: SEQUENCE[: first + slot] for slot in range(SLOTS)}
        state = started(engine, prompts, 1, seed=np.full(SLOTS, seed, np.uint32))
        outputs += decoded(engine, state).values()
    tokens, log_probs = zip(*outputs, strict=True)
    assert [token for (token,) in tokens] == expected[0].tolist()
    np.testing.assert_allclose(np.ravel(log_probs), expected[1], atol=EXACT)


def test_decoding_a_given_sequence_token_by_token_equals_the_full_forward(one_step):
    """Every slot decodes its own sequence from an empty slot. The drawn tokens are ignored."""
    sequences = np.asarray([random_tokens(40, seed) for seed in range(SLOTS)], np.int32)
    logits = np.asarray([next_token_logits(decoder(), sequence) for sequence in sequences.tolist()])
    for slot in range(SLOTS):
        one_step.prefill([PrefillRow(slot, pages_of_slot(slot), 0, [])])
    for position in range(sequences.shape[1]):
        state = idle()._replace(
            token=sequences[:, position],
            position=np.full(SLOTS, position, np.int32),
            remaining=np.ones(SLOTS, np.int32),
            seed=np.arange(SLOTS, dtype=np.uint32),
        )
        _, decoded = one_step.decode(state)
        expected = drawn_from(logits[:, position], state.seed, state.position)
        np.testing.assert_array_equal(decoded.tokens[0], expected[0])
        np.testing.assert_allclose(decoded.logprobs[0], expected[1], atol=EXACT)


@pytest.fixture
def seen_logits(monkeypatch) -> Iterator[list[np.ndarray]]:
    """Record the whole rows of logits of every decode step, in order.

    Programs compiled with the listener are dropped after the test.
    """
    rows: list[np.ndarray] = []

    def listened(logits, *rest):
        jax.debug.callback(lambda values: rows.append(np.asarray(values)), logits, ordered=True)
        return advance(logits, *rest)

    monkeypatch.setattr(resident_programs, "advance", listened)
    decode_program.clear_cache()
    yield rows
    decode_program.clear_cache()


@pytest.mark.parametrize("prefilled", [0, 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 3])
def test_whole_rows_of_logits_are_those_of_the_full_forward_at_every_position(
    seen_logits, prefilled
):
    """The positions are decoded one by one after a prefill of none, one, a page or some pages of
    the sequence.
    """
    logits = next_token_logits(decoder(), SEQUENCE)
    one_step = make_engine(decode_steps=1)
    one_step.prefill([PrefillRow(1, pages_of_slot(1), 0, SEQUENCE[:prefilled])])
    state = idle()
    for position in range(prefilled, len(SEQUENCE)):
        state.token[1] = SEQUENCE[position]
        state.position[1] = position
        state.remaining[1] = 1
        one_step.decode(state)
    jax.effects_barrier()
    engine_logits = [rows[0] for rows in seen_logits]  # a call computes as many rows as run
    np.testing.assert_allclose(engine_logits, logits[prefilled:], atol=EXACT)


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 100, 120, POSITIONS - 20])
def test_log_probabilities_of_a_completion_are_those_of_the_full_forward(engine, length):
    prompt = random_tokens(length, seed=length)
    ((tokens, log_probs),) = decoded(engine, started(engine, {2: prompt}, 20)).values()
    assert len(tokens) == 20
    np.testing.assert_allclose(log_probs, log_probs_of(decoder(), prompt + tokens, 20), atol=EXACT)


def test_log_probabilities_of_a_completion_are_those_of_the_trainer(engine):
    prompts = {slot: random_tokens(5 + 6 * slot, seed=slot) for slot in range(SLOTS)}
    outputs = decoded(engine, started(engine, prompts, 12))
    rows = pack(
        [conversation(tuple(prompts[slot]), tuple(outputs[slot][0])) for slot in range(SLOTS)],
        sequence_length=80,
        seed=0,
    )
    assert rows.num_rows < SLOTS, "conversations share rows"
    scores = np.asarray(nnx.jit(token_log_probs)(decoder(), rows.batch(slice(None))))
    for slot, (row, start) in enumerate(rows.placements):
        model_turn = slice(start + len(prompts[slot]), start + len(prompts[slot]) + 12)
        np.testing.assert_allclose(outputs[slot][1], scores[row, model_turn], atol=1e-4)


def test_a_prompt_prefilled_in_parts_equals_one_prefilled_at_once(engine):
    state = started(engine, {0: SEQUENCE}, 8, seed=np.full(SLOTS, 5, np.uint32))
    for start, stop in ((0, 7), (7, 38), (38, 39)):
        engine.prefill([PrefillRow(1, pages_of_slot(1), start, SEQUENCE[start:stop])])
    state.token[1] = SEQUENCE[-1]
    state.position[1] = 39
    state.remaining[1] = 8
    outputs = decoded(engine, state)
    assert outputs[1][0] == outputs[0][0]
    np.testing.assert_allclose(outputs[1][1], outputs[0][1], atol=EXACT)


def test_rows_of_one_prefill_call_do_not_see_each_other(engine):
    prompts = [random_tokens(length, seed=length) for length in (9, 20, 33)]
    rows = [
        PrefillRow(slot, pages_of_slot(slot), 0, np.asarray(prompt[:-1], np.int32))
        for slot, prompt in enumerate(prompts)
    ]
    engine.prefill(rows)
    state = idle()
    for slot, prompt in enumerate(prompts):
        state.token[slot] = prompt[-1]
        state.position[slot] = len(prompt) - 1
        state.remaining[slot] = 6
    for slot, (tokens, log_probs) in decoded(engine, state).items():
        np.testing.assert_allclose(
            log_probs, log_probs_of(decoder(), prompts[slot] + tokens, 6), atol=EXACT
        )


def test_a_slot_that_is_neither_prefilled_nor_running_keeps_its_row_bit_for_bit(engine):
    engine.prefill([PrefillRow(3, pages_of_slot(3), 0, SEQUENCE)])
    row = engine._slot_caches[3].row
    before = [np.array(layer[row, :, :40]) for layer in engine._memory.rows.values]
    decoded(engine, started(engine, {0: SEQUENCE[:9], 1: SEQUENCE[:30]}, 8))
    after = [
        np.array(layer[engine._slot_caches[3].row, :, :40]) for layer in engine._memory.rows.values
    ]
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_stop_token_ends_a_slot_and_is_its_last_token(engine):
    (tokens, _) = decoded(
        engine, started(engine, {0: SEQUENCE}, 12, temperature=np.zeros(SLOTS, np.float32))
    )[0]
    place = next(n for n, token in enumerate(tokens) if token not in tokens[:n] and n >= 1)
    stopping = make_engine(stop=tokens[place])
    state = started(
        stopping, {0: SEQUENCE, 1: SEQUENCE}, 12, temperature=np.zeros(SLOTS, np.float32)
    )
    outputs = decoded(stopping, state)
    assert outputs[0][0] == outputs[1][0] == tokens[: place + 1]


@pytest.mark.parametrize("new_tokens", [1, DECODE_STEPS, DECODE_STEPS + 1])
def test_a_slot_generates_no_more_than_it_may(engine, new_tokens):
    outputs = decoded(engine, started(engine, {0: SEQUENCE, 3: SEQUENCE[:3]}, new_tokens))
    assert [len(tokens) for tokens, _ in outputs.values()] == [new_tokens, new_tokens]


def test_a_slot_may_be_filled_to_its_last_position(engine):
    prompt = random_tokens(POSITIONS - 3, seed=1)
    ((tokens, log_probs),) = decoded(engine, started(engine, {1: prompt}, 3)).values()
    np.testing.assert_allclose(log_probs, log_probs_of(decoder(), prompt + tokens, 3), atol=EXACT)


def test_what_is_not_finite_leaves_no_trace_in_its_slot_and_pages():
    engine = make_engine()
    good = nnx.state(decoder())
    expected = decoded(engine, started(engine, {0: SEQUENCE[:5]}, 4))[0]
    engine._weights = jax.tree.map(lambda array: array * np.nan, good)
    assert np.isnan(decoded(engine, started(engine, {0: SEQUENCE}, 4))[0][1]).all()
    engine.flush([FlushRow(0, pages_of_slot(0), 0, 43)])
    engine._weights = good
    engine.free_slot(0, broken_pages=pages_of_slot(0))
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(engine._memory))
    output = decoded(engine, started(engine, {0: SEQUENCE[:5]}, 4))[0]
    assert output[0] == expected[0]
    np.testing.assert_allclose(output[1], expected[1], atol=EXACT)


@pytest.mark.parametrize(
    "cached", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS, 39]
)
def test_a_sequence_goes_on_from_pages_that_another_slot_computed(engine, cached):
    """The lengths lie on page borders and on both sides of them. The last page is read in part."""
    expected = decoded(engine, started(engine, {0: SEQUENCE}, 6))[0]
    engine.flush([FlushRow(0, pages_of_slot(0), 0, 39)])
    engine.free_slot(0)
    whole = cached // PAGE_TOKENS
    pages = [*pages_of_slot(0)[:whole], *pages_of_slot(2)[whole:]]
    if cached % PAGE_TOKENS:
        engine.copy_pages([(pages_of_slot(0)[whole], pages_of_slot(2)[whole])])
    engine.prefill([PrefillRow(2, pages, cached, SEQUENCE[cached:-1])])
    state = idle()
    state.token[2] = SEQUENCE[-1]
    state.position[2] = 39
    state.remaining[2] = 6
    output = decoded(engine, state)[2]
    assert output[0] == expected[0]
    np.testing.assert_allclose(output[1], expected[1], atol=EXACT)


def test_copies_read_all_pages_before_any_is_written(engine):
    engine.prefill([PrefillRow(0, pages_of_slot(0), 0, SEQUENCE)])
    engine.flush([FlushRow(0, pages_of_slot(0), 0, 40)])
    first = np.array(engine._memory.pages.keys[0][0])
    second = np.array(engine._memory.pages.keys[0][1])
    third = np.array(engine._memory.pages.keys[0][2])
    engine.copy_pages([(0, 1), (1, 2)])
    np.testing.assert_array_equal(engine._memory.pages.keys[0][0], first)
    np.testing.assert_array_equal(engine._memory.pages.keys[0][1], first)
    np.testing.assert_array_equal(engine._memory.pages.keys[0][2], second)
    assert not np.array_equal(second, third)


SHARED = random_tokens(8 * PAGE_TOKENS, seed=77)  # as long as the shortest group


def test_what_many_rows_begin_with_is_held_once_and_read_by_all_of_them():
    """One slot computed the beginning, five more begin with it, and the slot that already runs
    joins them. Another slot has nothing to do with it.
    """
    engine = make_engine(slots=8, pages=8 * PAGES_A_SLOT)
    prompts = {slot: [*SHARED, *random_tokens(3 + slot, seed=slot)] for slot in range(6)}
    prompts[7] = random_tokens(90, seed=7)
    state = started(engine, {slot: prompts[slot] for slot in (0, 7)}, 12)
    engine.flush([FlushRow(0, pages_of_slot(0), 0, len(SHARED))])
    shared_pages = list(pages_of_slot(0)[:8])
    rows = [
        PrefillRow(
            slot,
            [*shared_pages, *pages_of_slot(slot)[8:]],
            len(SHARED),
            prompts[slot][len(SHARED) : -1],
        )
        for slot in range(1, 6)
    ]
    engine.prefill(rows)
    assert [prefix.tokens for prefix in engine._prefixes] == [len(SHARED)]
    assert [cache.offset for cache in engine._slot_caches] == [len(SHARED)] * 6 + [0, 0]
    for slot in range(1, 6):
        state.token[slot] = prompts[slot][-1]
        state.position[slot] = len(prompts[slot]) - 1
        state.remaining[slot] = 12
    for slot, (tokens, log_probs) in decoded(engine, state).items():
        np.testing.assert_allclose(
            log_probs, log_probs_of(decoder(), prompts[slot] + tokens, 12), atol=EXACT
        )
    # What went on in the group is found in pages by a slot that is not in it.
    ended = prompts[2]
    engine.flush([FlushRow(2, rows[1].pages, len(SHARED), len(ended) - 1)])
    other = make_engine_from(engine)
    other.prefill([PrefillRow(6, rows[1].pages, len(ended) - 1, [])])
    state = idle(8)
    state.token[6] = ended[-1]
    state.position[6] = len(ended) - 1
    state.remaining[6] = 5
    tokens, log_probs = decoded(other, state)[6]
    np.testing.assert_allclose(log_probs, log_probs_of(decoder(), ended + tokens, 5), atol=EXACT)


def make_engine_from(engine: Engine) -> Engine:
    """Return an engine with the pages of another one and with empty rows."""
    other = make_engine(slots=engine.slots, pages=engine.num_pages)
    other._memory = other._memory._replace(pages=engine._memory.pages)
    return other


def test_widths_are_few_and_hold_what_they_may():
    widths = {bucket(length, 64, 4000) for length in range(1, 4001)}
    assert widths == {64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4000}
    assert all(length <= bucket(length, 64, 4000) for length in range(1, 4001))


def lowered_decode(engine: Engine) -> Any:
    whole = np.zeros(engine._num_rows, np.int32)
    lowered = decode_program.lower(
        engine._graph,
        engine._weights,
        engine._scales,
        engine._memory,
        DecodeCall(
            idle(engine._num_rows),
            Places(whole, whole, whole - 1),
            engine._prefix_lengths(),
            engine._stops,
        ),
        steps=DECODE_STEPS,
        filtered=False,
    )
    return lowered.compile().memory_analysis()


def lowered_prefill(engine: Engine) -> Any:
    whole = np.zeros(4, np.int32)
    tiles = Tiles(np.zeros((4, 16), np.int32), whole, whole, Places(whole, whole, whole - 1))
    lowered = prefill_program.lower(
        engine._graph,
        engine._weights,
        engine._scales,
        engine._memory,
        tiles,
        engine._prefix_lengths(),
    )
    return lowered.compile().memory_analysis()


def test_no_copy_of_the_memory_is_made_by_a_step():
    """The memory goes in and comes out in the same place.

    A step allocates less than a quarter of its size.
    """
    engine = make_engine(slots=8, pages=40 * PAGES_A_SLOT)
    engine._fit_rows(POSITIONS)
    memory_bytes = sum(array.nbytes for array in jax.tree.leaves(engine._memory))
    for analysis in (lowered_decode(engine), lowered_prefill(engine)):
        assert analysis.alias_size_in_bytes >= memory_bytes
        assert analysis.temp_size_in_bytes < 0.25 * memory_bytes, (
            analysis.temp_size_in_bytes,
            memory_bytes,
        )


@pytest.mark.parametrize(
    ("cache_dtype", "smallest", "largest"),
    [(jnp.bfloat16, 1e-5, 0.01), (jnp.float8_e4m3fn, 1e-3, 0.05), (jnp.int8, 1e-6, 0.02)],
)
def test_a_narrow_cache_is_smaller_and_a_little_less_exact(cache_dtype, smallest, largest):
    """Measured: the log-probability of one token differs by 0.0011 and 0.0031."""
    engine = make_engine(cache_dtype=cache_dtype)
    exact = make_engine()
    share = jnp.dtype(cache_dtype).itemsize / 4
    assert sum(array.nbytes for array in engine._memory.pages.keys) == share * sum(
        array.nbytes for array in exact._memory.pages.keys
    )
    tokens, expected = decoded(exact, started(exact, {0: SEQUENCE}, 1))[0]
    narrow_tokens, log_probs = decoded(engine, started(engine, {0: SEQUENCE}, 1))[0]
    difference = np.abs(np.subtract(log_probs, expected)).max()
    assert narrow_tokens == tokens
    assert smallest < difference < largest


def test_in_bfloat16_keys_and_values_are_bfloat16_and_the_token_is_the_same():
    """Measured: its log-probability differs by 0.0036."""
    narrow = nnx.clone(decoder())
    narrow.dtype = narrow.layers.dtype = jnp.bfloat16
    config = EngineConfig(
        max_num_seqs=SLOTS,
        decode_steps_per_call=DECODE_STEPS,
        prefill_tokens=PREFILL_TOKENS,
        page_tokens=PAGE_TOKENS,
    )
    engine = factory.make_engine(narrow, config, positions=POSITIONS, stop_token_ids=[NO_STOP])
    assert {array.dtype for array in engine._memory.pages.keys} == {jnp.dtype(jnp.bfloat16)}
    exact = make_engine()
    output = decoded(engine, started(engine, {0: SEQUENCE}, 1))[0]
    expected = decoded(exact, started(exact, {0: SEQUENCE}, 1))[0]
    assert output[0] == expected[0]
    difference = np.abs(np.subtract(output[1], expected[1])).max()
    assert 0 < difference < 0.02, difference


def test_int8_follows_the_policy_and_is_more_exact_than_fp8():
    """Values are a hundred times as large, and one channel of the keys outweighs all others.

    Each policy has its own scales.
    """
    other = nnx.clone(nnx.state(decoder()))
    other["layers"]["value_kernel"][...] = 100 * other["layers"]["value_kernel"][...]
    other["layers"]["output_kernel"][...] = other["layers"]["output_kernel"][...] / 100
    other["layers"]["key_kernel"][...] = (
        other["layers"]["key_kernel"][...].at[..., 3].multiply(20.0)
    )
    prompts = {slot: random_tokens(60 + slot, seed=slot) for slot in range(SLOTS)}
    log_probs_of_dtype = {}
    for dtype in (jnp.float32, jnp.int8, jnp.float8_e4m3fn):
        engine = make_engine(cache_dtype=dtype)
        engine.set_weights(other)
        state = started(engine, prompts, 1, temperature=np.zeros(SLOTS, np.float32))
        log_probs_of_dtype[dtype] = np.ravel(
            [log_probs for _, log_probs in decoded(engine, state).values()]
        )
    error = {
        dtype: np.abs(log_probs - log_probs_of_dtype[jnp.float32]).mean()
        for dtype, log_probs in log_probs_of_dtype.items()
    }
    assert 1e-6 < error[jnp.int8] < 0.5 * error[jnp.float8_e4m3fn], error


def test_what_int8_cannot_hold_is_clipped_and_what_it_can_is_rounded():
    stored = narrowed(jnp.asarray([-1000.0, -127.4, -0.6, 0.4, 126.6, 127.5, 1e9]), jnp.int8)
    assert stored.tolist() == [-127, -127, -1, 0, 127, 127, 127]


def test_what_a_narrow_cache_cannot_hold_comes_as_close_as_it_can():
    """float8_e4m3fn ends at 448. Keys of published models go beyond it."""
    engine = make_engine(cache_dtype=jnp.float8_e4m3fn)
    weights = nnx.state(decoder())
    loud = nnx.clone(weights)
    loud["layers"]["value_kernel"][...] = 1e4 * loud["layers"]["value_kernel"][...]
    engine.set_weights(loud)
    ((_, log_probs),) = decoded(engine, started(engine, {0: SEQUENCE}, 6)).values()
    largest = max(
        np.abs(np.asarray(layer, np.float32)).max() for layer in engine._memory.rows.values
    )
    assert largest == 448
    assert np.isfinite(log_probs).all()
