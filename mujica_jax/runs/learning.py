"""Learn: train one phase of a run on packed rows.

Training starts from the state of the phase before, or continues from the phase's own last
checkpoint.
"""

import contextlib
import dataclasses
import functools
import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.errors import StoreError
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.optimizer import Schedule, schedule
from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.throughput import Throughput
from mujica_jax.learning.trainer import FitResult, StepMetrics, Trainer, TrainState, fit
from mujica_jax.records import Conversation
from mujica_jax.report.progress import Stage
from mujica_jax.runs.phases import LEARNING, GetState, PhaseState, learning_folder, phase_file
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed

if TYPE_CHECKING:
    from mujica_jax.learning.checkpoints import Checkpoints

# The least time between two checkpoints, in seconds. Saving a tiny model takes about 60 ms.
SAVE_EVERY_SECONDS = 15.0
# The share of the training time that saving may take, if `trainer.save_seconds` does not set the
# time between two checkpoints.
SAVING_SHARE = 0.05
# How many steps are trained between two checks whether a checkpoint is due.
STEPS_A_STRETCH = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningPlan:
    """The plan of a phase: its number of updates, its learning rates and its loss.

    Attributes:
        steps: Number of updates.
        peak: The highest learning rate of the schedule (`optimizer.schedule`).
        end_value: The learning rate at the end of the schedule.
        warmup_steps: Number of steps over which the learning rate rises to `peak`.
        stretch: The part of the cosine that this phase covers, as a start and an end between 0 and
            1. Several phases may share one cosine.
        loss: A loss of `learning.losses`. The rows must have its columns. None means maximum
            likelihood.
        trainer: The trainer's configuration with the batch size and sequence length of this phase.
            None means the run's own configuration.
    """

    steps: int
    peak: float
    end_value: float
    warmup_steps: int = 0
    stretch: tuple[float, float] = (0.0, 1.0)
    loss: Loss | None = None
    trainer: TrainerConfig | None = None

    def schedule(self) -> Schedule:
        """Return the learning rate of every step.

        Raises UserError if the plan's settings contradict each other.
        """
        return schedule(
            peak=self.peak,
            end_value=self.end_value,
            total_steps=self.steps,
            warmup_steps=self.warmup_steps,
            stretch=self.stretch,
        )


def train(
    run: Run, name: str, start: GetState, rows: PackedRows, *, plan: LearningPlan
) -> PhaseState:
    """Train a phase on these rows, and return the state after it.

    Training starts from the state that `start()` returns, and reuses its buffers. If the phase has
    a checkpoint, training continues from there. If the run is preempted, the current step is saved.

    If an earlier start already trained and evaluated this phase, nothing happens here. The phase's
    checkpoint is read when the returned state is used. If that checkpoint is damaged, the phase is
    trained again.
    """
    file = phase_file(name)
    if distributed.broadcast(f"{name} is over", lambda: run.store.exists(file)):
        return PhaseState(functools.partial(train_phase, run, name, start, rows, plan=plan))
    state = train_phase(run, name, start, rows, plan=plan)
    return PhaseState(functools.partial(_restored_state, run, name, plan), state)


