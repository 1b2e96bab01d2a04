"""The split of a file into what is learnt and what is held out."""

import pytest

from mujica_jax.config.methods import SftConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.from_file import split
from mujica_jax.records import Message


def config(validation_percent: int) -> SftConfig:
    return SftConfig(
        data=("a.jsonl",),
        learning_rate=1.0,
        end_learning_rate=0.0,
        epochs=1,
        validation_percent=validation_percent,
    )


TEXTS = [(Message(role="user", content=str(number)),) for number in range(400)]
RECORDS = list(range(400))


def test_about_the_wanted_share_is_held_out_and_nothing_is_lost():
    sides = split(RECORDS, TEXTS, config(25))
    assert sorted(sides.learnt + sides.held_out) == RECORDS
    # The standard deviation of the number is below 9.
    assert 70 < len(sides.held_out) < 130


def test_further_records_do_not_move_the_others():
    first = split(RECORDS[:200], TEXTS[:200], config(25))
    assert split(RECORDS, TEXTS, config(25)).held_out[: len(first.held_out)] == first.held_out


def test_equal_records_are_on_the_same_side():
    sides = split([*RECORDS, *RECORDS], [*TEXTS, *TEXTS], config(25))
    assert set(sides.learnt).isdisjoint(sides.held_out)


def test_without_a_share_everything_is_learnt():
    assert split(RECORDS, TEXTS, config(0)).learnt == RECORDS


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(
        UserError, match="validation_percent 1 holds out 0 of 1 records and leaves 1"
    ):
        split(RECORDS[:1], TEXTS[:1], config(1))
