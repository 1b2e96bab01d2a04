"""The trainer under maximum likelihood: steps, schedules, parts of a batch, types, and a resume."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.learning.batches import rows_of_step
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.optimizer import Schedule, decayed, schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import (
    FitResult,
    NotFiniteError,
    StepMetrics,
    Trainer,
    TrainState,
    fit,
    make_train_step,
    steps_of_epochs,
    train_step,
)
from mujica_jax.models.sharding import shard_batch
from tests.helpers.packed_rows import MODEL, TRAINER, random_conversations

ROWS = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
SCHEDULE = schedule(peak=1e-2, end_value=1e-3, total_steps=8, warmup_steps=2)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(MODEL, TRAINER)


def run(
    trainer: Trainer,
    state: TrainState,
    steps: int = 8,
    place: dict | None = None,
    rates: Schedule = SCHEDULE,
    **options,
) -> FitResult:
    """Train on ROWS, from `place` in a checkpoint or else from the state's own step on."""
    batches = trainer.batches(ROWS, seed=3, step=int(state.step))
    if place is not None:
        batches.set_state(place)
    return fit(trainer, state, batches, schedule=rates, steps=steps, **options)


def assert_same(state, expected, tolerance: float = 0.0) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), state, expected
    )


def test_a_step_is_adamw_on_the_gradient_of_the_loss(trainer, decoder):
    batch = ROWS.batch(slice(0, TRAINER.batch_size))
    graph, params = nnx.split(decoder)
    reference = optax.chain(
        optax.clip_by_global_norm(TRAINER.clip_norm),
        optax.adamw(
            5e-3, b1=TRAINER.b1, b2=TRAINER.b2, weight_decay=TRAINER.weight_decay, mask=decayed
        ),
    )

    @jax.jit
    def step(params):
        loss, gradient = jax.value_and_grad(
            lambda params: MLE()(nnx.merge(graph, params), batch)[0]
        )(params)
        updates, _ = reference.update(gradient, reference.init(params), params)
        return optax.apply_updates(params, updates), loss, optax.global_norm(gradient)

    expected, loss, grad_norm = step(params)
    state, metrics = trainer.train_step(trainer.initial_state(decoder), batch, SCHEDULE)
    assert_same(state.params, expected, 1e-6)
    assert int(state.step) == 1
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(grad_norm), rel=1e-5)
    assert float(metrics["learning_rate"]) == pytest.approx(5e-3)
    assert int(metrics["trained_tokens"]) == batch.loss_mask.sum()