def train_phase(
    run: Run, name: str, start: GetState, rows: PackedRows, *, plan: LearningPlan
) -> TrainState:
    """Train a phase, and return the training state after the planned updates. See `train`."""
    # Restore the phase's last checkpoint, or start from the state of the phase before.
    rates = plan.schedule()
    run.generator.release_weights()
    trainer = _trainer_of(run, plan)
    checkpoints = _checkpoints_of(run, name, plan)
    state, input_state = _restore_or_begin(checkpoints, trainer, start)
    # Set this only now: `start` may itself train a phase, and would replace the name.
    run.newest_phase = name
    done = int(state.step)
    if done >= plan.steps:
        return state

    run.preemption.enter(f"{name}: learning", kept_text=f"step {done} of {plan.steps} is kept")
    figures = Throughput(trainer, rows, done=done, seconds=lambda: run.clock.seconds(LEARNING))
    # Checkpoints are written while training continues. Leaving this block waits for the last one.
    with checkpoints, _shown(run, name, done=done, steps=plan.steps) as stage:
        saves = _Saves(run, name, checkpoints, saved_step=done, plan=plan)
        on_step = functools.partial(_report_step, run, name, stage, figures, plan.steps)
        batches = trainer.batches(rows, seed=run.config.seed, step=done)
        if input_state is not None:
            batches.set_state(input_state)

        # Train a few steps at a time, and check after each stretch whether a checkpoint is due. The
        # time of a checkpoint does not change the result: after a restart, the repeated steps use
        # the same batches.
        while done < plan.steps:
            until = run.profile.until(done, min(plan.steps, done + STEPS_A_STRETCH))
            run.profile.before(done)
            with run.clock.stage(LEARNING):
                result = fit(
                    trainer,
                    state,
                    batches,
                    schedule=rates,
                    steps=until,
                    on_step=on_step,
                    should_stop=run.preemption.at_step,
                )
            state = result.state
            done = result.steps
            run.profile.after(done, state)

            saves.save_if_due(result)
            if result.stopped:
                checkpoints.finish()
                raise run.preemption.ended(f"step {saves.saved_step} of {plan.steps} is saved")
    return state


def finished_state(run: Run, name: str, *, plan: LearningPlan) -> TrainState | None:
    """Return the state after a phase, restored from the phase's checkpoint.

    Returns None if the checkpoint is missing or damaged, or if the phase is not finished.
    """
    run.generator.release_weights()
    checkpoints = _checkpoints_of(run, name, plan)
    checkpoint = checkpoints.restore_latest(_trainer_of(run, plan).abstract_state())
    if checkpoint is None or int(checkpoint[0].step) < plan.steps:
        return None
    run.newest_phase = name
    return checkpoint[0]


def _restored_state(run: Run, name: str, plan: LearningPlan) -> TrainState:
    """Return the state after a phase that was trained in this process, from its checkpoint.

    Raises StoreError if the checkpoint is missing or damaged.
    """
    state = finished_state(run, name, plan=plan)
    if state is None:
        raise StoreError(
            f"the last checkpoint in {run.store.root / learning_folder(name)} is missing or "
            "damaged: start the same command again; it trains this phase again"
        )
    return state


def _trainer_of(run: Run, plan: LearningPlan) -> Trainer:
    """Return the run's trainer, or a new one if the plan has its own loss or trainer settings."""
    if plan.loss is None and plan.trainer in (None, run.config.trainer):
        return run.trainer
    return Trainer(run.trainer.model, plan.trainer or run.config.trainer, plan.loss)


def _checkpoints_of(run: Run, name: str, plan: LearningPlan) -> "Checkpoints":
    """Return the object that saves and restores the checkpoints of a phase."""
    from mujica_jax.learning.checkpoints import Checkpoints

    return Checkpoints(
        run.store.root / learning_folder(name),
        keep=(plan.trainer or run.config.trainer).keep_checkpoints,
        io_statistics=run.store.io_statistics,
    )


def _restore_or_begin(
    checkpoints: "Checkpoints", trainer: Trainer, start: GetState
) -> tuple[TrainState, Any]:
    """Return the training state to continue from, and the position in the training data.

    Both come from the last checkpoint. Without a checkpoint, the state comes from `start()`, and
    the position is None.
    """
    checkpoint = checkpoints.restore_latest(trainer.abstract_state())
    if checkpoint is None:
        return trainer.next_phase(start()), None
    state, position = checkpoint
    return state, position.get("input")


@contextlib.contextmanager
def _shown(run: Run, name: str, *, done: int, steps: int) -> Iterator[Stage]:
    """Show the progress of training, and profile the steps that the configuration names."""
    stage = run.progress.stage(f"{name}: learning", total=steps, unit="steps", done=done)
    with stage as shown, run.profile.of_phase(name, done=done, steps=steps):
        yield shown


