"""Learn: train one phase on packed rows, from the state before it or from its last checkpoint."""

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

SAVE_EVERY_SECONDS = 15.0  # of training, at least; a save takes about 60 ms for the tiny models
# Share of the training time that saves may take, where `trainer.save_seconds` does not say how
# often they come.
SAVING_SHARE = 0.05
STEPS_A_STRETCH = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningPlan:
    """The plan of a phase: its updates, its learning rates (`optimizer.schedule`) and its loss."""

    steps: int  # updates
    peak: float
    end_value: float
    warmup_steps: int = 0
    stretch: tuple[float, float] = (0.0, 1.0)  # part of a cosine that several phases share
    # One of `learning.losses`, whose columns the rows carry. None is maximum likelihood.
    loss: Loss | None = None
    # The trainer's configuration with this phase's own rows. None is the run's.
    trainer: TrainerConfig | None = None

    def schedule(self) -> Schedule:
        """Return the learning rate of every step. Raises UserError where it is inconsistent."""
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
    """Train a phase on these rows, and return the state that it ends with.

    It begins with `start()`, whose buffers are reused, or goes on from its last checkpoint. A
    preemption saves the step it comes at.

    A phase that was evaluated by an earlier start is over. Then nothing is read here: its
    checkpoint is read when its state is called for. Where that checkpoint is damaged, the phase is
    learnt again.
    """
    file = phase_file(name)
    if distributed.broadcast(f"{name} is over", lambda: run.store.exists(file)):
        return PhaseState(functools.partial(train_phase, run, name, start, rows, plan=plan))
    state = train_phase(run, name, start, rows, plan=plan)
    return PhaseState(functools.partial(_restored_state, run, name, plan), state)


def train_phase(
    run: Run, name: str, start: GetState, rows: PackedRows, *, plan: LearningPlan
) -> TrainState:
    """Return the state after the planned updates. See `train`."""
    # Restore the last checkpoint, or begin.
    rates = plan.schedule()
    run.generator.release_weights()
    trainer = _trainer_of(run, plan)
    checkpoints = _checkpoints_of(run, name, plan)
    state, input_state = _restore_or_begin(checkpoints, trainer, start)
    run.newest_phase = name  # set here: `start` may be a phase, too
    done = int(state.step)
    if done >= plan.steps:
        return state

    run.preemption.enter(f"{name}: learning", kept_text=f"step {done} of {plan.steps} is kept")
    figures = Throughput(trainer, rows, done=done, seconds=lambda: run.clock.seconds(LEARNING))
    # A save goes on beside the steps and is finished before the phase ends, however it ends.
    with checkpoints, _shown(run, name, done=done, steps=plan.steps) as stage:
        saves = _Saves(run, name, checkpoints, saved_step=done, plan=plan)
        on_step = functools.partial(_report_step, run, name, stage, figures, plan.steps)
        batches = trainer.batches(rows, seed=run.config.seed, step=done)
        if input_state is not None:
            batches.set_state(input_state)

        # Train in stretches, with a look at the clock after each: a save is due by the clock, and
        # what a restart repeats is the same steps with the same batches either way.
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
    """Return the state that a phase ended with, from its checkpoint.

    Returns None where that checkpoint is missing or damaged, or the phase is not over.
    """
    run.generator.release_weights()
    checkpoints = _checkpoints_of(run, name, plan)
    checkpoint = checkpoints.restore_latest(_trainer_of(run, plan).abstract_state())
    if checkpoint is None or int(checkpoint[0].step) < plan.steps:
        return None
    run.newest_phase = name
    return checkpoint[0]


def _restored_state(run: Run, name: str, plan: LearningPlan) -> TrainState:
    """Return the state of a phase that this start has learnt, from its checkpoint."""
    state = finished_state(run, name, plan=plan)
    if state is None:
        raise StoreError(
            f"the last checkpoint in {run.store.root / learning_folder(name)} is missing or "
            "damaged: give the same command again, which learns the phase once more"
        )
    return state


def _trainer_of(run: Run, plan: LearningPlan) -> Trainer:
    """Return the run's trainer, or one with the plan's own loss or rows."""
    if plan.loss is None and plan.trainer in (None, run.config.trainer):
        return run.trainer
    return Trainer(run.trainer.model, plan.trainer or run.config.trainer, plan.loss)


def _checkpoints_of(run: Run, name: str, plan: LearningPlan) -> "Checkpoints":
    """Return the checkpoints of a phase."""
    from mujica_jax.learning.checkpoints import Checkpoints

    return Checkpoints(
        run.store.root / learning_folder(name),
        keep=(plan.trainer or run.config.trainer).keep_checkpoints,
        io_statistics=run.store.io_statistics,
    )


def _restore_or_begin(
    checkpoints: "Checkpoints", trainer: Trainer, start: GetState
) -> tuple[TrainState, Any]:
    """Return the state of the last checkpoint with that of its input, or begin with `start()`."""
    checkpoint = checkpoints.restore_latest(trainer.abstract_state())
    if checkpoint is None:
        return trainer.next_phase(start()), None
    state, position = checkpoint
    return state, position.get("input")


@contextlib.contextmanager
def _shown(run: Run, name: str, *, done: int, steps: int) -> Iterator[Stage]:
    """Show the progress of learning, and profile the steps that the configuration asks for."""
    stage = run.progress.stage(f"{name}: learning", total=steps, unit="steps", done=done)
    with stage as shown, run.profile.of_phase(name, done=done, steps=steps):
        yield shown


def _report_step(
    run: Run, name: str, stage: Stage, figures: Throughput, steps: int, metrics: StepMetrics
) -> None:
    """Show the metrics of a step, and write them down now and then."""
    stage.update(metrics.step, loss=metrics.loss, **metrics.loss_metrics)
    if metrics.step % run.config.metrics.logging_steps == 0 or metrics.step == steps:
        throughput = figures.of(metrics)
        stage.update(metrics.step, tokens_per_second=round(throughput["tokens_per_second"]))
        run.metrics.write(f"{name}/learn", metrics.step, metrics.values() | throughput)


class _Saves:
    """Saves the state of a phase when a save is due."""

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
        """Save at the end of the phase, at its interruption, and every now and then."""
        if not self._is_due(result) or result.steps <= self.saved_step:
            return
        position = {"phase": self._name, "steps": self._steps, "input": result.input_state}
        with self._run.clock.stage("saving"):
            self._run.metrics.flush()  # a resumed run does not repeat these steps
            self._checkpoints.save(result.state, position)
        # The new checkpoint goes on being written, so the earlier one is what is kept.
        self._run.preemption.keeps(f"step {self.saved_step} of {self._steps} is kept")
        self._last_save_time = time.monotonic()
        self.saved_step = result.steps

    def _is_due(self, result: FitResult) -> bool:
        """Return whether to save now. The first process decides for all."""
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
    """Return the conversations that train anything and fit a row.

    A line says how many do not fit. `sequence_length` is the length of a row (None: the trainer's),
    and `noun` is what the line calls the conversations.
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
    """Return what the trainer's policies say of rows.

    It is computed once in the life of a run, and stored in `file`.
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