def test_a_step_is_a_function_that_runs_without_being_compiled(trainer, decoder):
    """`train_step` is pure: the same state and batch give what the compiled program gives."""
    batch = ROWS.batch(slice(0, TRAINER.batch_size))
    setup = make_train_step(MODEL, TRAINER, MLE(), trainer.mesh)
    with jax.set_mesh(trainer.mesh), jax.disable_jit():
        placed = shard_batch(batch, trainer.mesh)
        plain, plain_metrics = train_step(setup, trainer.initial_state(decoder), placed, SCHEDULE)
    compiled, metrics = trainer.train_step(trainer.initial_state(decoder), batch, SCHEDULE)
    assert_same(plain.params, compiled.params, 1e-6)
    assert float(plain_metrics["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)


def test_training_learns_the_rows(trainer, decoder):
    seen: list[StepMetrics] = []
    run(
        trainer,
        trainer.initial_state(decoder),
        40,
        rates=schedule(peak=3e-2, end_value=0.0, total_steps=40),
        on_step=seen.append,
    )
    assert seen[-1].loss < seen[0].loss / 2


def test_resumed_equals_uninterrupted_bit_for_bit(trainer, decoder, tmp_path):
    whole = []
    after = []
    uninterrupted = run(trainer, trainer.initial_state(decoder), on_step=whole.append)
    half = run(trainer, trainer.initial_state(decoder), 5)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(half.state, {"input": half.input_state})
    state, loop_state = Checkpoints(tmp_path, keep=2).restore_latest(trainer.abstract_state())
    assert half.steps == int(state.step) == 5
    resumed = run(trainer, state, place=loop_state["input"], on_step=after.append)
    assert_same(resumed.state, uninterrupted.state)
    assert after == whole[5:]


def test_stopped_and_continued_equals_uninterrupted(trainer, decoder):
    stops = iter([False, False, False, True])
    first = run(trainer, trainer.initial_state(decoder), should_stop=lambda: next(stops))
    assert (first.steps, first.stopped) == (3, True)
    second = run(trainer, first.state)
    assert (second.steps, second.stopped) == (8, False)
    assert_same(second.state, run(trainer, trainer.initial_state(decoder)).state)


def test_the_order_of_the_loop(trainer, decoder, monkeypatch):
    events = []
    train_step = trainer.train_step

    def recorded(state, batch, schedule):
        events.append("dispatch")
        return train_step(state, batch, schedule)

    monkeypatch.setattr(trainer, "train_step", recorded)
    run(
        trainer,
        trainer.initial_state(decoder),
        3,
        on_step=lambda metrics: events.append(f"read {metrics.step}"),
    )
    assert events == ["dispatch", "dispatch", "read 1", "dispatch", "read 2", "read 3"]


def test_nan_ends_the_run_before_there_is_anything_to_save(trainer, decoder):
    state = run(trainer, trainer.initial_state(decoder), 2).state
    state.params["final_norm"][...] = state.params["final_norm"][...].at[0].set(jnp.nan)
    with pytest.raises(NotFiniteError, match="step 3 has loss nan"):
        run(trainer, state, 3)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_an_infinite_loss_or_gradient_ends_the_run_at_its_step(trainer, decoder, monkeypatch, name):
    train_step = trainer.train_step

    def broken_at_step_2(state, batch, schedule):
        state, metrics = train_step(state, batch, schedule)
        return state, metrics | ({name: jnp.float32(jnp.inf)} if int(state.step) == 2 else {})

    monkeypatch.setattr(trainer, "train_step", broken_at_step_2)
    seen: list[StepMetrics] = []
    with pytest.raises(NotFiniteError, match=r"step 2 has .* inf"):
        run(trainer, trainer.initial_state(decoder), on_step=seen.append)
    assert [metrics.step for metrics in seen] == [1]


def test_one_compilation_serves_all_schedules_phases_and_trainers(decoder):
    for peak, end_value, total_steps in ((1e-3, 0.0, 4), (1.0, 1.0, 100)):
        other_trainer = Trainer(MODEL, TRAINER)
        chosen = schedule(peak=peak, end_value=end_value, total_steps=total_steps)
        result = run(other_trainer, other_trainer.initial_state(decoder), 2, rates=chosen)
        run(other_trainer, other_trainer.next_phase(result.state), 2)
    assert other_trainer._program.train_step._cache_size() == 1


def test_a_next_phase_starts_its_schedule_again_and_keeps_the_moments(trainer, decoder):
    state = run(trainer, trainer.initial_state(decoder), 3).state
    moments = jax.tree.map(np.asarray, state.opt_state)
    state = trainer.next_phase(state)
    assert int(state.step) == 0
    assert_same(state.opt_state, moments)


def test_a_decoder_given_or_taken_has_its_own_memory(trainer, decoder):
    state = trainer.initial_state(decoder)
    taken = trainer.decoder(state)
    run(trainer, state, 1)
    assert_same(nnx.state(taken), nnx.state(decoder))


def test_scores_are_those_of_the_loss_also_in_a_last_short_batch(trainer, decoder):
    assert ROWS.num_rows % TRAINER.batch_size
    expected = jax.jit(lambda batch: token_log_probs(decoder, batch))(ROWS.batch(slice(None)))
    np.testing.assert_allclose(
        trainer.score(trainer.initial_state(decoder), ROWS), expected, atol=1e-5
    )


def test_compute_in_bfloat16_keeps_float32_parameters(trainer, decoder):
    narrow = Trainer(MODEL, dataclasses.replace(TRAINER, dtype="bfloat16"))
    state = narrow.initial_state(decoder)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[1].mu))} == {
        jnp.dtype(jnp.float32)
    }
    difference = np.abs(narrow.score(state, ROWS) - trainer.score(state, ROWS)).max()
    assert 0 < difference < 0.3


def changed(**fields) -> Trainer:
    return Trainer(MODEL, dataclasses.replace(TRAINER, **fields))


def test_parts_of_a_batch_add_up_to_the_whole(trainer, decoder):
    """The parts of both steps hold more and fewer trained tokens.

    A mean over parts would weigh them alike.
    """
    mask = ROWS.loss_mask.copy()
    mask[::2, 4:] = False
    uneven = dataclasses.replace(ROWS, loss_mask=mask)
    seen: list[StepMetrics] = []

    def two_steps(chosen_trainer: Trainer) -> TrainState:
        start = chosen_trainer.initial_state(decoder)
        batches = chosen_trainer.batches(uneven, seed=3)
        return fit(
            chosen_trainer, start, batches, schedule=SCHEDULE, steps=2, on_step=seen.append
        ).state

    whole = two_steps(trainer)
    in_parts = two_steps(changed(accumulation_steps=4))
    assert_same(in_parts.params, whole.params, 1e-6)
    for of_whole, of_parts in zip(seen[:2], seen[2:], strict=True):
        assert of_parts.trained_tokens == of_whole.trained_tokens
        assert of_parts.loss == pytest.approx(of_whole.loss, abs=1e-6)
        assert of_parts.grad_norm == pytest.approx(of_whole.grad_norm, abs=1e-6)


