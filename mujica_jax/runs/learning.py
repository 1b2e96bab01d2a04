"""Training in one phase: from the state before it, or from the last checkpoint, with a save now and
then."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.optimizer import Schedule, schedule
from mujica_jax.learning.packing import PackedRows
from mujica_jax.learning.throughput import Throughput
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from mujica_jax.runs.phases import LEARNING, GetState, learning_folder
from mujica_jax.runtime import distributed

if TYPE_CHECKING:
    from mujica_jax.learning.checkpoints import Checkpoints
    from mujica_jax.runs.run import Run

SAVE_EVERY_SECONDS = 15.0  # of training, at least; a save takes about 60 ms for the tiny models
# Share of the training time that saves may take, where `trainer.save_seconds` does not say how
# often they come.
SAVING_SHARE = 0.05
STEPS_A_STRETCH = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningPlan:
    """How many updates a phase makes, and with which learning rates (`optimizer.schedule`)."""

    steps: int  # updates
    peak: float
    end_value: float
    warmup_steps: int = 0
    stretch: tuple[float, float] = (0.0, 1.0)  # part of a cosine that several phases share

    def schedule(self) -> Schedule:
        """Return the learning rate of every step. Raises UserError where it is inconsistent."""
        return schedule(
            peak=self.peak,
            end_value=self.end_value,
            total_steps=self.steps,
            warmup_steps=self.warmup_steps,
            stretch=self.stretch,
        )


def train_phase(
    run: "Run",
    name: str,
    start: GetState,
    rows: Callable[[], PackedRows],
    *,
    plan: LearningPlan,
    loss: Loss | None,
    config: TrainerConfig,
) -> TrainState:
    """Return the state after the planned updates. Called by `Run.learn`.

    It goes on from the last checkpoint of the phase, or begins with `start()`. A preemption saves
    the step it comes at."""
    from mujica_jax.learning.checkpoints import Checkpoints

    # Restore the last checkpoint, or begin.
    steps = plan.steps
    rates = plan.schedule()
    run.generator.release_weights()
    checkpoints = Checkpoints(
        run.store.root / learning_folder(name),
        keep=config.keep_checkpoints,
        io_statistics=run.store.io_statistics,
    )
    trainer = run.trainer
    if loss or config != run.config.trainer:
        trainer = Trainer(run.trainer.model, config, loss)
    state, input_state = _restore_or_begin(checkpoints, trainer, start)
    run.newest_phase = name  # set here: `start` may be a phase, too
    done = int(state.step)
    if done >= steps:
        return state

    # Prepare what the steps need.
    run.preemption.enter(f"{name}: learning", kept=f"step {done} of {steps} is kept")
    with run.clock.stage("packing"):
        packed = rows()
    figures = Throughput(trainer, packed, done=done, seconds=lambda: run.clock.seconds(LEARNING))
    last_save_time = time.monotonic()
    saved_step = done

    with (
        # A save goes on beside the steps and is finished before the phase ends, however it ends.
        checkpoints,
        run.progress.stage(f"{name}: learning", total=steps, unit="steps", done=done) as stage,
        run.profile.of_phase(name, done=done, steps=steps),
    ):

        def on_step(metrics: StepMetrics) -> None:
            stage.update(metrics.step, loss=metrics.loss, **metrics.of_loss)
            if metrics.step % run.config.metrics.every_steps == 0 or metrics.step == steps:
                throughput = figures.of(metrics)
                stage.update(metrics.step, tokens_per_second=round(throughput["tokens_per_second"]))
                run.metrics.write(f"{name}/learn", metrics.step, metrics.values() | throughput)

        # Train in stretches, with a look at the clock after each: a save is due by the clock, and
        # what a restart repeats is the same steps with the same batches either way.
        while done < steps:
            until = run.profile.until(done, min(steps, done + STEPS_A_STRETCH))
            run.profile.before(done)
            with run.clock.stage(LEARNING):
                result = fit(
                    trainer,
                    state,
                    packed,
                    schedule=rates,
                    steps=until,
                    seed=run.config.seed,
                    input_state=input_state,
                    on_step=on_step,
                    should_stop=run.preemption.at_step,
                )
            state = result.state
            done = result.steps
            input_state = result.input_state
            run.profile.after(done, state)

            # Save. The first process decides for all.
            is_due = result.stopped or done == steps
            if not is_due:
                save_seconds = config.save_seconds or max(
                    SAVE_EVERY_SECONDS, checkpoints.seconds_a_save / SAVING_SHARE
                )
                is_due = time.monotonic() - last_save_time > save_seconds
            is_due = distributed.broadcast(f"{name}: save", lambda is_due=is_due: is_due)
            if is_due and done > saved_step:
                with run.clock.stage("saving"):
                    run.metrics.flush()  # a resumed run does not repeat these steps
                    checkpoints.save(state, {"phase": name, "steps": steps, "input": input_state})
                # The new checkpoint goes on being written, so the earlier one is what is kept.
                run.preemption.keeps(f"step {saved_step} of {steps} is kept")
                last_save_time = time.monotonic()
                saved_step = done
            if result.stopped:
                checkpoints.finish()
                raise run.preemption.ended(f"step {saved_step} of {steps} is saved")
    return state


def _restore_or_begin(
    checkpoints: "Checkpoints", trainer: Trainer, start: GetState
) -> tuple[TrainState, Any]:
    """Return the state of the last checkpoint with that of its input, or begin with `start()`."""
    checkpoint = checkpoints.restore_latest(trainer.abstract_state())
    if checkpoint is None:
        return trainer.next_phase(start()), None
    state, position = checkpoint
    return state, position.get("input")
