"""A window of steps is traced once, from before its first step to after its last.

Otherwise a message says why not.
"""

import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mujica_jax.config.checks import check_profile
from mujica_jax.config.schema import ProfileConfig
from mujica_jax.errors import UserError
from mujica_jax.learning import profiling
from mujica_jax.learning.profiling import ProfileWindow


class Told:
    """A window whose profiler only records when it begins and ends, and a loop that trains through
    it in stretches of 25.
    """

    def __init__(self, config: ProfileConfig, directory: Path) -> None:
        self.messages: list[str] = []
        self.events: list[str] = []
        self.window = ProfileWindow(config, directory, self.messages.append)

    def start_trace(self, directory: Path) -> None:
        self.events.append(f"start {directory.name}")
        directory.mkdir(parents=True)

    def stop_trace(self) -> None:
        self.events.append("stop")

    def train(
        self, name: str, steps: int, *, done: int = 0, fails_at: int | None = None
    ) -> list[str]:
        """Train a phase. Return the events in order, with the steps of every stretch."""
        self.events = []
        with self.window.of_phase(name, done=done, steps=steps):
            while done < steps:
                until = self.window.until(done, min(steps, done + 25))
                self.window.before(done)
                if fails_at is not None and until >= fails_at:
                    raise KeyboardInterrupt
                self.events.append(f"{done + 1}-{until}")
                done = until
                self.window.after(done, state=None)
        return self.events


@pytest.fixture
def told(tmp_path, monkeypatch) -> Callable[..., Told]:
    def make(steps: tuple[int, int] | None, phase: str | None = None) -> Told:
        traced = Told(ProfileConfig(steps=steps, phase=phase), tmp_path)
        profiler = types.SimpleNamespace(
            start_trace=traced.start_trace, stop_trace=traced.stop_trace
        )
        jax_like = types.SimpleNamespace(
            profiler=profiler, block_until_ready=lambda state: traced.events.append("wait")
        )
        monkeypatch.setattr(profiling, "jax", jax_like)
        return traced

    return make


def test_a_window_is_traced_from_its_first_step_to_its_last(told):
    assert told((20, 25)).train("warm-up", 60) == [
        *("1-19", "start warm-up", "20-25", "wait", "stop", "26-50", "51-60"),
    ]


def test_a_window_longer_than_a_stretch_is_one_trace(told):
    events = told((1, 60)).train("warm-up", 70)
    assert events == ["start warm-up", "1-25", "26-50", "51-60", "wait", "stop", "61-70"]


def test_nothing_is_traced_unless_it_is_asked_for(told):
    traced = told(None)
    assert traced.train("warm-up", 30) == ["1-25", "26-30"]
    traced.window.close()
    assert traced.messages == []


def test_the_first_phase_that_has_the_steps_is_traced_and_no_other(told):
    traced = told((20, 25))
    assert traced.train("pretraining", 22) == ["1-22"]
    assert traced.messages == [
        "pretraining has 22 steps and profile.steps is 20 25: this phase is not traced"
    ]
    assert "start warm-up" in traced.train("warm-up", 30)
    assert traced.train("round 1", 30) == ["1-25", "26-30"]
    traced.window.close()
    assert len(traced.messages) == 2
    assert "the trace is in" in traced.messages[1]


def test_a_phase_may_be_named(told):
    traced = told((2, 3), "round 1")
    assert traced.train("warm-up", 5) == ["1-5"]
    assert traced.train("round 1", 5) == ["1-1", "start round-1", "2-3", "wait", "stop", "4-5"]


def test_a_phase_that_goes_on_beyond_the_beginning_of_the_window_is_not_traced(told):
    traced = told((20, 25))
    assert traced.train("warm-up", 30, done=20) == ["21-30"]
    assert traced.messages == [
        "warm-up continues after step 20 and profile.steps is 20 25: this phase is not traced"
    ]
    assert "start control" in traced.train("control", 30, done=19)


def test_a_window_that_never_came_is_told_of_at_the_end(told):
    traced = told((20, 25), "round 9")
    traced.train("warm-up", 30)
    traced.window.close()
    assert traced.messages == [
        "profile.steps 20 25: nothing was traced, because no phase named round 9 of this run "
        "trained all of these steps"
    ]


def test_an_interrupted_window_is_ended(told):
    traced = told((20, 25))
    with pytest.raises(KeyboardInterrupt):
        traced.train("warm-up", 60, fails_at=25)
    assert traced.events == ["1-19", "start warm-up", "stop"]


def test_jax_writes_a_trace_that_its_viewers_open(tmp_path):
    messages: list[str] = []
    window = ProfileWindow(ProfileConfig(steps=(1, 1)), tmp_path, messages.append)
    with window.of_phase("round 1", done=0, steps=1):
        window.before(0)
        window.after(1, jnp.ones(3) + 1)
    written = {
        path.name.partition(".")[2]
        for path in (tmp_path / "profile" / "round-1").rglob("*.*")
        if path.is_file()
    }
    assert {"xplane.pb", "trace.json.gz"} <= written
    assert messages == [
        f"profile.steps: traced; the trace is in {tmp_path / 'profile' / 'round-1'}"
    ]
    jax.profiler.start_trace(tmp_path / "another")  # the one before is over
    jax.profiler.stop_trace()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ProfileConfig(steps=(25, 20)), r"profile.steps is 25 20: give a first step"),
        (ProfileConfig(steps=(0, 20)), r"profile.steps is 0 20"),
        (
            ProfileConfig(phase="round 1"),
            r"profile.phase is round 1, but profile.steps is missing",
        ),
    ],
)
def test_a_window_that_cannot_be_is_refused(config, words):
    with pytest.raises(UserError, match=words):
        check_profile(config)