def test_parts_of_a_batch_take_less_memory():
    quickly = {"xla_backend_optimization_level": 0}

    def temporaries(parts: int) -> int:
        step = changed(sequence_length=256, batch_size=16, accumulation_steps=parts).lower_step()
        return step.compile(compiler_options=quickly).memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(1) / 3


def test_parts_that_rows_do_not_divide_into_are_refused():
    with pytest.raises(
        UserError,
        match=r"batch_size 8 cannot be split into trainer.accumulation_steps 3 equal parts",
    ):
        changed(accumulation_steps=3)
    with pytest.raises(
        UserError,
        match=r"accumulation_steps 4 equal parts on data_parallel_size x fsdp = 4 .* multiple of 16",
    ):
        changed(accumulation_steps=4, fsdp=4)


def types_of(tree: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def kept_types(state: TrainState) -> list[set[str]]:
    """Return the types of the parameters, the first and the second moments."""
    moments = state.opt_state[1]
    return [types_of(state.params), types_of(moments.mu), types_of(moments.nu)]


def test_types_of_what_is_kept_between_steps():
    assert kept_types(changed().abstract_state()) == [{"float32"}] * 3
    assert kept_types(changed(parameter_dtype="bfloat16").abstract_state()) == [
        {"bfloat16"},
        {"float32"},
        {"float32"},
    ]
    assert kept_types(changed(first_moment_dtype="bfloat16").abstract_state()) == [
        {"float32"},
        {"bfloat16"},
        {"float32"},
    ]


@pytest.mark.slow
def test_narrow_types_learn_nearly_the_same_and_come_back_from_a_checkpoint(
    trainer, decoder, tmp_path
):
    narrow = changed(parameter_dtype="bfloat16", first_moment_dtype="bfloat16")
    state = run(narrow, narrow.initial_state(decoder)).state
    wide_state = run(trainer, trainer.initial_state(decoder)).state
    assert kept_types(state) == [{"bfloat16"}, {"bfloat16"}, {"float32"}]
    difference = np.abs(narrow.score(state, ROWS) - trainer.score(wide_state, ROWS)).max()
    assert 0 < difference < 0.3
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, {})
    restored, _ = checkpoints.restore_latest(narrow.abstract_state())
    assert_same(restored, state)
    assert kept_types(restored) == kept_types(state)
    with pytest.raises(UserError, match=r"keeps .* in bfloat16, and this run in float32"):
        checkpoints.restore_latest(trainer.abstract_state())


def test_the_z_loss_and_the_parts_reach_the_step():
    assert (
        len(
            {
                changed(**fields).lower_step().as_text()
                for fields in ({}, {"z_loss": 0.01}, {"accumulation_steps": 2})
            }
        )
        == 3
    )


def test_the_run_resumes_over_the_same_rows_or_not_at_all(trainer, decoder):
    first = run(trainer, trainer.initial_state(decoder), 3)
    fewer = pack(random_conversations(20), sequence_length=TRAINER.sequence_length, seed=0)
    with pytest.raises(
        UserError, match=rf"made with {ROWS.num_rows} rows, .* this run has {fewer.num_rows} rows"
    ):
        trainer.batches(fewer, seed=3).set_state(first.input_state)


def test_batches_of_another_step_than_the_states_are_refused(trainer, decoder):
    first = run(trainer, trainer.initial_state(decoder), 3)
    batches = trainer.batches(ROWS, seed=3)
    with pytest.raises(
        AssertionError, match=r"the next batch is that of step 0, and the state is at step 3"
    ):
        fit(trainer, first.state, batches, schedule=SCHEDULE, steps=8)


def test_every_row_is_seen_once_an_epoch_in_an_order_of_its_own():
    order = np.concatenate([rows_of_step(10, 4, seed=1, step=step) for step in range(5)])
    first = order[:10].tolist()
    second = order[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert not np.array_equal(
        order, np.concatenate([rows_of_step(10, 4, seed=2, step=step) for step in range(5)])
    )


def test_fewer_rows_than_a_step_needs_are_seen_several_times():
    assert np.bincount(rows_of_step(3, 8, seed=0, step=5)).min() >= 2


@pytest.mark.parametrize(
    ("num_rows", "epochs", "steps"), [(16, 1, 2), (17, 1, 3), (3, 2, 1), (16, 3, 6)]
)
def test_steps_of_some_epochs(num_rows, epochs, steps):
    assert steps_of_epochs(num_rows, 8, epochs) == steps


def test_no_rows_are_refused(trainer):
    nothing = pack([], sequence_length=TRAINER.sequence_length, seed=0)
    with pytest.raises(UserError, match="0 rows to train on"):
        trainer.batches(nothing, seed=0)


def test_rows_that_devices_cannot_share_are_refused():
    with pytest.raises(
        UserError, match=r"batch_size 8 cannot be split over data_parallel_size x fsdp = 3 devices"
    ):
        Trainer(MODEL, dataclasses.replace(TRAINER, data_parallel_size=3))
