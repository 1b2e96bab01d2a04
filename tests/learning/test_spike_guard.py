"""Updates that stand out are skipped, counted and bounded.

The others are made as without a guard.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.spike_guard import Spikes, TooManySpikesError, detect_spike, no_spikes
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from tests.helpers.packed_rows import MODEL, TRAINER, random_conversations

GUARDED = dataclasses.replace(
    TRAINER, spike_deviations=6.0, spike_window_steps=4, max_skips_in_a_row=2
)
ROWS = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
SCHEDULE = schedule(peak=1e-2, end_value=1e-3, total_steps=12)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(MODEL, GUARDED)


def after(losses, norms=None, *, spikes: Spikes | None = None) -> tuple[list[bool], Spikes]:
    """Return which updates are skipped, and the running statistics at the end."""
    spikes = no_spikes() if spikes is None else spikes
    norms = [1.0] * len(losses) if norms is None else norms
    skips = []
    for loss, norm in zip(losses, norms, strict=True):
        skip, spikes = detect_spike(
            spikes, jnp.float32(loss), jnp.float32(norm), deviations=6.0, window=4
        )
        skips.append(bool(skip))
    return skips, spikes


def assert_same(state, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_mean_and_variance_are_those_of_the_updates_so_far():
    _, spikes = after([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(spikes.mean, [2.5, 1.0], atol=1e-6)
    np.testing.assert_allclose(spikes.variance, [1.25, 0.0], atol=1e-6)


def test_older_updates_fade():
    """The fifth update of 2.5 beside a window of four: mean 2.5, variance 3/4 * (1.25 + 0)."""
    _, spikes = after([1.0, 2.0, 3.0, 4.0, 2.5])
    np.testing.assert_allclose([spikes.mean[0], spikes.variance[0]], [2.5, 0.9375], atol=1e-6)


def test_six_deviations_above_the_mean_are_a_spike():
    """2.5 + 6 * sqrt(1.25) = 9.208"""
    assert after([1.0, 2.0, 3.0, 4.0, 9.20])[0] == [False] * 5
    assert after([1.0, 2.0, 3.0, 4.0, 9.21])[0] == [False] * 4 + [True]


def test_a_gradient_norm_is_judged_as_the_loss_is():
    assert after([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 9.21])[0] == [False] * 4 + [True]


def test_nothing_is_judged_before_the_window_is_full():
    assert after([1.0, 1.0, 1.0, 1e9])[0] == [False] * 4


def test_a_loss_that_hardly_moves_may_move_by_six_hundredths():
    assert after([1.0] * 4 + [1.059])[0][-1] is False
    assert after([1.0] * 4 + [1.061])[0][-1] is True


def test_a_skip_teaches_nothing_and_is_counted():
    _, before = after([1.0, 2.0, 3.0, 4.0])
    skips, spikes = after([50.0, 50.0], spikes=before)
    assert skips == [True, True]
    assert_same(
        (spikes.updates, spikes.mean, spikes.variance),
        (before.updates, before.mean, before.variance),
    )
    assert (int(spikes.skipped), int(spikes.in_a_row)) == (2, 2)
    _, spikes = after([2.0], spikes=spikes)
    assert int(spikes.skipped) == 2
    assert int(spikes.in_a_row) == 0
    assert int(spikes.updates) == 5


def few_steps(trainer: Trainer, decoder, steps: int = 6) -> tuple[TrainState, list[StepMetrics]]:
    seen = []
    state = trainer.initial_state(decoder)
    batches = trainer.batches(ROWS, seed=1)
    result = fit(trainer, state, batches, schedule=SCHEDULE, steps=steps, on_step=seen.append)
    return result.state, seen


@pytest.mark.slow
def test_without_a_spike_nothing_changes(trainer, decoder):
    """The numbers equal those of a trainer without a guard bit for bit.

    They are computed operation by operation, because XLA rounds two programs in two ways.
    """
    with jax.disable_jit():
        guarded_state, seen = few_steps(trainer, decoder, steps=2)
        unguarded_state, unguarded = few_steps(Trainer(MODEL, TRAINER), decoder, steps=2)
    assert seen == unguarded
    assert int(guarded_state.spikes.updates) == 2
    assert_same(
        (guarded_state.params, guarded_state.opt_state),
        (unguarded_state.params, unguarded_state.opt_state),
    )


def test_the_compiled_step_differs_by_rounding_alone(trainer, decoder):
    _, seen = few_steps(trainer, decoder)
    _, unguarded = few_steps(Trainer(MODEL, TRAINER), decoder)
    for name in ("loss", "grad_norm"):
        guarded_values = [getattr(metrics, name) for metrics in seen]
        unguarded_values = [getattr(metrics, name) for metrics in unguarded]
        np.testing.assert_allclose(guarded_values, unguarded_values, rtol=1e-5)


def spiking(trainer: Trainer, after_step: int):
    """Return a training step with the trainer's own gradients whose guard takes every update after
    `after_step` for a spike.
    """
    step = trainer.train_step

    def told(state, batch, schedule):
        if int(state.step) >= after_step:
            state = state._replace(
                spikes=state.spikes._replace(mean=jnp.full(2, 1e-3), variance=jnp.zeros(2))
            )
        return step(state, batch, schedule)

    return told


def test_a_spike_leaves_the_state_as_it_was(trainer, decoder, monkeypatch):
    batches = trainer.batches(ROWS, seed=1)
    state = fit(trainer, trainer.initial_state(decoder), batches, schedule=SCHEDULE, steps=5).state
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    monkeypatch.setattr(trainer, "train_step", spiking(trainer, after_step=5))
    seen = []
    result = fit(trainer, state, batches, schedule=SCHEDULE, steps=7, on_step=seen.append)
    assert_same((result.state.params, result.state.opt_state), before)
    assert [(metrics.step, metrics.skipped) for metrics in seen] == [(6, 1), (7, 2)]
    assert int(result.state.step) == 7


def test_more_skips_in_a_row_than_allowed_end_the_run(trainer, decoder, monkeypatch):
    monkeypatch.setattr(trainer, "train_step", spiking(trainer, after_step=5))
    sentence = (
        r"3 updates in a row were skipped as spikes, the last at step 8 with loss .* "
        r"but trainer.max_skips_in_a_row is 2: lower"
    )
    batches = trainer.batches(ROWS, seed=1)
    with pytest.raises(TooManySpikesError, match=sentence):
        fit(trainer, trainer.initial_state(decoder), batches, schedule=SCHEDULE, steps=12)


def test_what_is_usual_is_restored_with_the_state_and_forgotten_with_the_phase(
    trainer, decoder, tmp_path
):
    batches = trainer.batches(ROWS, seed=1)
    state = fit(trainer, trainer.initial_state(decoder), batches, schedule=SCHEDULE, steps=6).state
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, {})
    restored, _ = Checkpoints(tmp_path, keep=1).restore_latest(trainer.abstract_state())
    assert_same(restored.spikes, state.spikes)
    following = trainer.next_phase(restored)
    assert_same(following.spikes, no_spikes())
    batches = trainer.batches(ROWS, seed=1)
    result = fit(trainer, following, batches, schedule=SCHEDULE, steps=2)
    assert int(result.state.spikes.updates) == 2