def _report_step(
    run: Run, name: str, stage: Stage, figures: Throughput, steps: int, metrics: StepMetrics
) -> None:
    """Show the metrics of a step, and log them every `metrics.logging_steps` steps."""
    stage.update(metrics.step, loss=metrics.loss, **metrics.loss_metrics)
    if metrics.step % run.config.metrics.logging_steps == 0 or metrics.step == steps:
        throughput = figures.of(metrics)
        stage.update(metrics.step, tokens_per_second=round(throughput["tokens_per_second"]))
        run.metrics.write(f"{name}/learn", metrics.step, metrics.values() | throughput)


class _Saves:
    """The checkpoints of a phase, each saved when it is due.

    `saved_step` is the step of the newest checkpoint.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        checkpoints: "Checkpoints",
        *,
        saved_step: int,
        plan: LearningPlan,
    ) -> None:
        self._run = run
        self._name = name
        self._checkpoints = checkpoints
        self._steps = plan.steps
        self._save_seconds = (plan.trainer or run.config.trainer).save_seconds
        self._last_save_time = time.monotonic()
        self.saved_step = saved_step

    def save_if_due(self, result: FitResult) -> None:
        """Save a checkpoint if the phase ends, if it is interrupted, or if enough time passed."""
        if not self._is_due(result) or result.steps <= self.saved_step:
            return
        position = {"phase": self._name, "steps": self._steps, "input": result.input_state}
        with self._run.clock.stage("saving"):
            # Write the metrics first: a restart continues from the checkpoint and does not repeat
            # these steps.
            self._run.metrics.flush()
            self._checkpoints.save(result.state, position)
        # The new checkpoint is still being written. A kill now would keep only the one before.
        self._run.preemption.keeps(f"step {self.saved_step} of {self._steps} is kept")
        self._last_save_time = time.monotonic()
        self.saved_step = result.steps

    def _is_due(self, result: FitResult) -> bool:
        """Return whether to save a checkpoint now. The first process decides for all processes."""
        is_due = result.stopped or result.steps == self._steps
        if not is_due:
            save_seconds = self._save_seconds or max(
                SAVE_EVERY_SECONDS, self._checkpoints.seconds_a_save / SAVING_SHARE
            )
            is_due = time.monotonic() - self._last_save_time > save_seconds
        return distributed.broadcast(f"{self._name}: save", lambda: is_due)


# --- rows ---


def rows_that_fit(
    run: Run,
    conversations: Sequence[Conversation],
    noun: str = "conversations",
    sequence_length: int | None = None,
) -> list[Conversation]:
    """Return the conversations that have at least one trained token and fit into a row.

    A line on the console says how many are too long; `noun` is what it calls them.
    `sequence_length` is the length of a row in tokens (None: `trainer.sequence_length`).
    """
    limit = sequence_length or run.config.trainer.sequence_length
    trained = [conversation for conversation in conversations if any(conversation.loss_mask)]
    fitting = [conversation for conversation in trained if len(conversation.token_ids) <= limit]
    num_too_long = len(trained) - len(fitting)
    if num_too_long:
        run.progress.line(
            f"{num_too_long} of {len(trained)} {noun} exceed {limit} tokens and are left out"
        )
    return fitting


def score_once(run: Run, file: str, score: Callable[[], np.ndarray]) -> np.ndarray:
    """Return log-probabilities that `score` computes, or that an earlier start stored in `file`.

    `score` is called once in a run, also if the run is restarted.
    """
    if not distributed.broadcast(file, lambda: run.store.exists(file)):
        run.generator.release_weights()
        with run.clock.stage("scoring"):
            scores = score()
        if distributed.is_primary():
            content = io.BytesIO()
            np.save(content, scores, allow_pickle=False)
            run.store.create(file, content.getvalue())
        distributed.barrier(file)
    return np.load(io.BytesIO(run.store.read(file)), allow_pickle=False)
