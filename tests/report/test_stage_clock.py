"""Every second of a run is in one stage."""

import pytest

from mujica_jax.report.stage_clock import StageClock


class Told:
    """A clock, and the time that compiling took, as they are set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compiled = 0.0
        self.clock = StageClock(compiled=lambda: self.compiled, clock=lambda: self.now)

    def later(self, seconds: float, compiling: float = 0.0) -> None:
        self.now += seconds
        self.compiled += compiling


def test_stages_inside_one_another_share_no_second():
    stages = Told()
    stages.later(1.0)
    with stages.clock.stage("sampling"):
        stages.later(2.0)
        with stages.clock.stage("saving"):
            stages.later(4.0)
        stages.later(8.0)
    stages.later(16.0)
    assert stages.clock.take() == {"other": 17.0, "sampling": 10.0, "saving": 4.0}


def test_compiling_is_a_stage_of_its_own_wherever_it_happens():
    stages = Told()
    with stages.clock.stage("learning"):
        stages.later(10.0, compiling=7.0)
    assert stages.clock.seconds("learning") == 3.0
    assert stages.clock.take() == {"compiling": 7.0, "learning": 3.0}


def test_what_was_taken_is_not_given_again():
    stages = Told()
    with stages.clock.stage("learning"):
        stages.later(1.0)
        assert stages.clock.take() == {"learning": 1.0}
        stages.later(2.0)
    assert stages.clock.take() == {"learning": 2.0}
    assert stages.clock.take() == {}
    assert stages.clock.seconds("learning") == 3.0


def test_a_stage_that_fails_is_over():
    stages = Told()
    with pytest.raises(KeyboardInterrupt), stages.clock.stage("sampling"):
        stages.later(1.0)
        raise KeyboardInterrupt
    stages.later(2.0)
    assert stages.clock.take() == {"sampling": 1.0, "other": 2.0}
