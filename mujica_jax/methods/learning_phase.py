"""Training in one phase: from the state before it, or from the last checkpoint, with a save now and
then."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.optimizer import Schedule
from mujica_jax.learning.throughput import Throughput
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from mujica_jax.methods.phases import LEARNING, GetState, learning_folder
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.packing import PackedRows

if TYPE_CHECKING:
    from mujica_jax.methods.run import Run

SAVE_EVERY_SECONDS = 15.0  # of training, at least; a save takes about 60 ms for the tiny models
# of training that saves may take, where `trainer.save_seconds` does not say how often they come
SAVING_SHARE = 0.05
STEPS_A_STRETCH = 25


def train_phase(
    run: "Run",
    name: str,
    start: GetState,
    rows: Callable[[], PackedRows],
    *,
    steps: int,
    rates: Schedule,
    loss: Loss | None,
    config: TrainerConfig,
) -> TrainState:
    """The state after `steps` updates. Called by `Run.learn`. A preemption saves the step it comes
    at."""
    from mujica_jax.learning.checkpoints import Checkpoints

    run.generator.release_weights()
    checkpoints = Checkpoints(
        run.store.root / learning_folder(name),
        keep=config.keep_checkpoints,
        io_statistics=run.store.io_statistics,
    )
    trainer = run.trainer
    if loss or config != run.config.trainer:
        trainer = Trainer(run.trainer.model, config, loss)
    found = checkpoints.restore_latest(trainer.abstract_state())
    state = trainer.next_phase(start()) if found is None else found[0]
    run.newest_phase = name  # set here: `start` may be a phase, too
    input_state = None if found is None else found[1].get("input")
    done = int(state.step)
    if done >= steps:
        return state
    run.preemption.enter(f"{name}: learning", kept=f"step {done} of {steps} is kept")
    with run.clock.stage("packing"):
        packed = rows()
    figures = Throughput(trainer, packed, done=done, seconds=lambda: run.clock.seconds(LEARNING))
    last_save, saved = time.monotonic(), done

    with (
        # a save goes on beside the steps and is finished before the phase ends, however it ends
        checkpoints,
        run.progress.stage(f"{name}: learning", total=steps, unit="steps", done=done) as stage,
        run.profile.of_phase(name, done=done, steps=steps),
    ):

        def on_step(metrics: StepMetrics) -> None:
            stage.update(metrics.step, loss=metrics.loss, **metrics.of_loss)
            if metrics.step % run.config.metrics.every_steps == 0 or metrics.step == steps:
                more = figures.of(metrics)
                stage.update(metrics.step, tokens_per_second=round(more["tokens_per_second"]))
                run.metrics.write(f"{name}/learn", metrics.step, metrics.values() | more)

        # A save is due by the clock, but what a restart repeats is the same steps with the same
        # batches either way.
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
            state, done, input_state = result.state, result.steps, result.input_state
            run.profile.after(done, state)
            every = config.save_seconds or max(
                SAVE_EVERY_SECONDS, checkpoints.seconds_a_save / SAVING_SHARE
            )
            due = result.stopped or done == steps or time.monotonic() - last_save > every
            if distributed.broadcast(f"{name}: save", lambda due=due: due) and done > saved:
                with run.clock.stage("saving"):
                    run.metrics.flush()  # a resumed run does not repeat these steps
                    checkpoints.save(state, {"phase": name, "steps": steps, "input": input_state})
                run.preemption.keeps(
                    f"step {saved} of {steps} is kept"
                )  # the new one goes on being written
                last_save, saved = time.monotonic(), done
            if result.stopped:
                checkpoints.finish()
                raise run.preemption.ended(f"step {saved} of {steps} is saved")
    return state
