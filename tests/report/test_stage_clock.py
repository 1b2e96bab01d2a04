"""Every second of a run is in one stage."""

import pytest

from mujica_jax.report.stage_clock import StageClock


class Told:
    """A clock, and the time that compiling took, as they are set."""

    def __init__(self) -> None:
        self.now = self.compiled = 0.0
        self.clock = StageClock(compiled=lambda: self.compiled, clock=lambda: self.now)

    def later(self, seconds: float, compiling: float = 0.0) -> None:
        self.now += seconds
        self.compiled += compiling


def test_stages_inside_one_another_share_no_second():
    told = Told()
    told.later(1.0)
    with told.clock.stage("sampling"):
        told.later(2.0)
        with told.clock.stage("saving"):
            told.later(4.0)
        told.later(8.0)
    told.later(16.0)
    assert told.clock.take() == {"other": 17.0, "sampling": 10.0, "saving": 4.0}


def test_compiling_is_a_stage_of_its_own_wherever_it_happens():
    told = Told()
    with told.clock.stage("learning"):
        told.later(10.0, compiling=7.0)
    assert told.clock.seconds("learning") == 3.0
    assert told.clock.take() == {"compiling": 7.0, "learning": 3.0}


def test_what_was_taken_is_not_given_again():
    told = Told()
    with told.clock.stage("learning"):
        told.later(1.0)
        assert told.clock.take() == {"learning": 1.0}
        told.later(2.0)
    assert told.clock.take() == {"learning": 2.0}
    assert told.clock.take() == {}
    assert told.clock.seconds("learning") == 3.0


def test_a_stage_that_fails_is_over():
    told = Told()
    with pytest.raises(KeyboardInterrupt), told.clock.stage("sampling"):
        told.later(1.0)
        raise KeyboardInterrupt
    told.later(2.0)
    assert told.clock.take() == {"sampling": 1.0, "other": 2.0}
