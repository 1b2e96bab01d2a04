"""What a run leaves on disk while it goes on: checkpoints of the phase it is in, the newest
policies, in the compute type; and how often it saves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from safetensors import safe_open

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.packing import pack
from mujica_jax.runs import setup as start
from mujica_jax.runs.learning import LearningPlan, train
from mujica_jax.runs.run import Run
from mujica_jax.runs.versions import commit_policy
from mujica_jax.runtime.preemption import Preemption
from tests.helpers.packed_rows import random_conversations
from tests.helpers.paths import HELPERS

Opener = Callable[[Config], Run]


@pytest.fixture(scope="module")
def config() -> Config:
    smoke = load_config(str(HELPERS / "smoke_config.py"))
    model = dataclasses.replace(smoke.model, num_layers=1)
    control = dataclasses.replace(smoke.eval, control=False)
    trainer = dataclasses.replace(smoke.trainer, dtype="bfloat16")
    return dataclasses.replace(smoke, model=model, eval=control, trainer=trainer)


@pytest.fixture
def opened(tmp_path, monkeypatch) -> Iterator[Opener]:
    monkeypatch.setattr(start, "use_compilation_cache", lambda: None)
    entered = []

    def open_run(config: Config) -> Run:
        entered.append(start.open_training(config, tmp_path / "run", Preemption()))
        return entered[-1].__enter__()

    yield open_run
    for context in entered:
        context.__exit__(None, None, None)


def learn_phases(run: Run, *names: str) -> list[list[str]]:
    """Learn the phases one after another, from each other, and commit each one's policy.

    Returns the folders with checkpoints after each.
    """
    rows = pack(
        random_conversations(20), sequence_length=run.config.trainer.sequence_length, seed=0
    )
    state = run.initial_state
    folders = []
    for version, name in enumerate(names):
        state = train(run, name, state, rows, plan=LearningPlan(steps=1, peak=0.1, end_value=0.1))
        commit_policy(run, state, version)
        folders.append(sorted(folder.name for folder in (run.store.root / "learning").iterdir()))
    return folders


def test_checkpoints_leave_when_the_next_policy_is_committed(opened, config):
    assert learn_phases(opened(config), "warm-up", "round 1", "round 2") == [
        ["warm-up"],
        ["round-1"],
        ["round-2"],
    ]


def test_the_warm_up_stays_for_the_control_that_begins_with_it(opened, config):
    with_control = dataclasses.replace(config, eval=dataclasses.replace(config.eval, control=True))
    folders = learn_phases(opened(with_control), "warm-up", "round 1", "round 2")
    assert folders == [["warm-up"], ["round-1", "warm-up"], ["round-2", "warm-up"]]


@pytest.mark.parametrize(("keep", "expected"), [(0, [0, 1, 2]), (1, [2]), (2, [1, 2])])
def test_the_newest_policies_stay(opened, config, keep, expected):
    run = opened(dataclasses.replace(config, keep_policies=keep))
    learn_phases(run, "warm-up", "round 1", "round 2")
    assert run.store.policies() == expected


def test_policies_are_written_in_the_compute_type(opened, config):
    run = opened(config)
    learn_phases(run, "warm-up")
    with safe_open(
        run.store.policy_path(0) / "model" / "model.safetensors", framework="numpy"
    ) as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize(("save_seconds", "expected"), [(1e-6, [1, 2, 3]), (1e6, [3]), (0.0, [3])])
def test_saves_come_as_often_as_the_configuration_says(
    opened, config, monkeypatch, save_seconds, expected
):
    """Without a setting none comes before a quarter of a minute.

    This phase then saves at its end alone.
    """
    saved = []
    save = Checkpoints.save

    def recorded_save(self, state, metadata):
        saved.append(int(state.step))
        return save(self, state, metadata)

    monkeypatch.setattr(Checkpoints, "save", recorded_save)
    monkeypatch.setattr("mujica_jax.runs.learning.STEPS_A_STRETCH", 1)
    run = opened(
        dataclasses.replace(
            config, trainer=dataclasses.replace(config.trainer, save_seconds=save_seconds)
        )
    )
    rows = pack(
        random_conversations(20), sequence_length=run.config.trainer.sequence_length, seed=0
    )
    train(
        run,
        "warm-up",
        run.initial_state,
        rows,
        plan=LearningPlan(steps=3, peak=0.1, end_value=0.1),
    )
    assert saved == expected


def test_saves_that_take_long_come_seldom(opened, config, monkeypatch):
    """Saves take at most a twentieth of the time.

    After one of a minute none is due for twenty minutes.
    """
    saved = []
    # every look at the clock is 100 seconds later: one at each step and at each save
    looks = itertools.count(0, 100)
    save = Checkpoints.save

    def slow(self: Checkpoints, state: object, metadata: dict) -> None:
        save(self, state, metadata)
        saved.append(int(state.step))
        self.finish()
        self.seconds_a_save = 60.0

    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr("mujica_jax.runs.learning.STEPS_A_STRETCH", 1)
    run = opened(config)
    rows = pack(
        random_conversations(20), sequence_length=run.config.trainer.sequence_length, seed=0
    )
    monkeypatch.setattr(
        "mujica_jax.runs.learning.time", SimpleNamespace(monotonic=lambda: next(looks))
    )
    train(
        run,
        "warm-up",
        run.initial_state,
        rows,
        plan=LearningPlan(steps=30, peak=0.1, end_value=0.1),
    )
    assert saved == [1, 14, 27, 30]
