"""Prefill and decode against the decoder's full forward pass and against the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_rows import conversation
from tiny_engine import (
    DECODE_STEPS,
    POSITIONS,
    PREFILL_TOKENS,
    SLOTS,
    decoder,
    log_probs_of,
    make_engine,
    next_token_logits,
    random_tokens,
)

from mujica_jax.inference.engine import Engine, PrefillRow, SlotState
from mujica_jax.inference.sampling import sample, uniforms
from mujica_jax.learning.losses import token_log_probs
from mujica_jax.trajectories.packing import pack

SEQUENCE = random_tokens(40)
EXACT = 1e-5  # float32, the same sums in another order


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Shared: every test writes the slots it reads."""
    return make_engine()


@pytest.fixture(scope="module")
def one_step() -> Engine:
    return make_engine(decode_steps=1)


def idle() -> SlotState:
    return SlotState(
        token=np.zeros(SLOTS, np.int32),
        position=np.zeros(SLOTS, np.int32),
        remaining=np.zeros(SLOTS, np.int32),
        temperature=np.ones(SLOTS, np.float32),
        seed=np.zeros(SLOTS, np.uint32),
    )


def started(engine: Engine, prompts: dict[int, list[int]], new_tokens: int, **changes) -> SlotState:
    """The state after prefilling a prompt a slot."""
    state = idle()._replace(**changes)
    for slot, prompt in prompts.items():
        if len(prompt) > 1:
            engine.prefill([PrefillRow(slot, 0, prompt[:-1])])
        state.token[slot], state.position[slot] = prompt[-1], len(prompt) - 1
        state.remaining[slot] = new_tokens
    return state


