"""Rows and prefixes of the engine for CPU and GPU when they change hands."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from mujica_jax.inference.engine import contiguous
from mujica_jax.inference.engine.base import Engine, EngineOptions, FlushRow, PrefillRow, SlotState
from tests.helpers.tiny_engine import (
    MODEL,
    NO_STOP,
    PAGE_TOKENS,
    PAGES_A_SLOT,
    decoded,
    decoder,
    log_probs_of,
    make_engine,
    pages_of_slot,
    random_tokens,
    without_kernels,
)

EXACT = 1e-5  # float32, the same sums in another order
ONE_LAYER = dataclasses.replace(MODEL, num_layers=1)
BEGINNING_PAGES = 8  # as long as the shortest prefix


@pytest.fixture(params=["kernels", "xla"], autouse=True)
def _reader_of_rows(request, monkeypatch):
    if request.param == "xla":
        without_kernels(monkeypatch)


def decoded_after(
    engine: Engine, prompts: dict[int, list[int]], new_tokens: int
) -> dict[int, tuple[list[int], list[float]]]:
    """Decode slots whose prompts are in memory. Return their tokens and log-probabilities."""
    state = SlotState.idle(engine.slots)
    for slot, prompt in prompts.items():
        state.token[slot] = prompt[-1]
        state.position[slot] = len(prompt) - 1
        state.remaining[slot] = new_tokens
    return decoded(engine, state)


def pages_after(beginning: list[int], slot: int) -> list[int]:
    return [*beginning, *pages_of_slot(slot)[len(beginning) :]]


def test_a_conversation_that_comes_back_keeps_its_row_while_a_new_group_takes_the_place_of_its_own():
    """Its row continues in the prefix of its beginning, which no other row reads any more.

    Others form a new prefix in the same call.
    """
    engine = make_engine(decoder(ONE_LAYER), slots=12, pages=12 * PAGES_A_SLOT)
    old = random_tokens(BEGINNING_PAGES * PAGE_TOKENS, seed=1)
    new = random_tokens(BEGINNING_PAGES * PAGE_TOKENS, seed=2)
    for slot, beginning in ((10, old), (11, new)):
        engine.prefill([PrefillRow(slot, pages_of_slot(slot), 0, beginning)])
        engine.flush([FlushRow(slot, pages_of_slot(slot), 0, len(beginning))])
        engine.free_slot(slot)
    old_pages = list(pages_of_slot(10)[:BEGINNING_PAGES])
    new_pages = list(pages_of_slot(11)[:BEGINNING_PAGES])

    prompts = {slot: [*old, *random_tokens(5, seed=slot)] for slot in range(5)}
    engine.prefill(
        [
            PrefillRow(slot, pages_after(old_pages, slot), 64, prompts[slot][64:-1])
            for slot in prompts
        ]
    )
    assert engine._slot_caches[0].prefix == 0
    assert engine._slot_caches[0].offset == 64
    first = decoded_after(engine, prompts, 4)
    returning_tokens = [*prompts[0], *first[0][0]]
    for slot in prompts:
        engine.flush([FlushRow(slot, pages_after(old_pages, slot), 64, len(prompts[slot]) + 3)])
        engine.free_slot(slot)

    prompts = {slot: [*new, *random_tokens(5, seed=slot)] for slot in range(5, 9)}
    returning = PrefillRow(0, pages_after(old_pages, 0), len(returning_tokens) - 1, [])
    others = [
        PrefillRow(slot, pages_after(new_pages, slot), 64, prompts[slot][64:-1]) for slot in prompts
    ]
    engine.prefill([returning, *others])
    prompts[0] = returning_tokens
    for slot, (tokens, log_probs) in decoded_after(engine, prompts, 6).items():
        expected = log_probs_of(decoder(ONE_LAYER), [*prompts[slot], *tokens], 6)
        np.testing.assert_allclose(log_probs, expected, atol=EXACT, err_msg=f"slot {slot}")


def test_a_conversation_that_comes_back_keeps_its_row_while_rows_become_narrower():
    engine = make_engine(decoder(ONE_LAYER), slots=12, pages=12 * PAGES_A_SLOT)
    beginning = random_tokens(BEGINNING_PAGES * PAGE_TOKENS, seed=2)
    long = random_tokens(170, seed=3)
    for slot, sequence in ((10, long), (11, beginning)):
        engine.prefill([PrefillRow(slot, pages_of_slot(slot), 0, sequence)])
        engine.flush([FlushRow(slot, pages_of_slot(slot), 0, len(sequence))])
        engine.free_slot(slot)
    pages = list(pages_of_slot(11)[:BEGINNING_PAGES])
    prompts = {slot: [*beginning, *random_tokens(5, seed=slot)] for slot in range(5)}
    others = [
        PrefillRow(slot, pages_after(pages, slot), 64, prompts[slot][64:-1]) for slot in prompts
    ]
    engine.prefill([*others, PrefillRow(10, pages_of_slot(10), len(long), [])])
    prompts[10] = [*long, 7]
    for slot, (tokens, log_probs) in decoded_after(engine, prompts, 6).items():
        expected = log_probs_of(decoder(ONE_LAYER), [*prompts[slot], *tokens], 6)
        np.testing.assert_allclose(log_probs, expected, atol=EXACT, err_msg=f"slot {slot}")


def kept_beginning(engine: contiguous.ContiguousEngine, slot: int) -> tuple[list[int], list[int]]:
    """Return the tokens that a request of this slot left in pages, and the pages."""
    beginning = random_tokens(BEGINNING_PAGES * PAGE_TOKENS, seed=1)
    engine.prefill([PrefillRow(slot, pages_of_slot(slot), 0, beginning)])
    engine.flush([FlushRow(slot, pages_of_slot(slot), 0, len(beginning))])
    engine.free_slot(slot)
    return beginning, list(pages_of_slot(slot)[:BEGINNING_PAGES])


def test_a_prefix_needs_more_requests_than_one_turn_may_ask_at_once():
    """It needs an eighth of the slots.

    Otherwise the equal searches of one turn would compile every program once more.
    """
    engine = make_engine(decoder(ONE_LAYER), slots=40, pages=8 * PAGES_A_SLOT)
    _, pages = kept_beginning(engine, 7)
    rows = [
        PrefillRow(slot, pages_after(pages, slot), 64, random_tokens(4, seed=slot))
        for slot in range(5)
    ]
    engine.prefill(rows[:4])
    assert [engine._slot_caches[slot].prefix for slot in range(4)] == [-1] * 4
    engine.prefill(rows[4:])
    assert [engine._slot_caches[slot].prefix for slot in range(5)] == [0] * 5


@pytest.mark.parametrize(("smallest", "widths"), [(128, [128, 192]), (129, [192])])
def test_a_second_width_must_save_a_third_of_the_largest(
    smallest: int, widths: list[int], monkeypatch
):
    without_kernels(monkeypatch)
    with mock.patch.object(contiguous, "MIN_WIDTH_TOKENS", smallest):
        options = EngineOptions(
            slots=2, positions=192, page_tokens=PAGE_TOKENS, num_pages=48, prefill_tokens=128, decode_steps=4,
            stop_token_ids=[NO_STOP],
        )  # fmt: skip
        engine = contiguous.ContiguousEngine(decoder(ONE_LAYER), options)
    row_widths = [engine._memory.rows.shape[1]]
    engine.prefill([PrefillRow(0, pages_of_slot(0), 0, random_tokens(150, seed=1))])
    row_widths.append(engine._memory.rows.shape[1])
    assert list(dict.fromkeys(row_widths)) == widths


def test_a_prompt_that_begins_anew_takes_no_part_in_the_prefix_of_what_its_slot_held_before():
    """Nothing of the prompt is in memory, so its slot loads nothing.

    The slot still holds the beginning from which others make a prefix in the same call.
    """
    engine = make_engine(decoder(ONE_LAYER), slots=6, pages=6 * PAGES_A_SLOT)
    beginning, pages = kept_beginning(engine, 0)
    prompts = {slot: [*beginning, *random_tokens(5, seed=slot)] for slot in range(1, 5)}
    others = [
        PrefillRow(slot, pages_after(pages, slot), 64, prompts[slot][64:-1]) for slot in prompts
    ]
    prompts[0] = random_tokens(3, seed=9)
    engine.prefill([PrefillRow(0, pages_of_slot(5), 0, prompts[0][:-1]), *others])
    assert [engine._slot_caches[slot].offset for slot in range(5)] == [0, 64, 64, 64, 64]
    for slot, (tokens, log_probs) in decoded_after(engine, prompts, 6).items():
        expected = log_probs_of(decoder(ONE_LAYER), [*prompts[slot], *tokens], 6)
        np.testing.assert_allclose(log_probs, expected, atol=EXACT, err_msg=f"slot {slot}")
