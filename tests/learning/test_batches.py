"""The order of batches: a function of the seed, resumable, and the same for any number of
processes.
"""

import itertools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.learning.batches import Batches, rows_of_step
from mujica_jax.learning.packing import PackedRows, pack
from tests.helpers.packed_rows import random_conversations
from tests.helpers.paths import ROOT

ROWS = pack(random_conversations(36), sequence_length=32, seed=0)
ROWS_PER_STEP = 8


def batches(rows: PackedRows = ROWS, *, seed: int = 3, **options) -> Batches:
    return Batches(rows, ROWS_PER_STEP, seed=seed, **options)


def drawn(source: Batches, steps: int) -> list[list]:
    """Return the tokens of the next batches."""
    return [next(source).tokens.tolist() for _ in range(steps)]


def test_a_step_has_the_rows_of_its_number():
    source = batches()
    for step in range(9):
        chosen = rows_of_step(ROWS.num_rows, ROWS_PER_STEP, seed=3, step=step)
        jax.tree.map(np.testing.assert_array_equal, next(source), ROWS.batch(chosen))


def test_the_order_of_rows_is_the_one_it_has_always_been():
    """Every published number was made with this order."""
    assert rows_of_step(22, 8, seed=3, step=0).tolist() == [9, 17, 12, 18, 0, 15, 3, 20]
    assert rows_of_step(22, 8, seed=3, step=2).tolist() == [16, 14, 4, 7, 5, 19, 13, 10]


def test_twenty_steps_are_seven_and_thirteen():
    whole = drawn(batches(), 20)
    first = batches()
    begun = drawn(first, 7)
    state = json.loads(json.dumps(first.get_state()))
    drawn(first, 2)  # what a killed run drew after its last save
    second = batches()
    second.set_state(state)
    assert begun + drawn(second, 13) == whole


def test_any_step_is_reached_without_those_before():
    source = batches()
    source.seek(10**12)
    chosen = rows_of_step(ROWS.num_rows, ROWS_PER_STEP, seed=3, step=10**12)
    assert drawn(source, 1) == [ROWS.tokens[chosen].tolist()]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_batch_of_a_step_does_not_depend_on_the_number_of_processes(processes):
    parts = [drawn(batches(own=own), 5) for own in np.split(np.arange(ROWS_PER_STEP), processes)]
    assert {len(batch) for part in parts for batch in part} == {ROWS_PER_STEP // processes}
    together = [list(itertools.chain(*of_step)) for of_step in zip(*parts, strict=True)]
    assert together == drawn(batches(), 5)


def test_another_number_of_processes_continues():
    whole = batches()
    drawn(whole, 7)
    parts = [batches(own=own) for own in np.split(np.arange(ROWS_PER_STEP), 2)]
    for part in parts:
        part.set_state(whole.get_state())
    assert [
        first + second for first, second in zip(*(drawn(part, 3) for part in parts), strict=True)
    ] == drawn(whole, 3)


def test_packing_knows_the_seed_and_no_process():
    """Each process packs all conversations into the same rows, whatever else it has drawn."""
    np.random.default_rng(5).random(3)
    repacked = pack(random_conversations(36), sequence_length=32, seed=0)
    np.testing.assert_array_equal(repacked.tokens, ROWS.tokens)
    np.testing.assert_array_equal(repacked.placements, ROWS.placements)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed 3, but this run has .* seed 4"),
        (
            {"rows": pack(random_conversations(20), sequence_length=32, seed=0)},
            r"22 rows, .* has \d\d rows",
        ),
    ],
)
def test_a_place_in_another_order_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        batches(**changes).set_state(batches().get_state())


def test_no_rows_are_refused():
    with pytest.raises(UserError, match="0 rows to train on"):
        batches(pack([], sequence_length=32, seed=0))


def test_a_program_starts_without_grain():
    program = (
        "import sys\n"
        "import mujica_jax.methods.mygo\n"
        "print([name for name in ('grain', 'orbax') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"