def decoded(engine: Engine, state: SlotState) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each slot until nothing runs."""
    found = {int(slot): ([], []) for slot in np.flatnonzero(state.remaining)}
    while state.remaining.any():
        state, tokens, logprobs, valid = engine.decode(state)
        for slot, (of_slot, log_probs) in found.items():
            of_slot += tokens[valid[:, slot], slot].tolist()
            log_probs += logprobs[valid[:, slot], slot].tolist()
    return found


@jax.jit
def drawn_from(logits, seeds, positions):
    """Tokens and log-probabilities at temperature 1."""
    return sample(logits, jnp.ones(len(logits)), uniforms(seeds, positions))


@pytest.mark.parametrize("seed", [0, 1])
def test_after_a_prefill_of_any_length_the_next_token_is_that_of_the_full_forward(engine, seed):
    positions = np.arange(len(SEQUENCE), dtype=np.int32)
    seeds = np.full(len(SEQUENCE), seed, np.uint32)
    expected = drawn_from(next_token_logits(decoder(), SEQUENCE), seeds, positions)
    found = []
    for first in range(1, len(SEQUENCE) + 1, SLOTS):
        prompts = {slot: SEQUENCE[: first + slot] for slot in range(SLOTS)}
        state = started(engine, prompts, 1, seed=np.full(SLOTS, seed, np.uint32))
        found += decoded(engine, state).values()
    tokens, log_probs = zip(*found, strict=True)
    assert [token for (token,) in tokens] == expected[0].tolist()
    np.testing.assert_allclose(np.ravel(log_probs), expected[1], atol=EXACT)


def test_decoding_a_given_sequence_token_by_token_equals_the_full_forward(one_step):
    """Every slot decodes a sequence of its own from an empty slot; what is drawn is thrown away."""
    sequences = np.asarray([random_tokens(40, seed) for seed in range(SLOTS)], np.int32)
    logits = np.asarray([next_token_logits(decoder(), sequence) for sequence in sequences.tolist()])
    for position in range(sequences.shape[1]):
        state = idle()._replace(
            token=sequences[:, position],
            position=np.full(SLOTS, position, np.int32),
            remaining=np.ones(SLOTS, np.int32),
            seed=np.arange(SLOTS, dtype=np.uint32),
        )
        _, tokens, logprobs, _ = one_step.decode(state)
        expected = drawn_from(logits[:, position], state.seed, state.position)
        np.testing.assert_array_equal(tokens[0], expected[0])
        np.testing.assert_allclose(logprobs[0], expected[1], atol=EXACT)


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 100, 120, POSITIONS - 20])
def test_log_probabilities_of_a_completion_are_those_of_the_full_forward(engine, length):
    prompt = random_tokens(length, seed=length)
    ((tokens, log_probs),) = decoded(engine, started(engine, {2: prompt}, 20)).values()
    assert len(tokens) == 20
    np.testing.assert_allclose(log_probs, log_probs_of(decoder(), prompt + tokens, 20), atol=EXACT)


def test_log_probabilities_of_a_completion_are_those_of_the_trainer(engine):
    prompts = {slot: random_tokens(5 + 6 * slot, seed=slot) for slot in range(SLOTS)}
    found = decoded(engine, started(engine, prompts, 12))
    rows = pack(
        [conversation(tuple(prompts[slot]), tuple(found[slot][0])) for slot in range(SLOTS)], row_tokens=80, seed=0
    )
    assert rows.num_rows < SLOTS, "conversations share rows"
    scores = np.asarray(nnx.jit(token_log_probs)(decoder(), rows.batch(slice(None))))
    for slot, (row, start) in enumerate(rows.placements):
        model_turn = slice(start + len(prompts[slot]), start + len(prompts[slot]) + 12)
        np.testing.assert_allclose(found[slot][1], scores[row, model_turn], atol=1e-4)


def test_a_prompt_prefilled_in_parts_equals_one_prefilled_at_once(engine):
    state = started(engine, {0: SEQUENCE}, 8, seed=np.full(SLOTS, 5, np.uint32))
    for start, stop in ((0, 7), (7, 38), (38, 39)):
        engine.prefill([PrefillRow(1, start, SEQUENCE[start:stop])])
    state.token[1], state.position[1], state.remaining[1] = SEQUENCE[-1], 39, 8
    found = decoded(engine, state)
    assert found[1][0] == found[0][0]
    np.testing.assert_allclose(found[1][1], found[0][1], atol=EXACT)


def test_rows_of_one_prefill_call_do_not_see_each_other(engine):
    prompts = [random_tokens(length, seed=length) for length in (9, 20, 33)]
    rows = [PrefillRow(slot, 0, np.asarray(prompt[:-1], np.int32)) for slot, prompt in enumerate(prompts)]
    engine.prefill(rows)
    state = idle()
    for slot, prompt in enumerate(prompts):
        state.token[slot], state.position[slot], state.remaining[slot] = prompt[-1], len(prompt) - 1, 6
    for slot, (tokens, log_probs) in decoded(engine, state).items():
        np.testing.assert_allclose(log_probs, log_probs_of(decoder(), prompts[slot] + tokens, 6), atol=EXACT)


def test_a_slot_that_is_neither_prefilled_nor_running_keeps_its_cache_bit_for_bit(engine):
    engine.prefill([PrefillRow(3, 0, SEQUENCE)])
    before = jax.tree.map(lambda layer: np.array(layer[3]), engine._cache)
    decoded(engine, started(engine, {0: SEQUENCE[:9], 1: SEQUENCE[:30]}, 8))
    jax.tree.map(lambda layer, held: np.testing.assert_array_equal(layer[3], held), engine._cache, before)


def test_a_stop_token_ends_a_slot_and_is_its_last_token(engine):
    (tokens, _) = decoded(engine, started(engine, {0: SEQUENCE}, 12, temperature=np.zeros(SLOTS, np.float32)))[0]
    place = next(n for n, token in enumerate(tokens) if token not in tokens[:n] and n >= 1)
    stopping = make_engine(stop=tokens[place])
    state = started(stopping, {0: SEQUENCE, 1: SEQUENCE}, 12, temperature=np.zeros(SLOTS, np.float32))
    found = decoded(stopping, state)
    assert found[0][0] == found[1][0] == tokens[: place + 1]


@pytest.mark.parametrize("new_tokens", [1, DECODE_STEPS, DECODE_STEPS + 1])
def test_a_slot_generates_no_more_than_it_may(engine, new_tokens):
    found = decoded(engine, started(engine, {0: SEQUENCE, 3: SEQUENCE[:3]}, new_tokens))
    assert [len(tokens) for tokens, _ in found.values()] == [new_tokens, new_tokens]


def test_a_slot_may_be_filled_to_its_last_position(engine):
    prompt = random_tokens(POSITIONS - 3, seed=1)
    ((tokens, log_probs),) = decoded(engine, started(engine, {1: prompt}, 3)).values()
    np.testing.assert_allclose(log_probs, log_probs_of(decoder(), prompt + tokens, 3), atol=EXACT)


def test_a_cleared_slot_forgets_values_that_are_not_finite():
    engine = make_engine()
    good = nnx.state(decoder())
    expected = decoded(engine, started(engine, {0: SEQUENCE[:5]}, 4))[0]
    engine.set_weights(jax.tree.map(lambda array: array * np.nan, good))
    assert np.isnan(decoded(engine, started(engine, {0: SEQUENCE}, 4))[0][1]).all()
    engine.set_weights(good)
    engine.clear(0)
    found = decoded(engine, started(engine, {0: SEQUENCE[:5]}, 4))[0]
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], atol=EXACT)


def test_prefill_calls_have_few_shapes_and_hold_what_they_may(engine):
    shapes = {engine.prefill_shape(length) for length in range(1, POSITIONS + 1)}
    assert shapes == {(4, 32), (2, 64), (1, 128), (1, POSITIONS)}
    for length in range(1, POSITIONS + 1):
        rows, padded = engine.prefill_shape(length)
        assert length <= padded and (rows == 1 or rows * padded <= PREFILL_TOKENS)


def test_more_rows_than_a_call_holds_are_refused(engine):
    with pytest.raises(AssertionError, match=r"3 rows for a prefill call of 2"):
        engine.prefill([PrefillRow(slot, 0, SEQUENCE) for slot in range(3)])
