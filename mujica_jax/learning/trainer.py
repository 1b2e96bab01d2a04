"""The trainer: one compiled training step on packed rows, and the loop around it.

`Trainer` holds the compiled functions of a model, a loss and a device mesh. `TrainState` holds the
weights and the optimiser state. `fit` is the loop. The methods use all three. The losses are in
`learning.losses`.

Each iteration of the loop does four things, in this order:

1. Stop if `should_stop` returns True.
2. Read the batch of this step. It is a pure function of (seed, step). It comes from an iterator
   whose position is saved with the state (`learning.batches`).
3. Dispatch the step to the devices, without waiting for its result.
4. Read the metrics of the step before, while this step runs. Raise an error, which ends the run, if
   its loss or gradient norm is not finite. Also raise one if too many updates in a row were skipped
   as spikes (`learning.spike_guard`).

`fit` reads the metrics of its last step before it returns, and reads no batch beyond that step. So
the state that it returns has passed the checks of point 4 and may be saved. A run that is restored
from this state continues with exactly the batches that it would have seen. The caller decides when
to save by calling `fit` for a few steps at a time.

Compilation: a process compiles the step once for each (batch size, sequence length). All phases,
and all trainers of the same model, configuration and loss, share the compiled step. The
learning-rate schedule is an argument of it. Parameters, optimiser state and batches are sharded
over the mesh (data, fsdp, tensor).

Gradient accumulation: with `accumulation_steps` above 1, the rows of a batch go through the model
in that many parts inside the step. The gradient of each part is already divided by a count of the
whole batch (`learning.losses.loss`). The gradients add up in float32 to the gradient of the batch.
Activations need the memory of one part.

LoRA: with `lora_rank` above 0, the decoder gets adapters (`models.lora`). Only the adapters have
gradients, moments and weight decay. The decoder's own weights stay the same, bit for bit.
`Trainer.policy` and `Trainer.decoder` return a plain decoder, with the adapters merged into its
weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from mujica_jax.config.checks import check_rows
from mujica_jax.config.schema import TrainerConfig
from mujica_jax.errors import UserError
from mujica_jax.learning.batches import Batches
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.losses.loss import Counts, Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.optimizer import (
    Schedule,
    apply_updates,
    learning_rate,
    make_optimizer,
    schedule,
)
from mujica_jax.learning.packing import Batch, PackedRows
from mujica_jax.learning.spike_guard import detect_spike, no_spikes, raise_if_too_many
from mujica_jax.models.attention import Implementation, resolve
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.lora import adapted, check_rank, merged
from mujica_jax.models.sharding import RULES, make_mesh, own_rows, shard_batch, shardings_of

# (trained parameters, batch or part of a batch) -> ((loss, metrics), gradient)
LossAndGradient = Callable[[nnx.State, Batch], tuple[tuple[Array, dict[str, Array]], nnx.State]]


class TrainState(NamedTuple):
    """Everything that a training step changes.

    `Trainer.train_step` consumes a state: it reuses the buffers for the next state.
    """

    # Number of steps made in this phase. Schedule and batches count from the start of the phase.
    step: Int[Array, ""]
    # All weights of the decoder. With LoRA these are the frozen weights and the adapters.
    params: nnx.State
    # State of the Optax transformation, for the trained parameters only.
    opt_state: Any
    # `learning.spike_guard.Spikes` if trainer.spike_deviations is above 0, else ().
    spikes: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of one training step, on the host."""

    # Number of steps made in this phase, this step included.
    step: int
    # Loss of the batch before the update.
    loss: float
    # Norm of the whole gradient before clipping.
    grad_norm: float
    # Learning rate of this update.
    learning_rate: float
    # Number of trained tokens in the batch.
    trained_tokens: int
    # Number of updates of this phase that were skipped as spikes (`learning.spike_guard`).
    skipped: int = 0
    # Counts and metrics of the loss, by name (`Loss.counts`, `Loss.of`).
    loss_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, float | int]:
        """Return everything but the step number, under the names of the training log."""
        values = {}
        for name, value in vars(self).items():
            if name not in ("step", "loss_metrics"):
                values[name] = value
        return values | dict(self.loss_metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of one call of `fit`."""

    # State after the last step.
    state: TrainState
    # Number of steps made in this phase.
    steps: int
    # Whether `should_stop` ended the loop early.
    stopped: bool
    # State of the iterator over batches (`Batches.get_state`), to be saved with `state`.
    input_state: dict[str, Any]


class NotFiniteError(UserError):
    """The loss or the gradient is NaN or infinite."""


class Trainer:
    """The compiled functions that train one model with one loss on a device mesh.

    The trainer holds no weights. They are in the `TrainState` that goes from step to step.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: TrainerConfig,
        loss: Loss | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Prepare the functions. Each of them is compiled at its first call.

        `loss` is by default maximum likelihood with the configured `z_loss`. `devices` are by
        default all devices of this job. They may also be devices of a topology description, to
        compile for hardware that this machine lacks. A `TrainState` does not depend on the loss, so
        a trainer can continue with the state of another trainer of the same model.
        """
        check_rows(config)
        check_rank(model, config.lora_rank)
        self.model = model
        self.config = config
        self.loss = MLE(z_loss=config.z_loss) if loss is None else loss
        self.mesh = make_mesh(
            config.data_parallel_size, config.fsdp, config.tensor_parallel_size, devices
        )
        self._program = _program(model, config, self.loss, self.mesh)

    def initial_state(self, decoder: Decoder, *, seed: int = 0) -> TrainState:
        """Return the state at step 0: a copy of the decoder's weights and fresh optimiser state.

        With LoRA, `seed` determines the initial values of the adapters.
        """
        dtype = jnp.dtype(self.config.parameter_dtype)
        weights = jax.tree.map(lambda array: jnp.asarray(array, dtype), nnx.state(decoder))
        weights = jax.device_put(weights, self._program.policy_shardings, may_alias=False)
        with jax.set_mesh(self.mesh):
            return self._program.empty_state(weights, np.uint32(seed))

    def next_phase(self, state: TrainState) -> TrainState:
        """Return the state at step 0 of the next phase, with the same weights.

        Adam's moments stay, because they still describe the gradients. The statistics of the
        spike guard start anew, because another phase has another usual loss.
        """
        shardings = self._program.shardings
        step = jax.device_put(np.int32(0), shardings.step)
        spikes = ()
        if self.config.spike_deviations:
            spikes = jax.device_put(no_spikes(), shardings.spikes)
        return state._replace(step=step, spikes=spikes)

    def abstract_state(self) -> TrainState:
        """Return the shapes, types and shardings of a state, without arrays.

        `Checkpoints.restore_latest` needs it as a template.
        """
        return self._program.abstract_state

    def policy(self, state: TrainState) -> nnx.State:
        """Return the weights of a plain decoder, with the adapters merged into them.

        They may share memory with `state`. Copy them if they are needed after the next step.
        """
        if not self.config.lora_rank:
            return state.params
        with jax.set_mesh(self.mesh):
            return self._program.policy(state.params)

    def decoder(self, state: TrainState) -> Decoder:
        """Return a decoder with a copy of the weights, so that it can sample during training."""
        weights = jax.tree.map(jnp.copy, self.policy(state))
        return nnx.merge(self._program.policy_graph, weights)

    def train_step(
        self, state: TrainState, batch: Batch, schedule: Schedule
    ) -> tuple[TrainState, dict[str, Array]]:
        """Make one update and return the next state and the metrics.

        `batch` holds the rows that this process reads (`own_rows`). The call returns at once, while
        the devices still compute the results. It consumes `state`, which cannot be used again.
        """
        with jax.set_mesh(self.mesh):
            return self._program.train_step(state, shard_batch(batch, self.mesh), schedule)

    def own_rows(self) -> Int[np.ndarray, " own"]:
        """Return the indexes, within a batch, of the rows that this process has to read."""
        return own_rows(self.config.batch_size, self.mesh)

    def lower_step(self) -> jax.stages.Lowered:
        """Return one update of the configured batch size, lowered for the mesh.

        This makes no arrays. The result's `.compile()` works for a topology description, too,
        without its devices.
        """
        shape = (self.config.batch_size, self.config.sequence_length)
        rows = NamedSharding(self.mesh, PartitionSpec(RULES["batch"].mesh_axes))
        integers: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        mask: Any = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows)
        numbers: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        batch = Batch(
            tokens=integers,
            segment_ids=integers,
            positions=integers,
            loss_mask=mask,
            columns={name: numbers for name in self.loss.columns},
        )
        constant_rate = schedule(peak=1.0, end_value=1.0, total_steps=1)
        with jax.set_mesh(self.mesh):
            step: Any = self._program.train_step
            return step.lower(self._program.abstract_state, batch, constant_rate)

    def batches(self, rows: PackedRows, *, seed: int, step: int = 0) -> Batches:
        """Return an iterator over this process's part of the batches, from step `step` on.

        `seed` shuffles the rows. After a restart, pass the `input_state` of the checkpoint to
        `Batches.set_state`. Raises UserError if there are no rows.
        """
        batches = Batches(
            rows,
            self.config.batch_size,
            seed=seed,
            own=self.own_rows(),
            columns=self.loss.columns,
        )
        batches.seek(step)
        return batches

    def score(self, state: TrainState, rows: PackedRows) -> Float[np.ndarray, "rows time"]:
        """Return the log-probability of every token given the tokens before it in its segment.

        Padding and the first token of each segment have 0.
        """
        log_probs = np.zeros(rows.tokens.shape, np.float32)
        for start in range(0, rows.num_rows, self.config.batch_size):
            # A last batch that would be short is filled up with the first rows. So all batches have
            # the same shape.
            row_numbers = np.arange(start, start + self.config.batch_size)
            batch = rows.batch(row_numbers[self.own_rows()] % rows.num_rows)
            with jax.set_mesh(self.mesh):
                batch_log_probs = np.asarray(
                    self._program.score(state.params, shard_batch(batch, self.mesh))
                )
            is_row = row_numbers < rows.num_rows
            log_probs[row_numbers[is_row]] = batch_log_probs[is_row]
        return log_probs


def fit(
    trainer: Trainer,
    state: TrainState,
    batches: Batches,
    *,
    schedule: Schedule,
    steps: int,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Train from `state.step` until this phase has made `steps` steps.

    `batches` comes from `Trainer.batches`, and the batch of step `state.step` must be its next.
    `on_step` is called once for each step, in order. `should_stop` is called before each step, and
    True ends the loop. Raises NotFiniteError if a loss or a gradient norm is not finite, and
    TooManySpikesError if too many updates in a row are skipped.
    """
    steps_done = int(state.step)
    assert batches.next_step == steps_done, (
        f"the next batch is that of step {batches.next_step}, and the state is at step "
        f"{steps_done}: make the batches with step=int(state.step)"
    )

    max_skips = trainer.config.max_skips_in_a_row
    stopped = False
    # Number and metrics of the last step, until they are read.
    unread: tuple[int, dict[str, Array]] | None = None
    while steps_done < steps:
        stopped = should_stop()
        if stopped:
            break
        state, metrics = trainer.train_step(state, next(batches), schedule)
        steps_done += 1

        # Read the metrics of the step before, while this one runs.
        if unread is not None:
            on_step(_read(*unread, max_skips=max_skips))
        unread = (steps_done, metrics)
    if unread is not None:
        on_step(_read(*unread, max_skips=max_skips))

    return FitResult(
        state=state, steps=steps_done, stopped=stopped, input_state=batches.get_state()
    )


def steps_of_epochs(num_rows: int, batch_size: int, epochs: int) -> int:
    """Return how many steps it takes until every row has been in `epochs` batches.

    This is num_rows * epochs / batch_size, rounded up.
    """
    return -(-num_rows * epochs // batch_size)


def _read(step: int, metrics: dict[str, Array], *, max_skips: int) -> StepMetrics:
    """Wait for the metrics of a step, check them, and return them.

    Raises NotFiniteError or TooManySpikesError if the run has to end.
    """
    values: dict[str, Any] = {name: np.asarray(value).item() for name, value in metrics.items()}
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise NotFiniteError(
            f"step {step} has loss {values['loss']} and gradient norm {values['grad_norm']}: the "
            "run ends and does not save this step; lower the learning rate or start from another "
            "checkpoint"
        )
    if "skipped" in values:
        raise_if_too_many(values, step=step, max_skips=max_skips)
        del values["skipped_in_a_row"]

    # The values that remain are counts and metrics of the loss.
    return StepMetrics(
        step=step,
        loss=values.pop("loss"),
        grad_norm=values.pop("grad_norm"),
        learning_rate=values.pop("learning_rate"),
        trained_tokens=values.pop("trained_tokens"),
        skipped=values.pop("skipped", 0),
        loss_metrics=values,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The fixed inputs of `train_step`, which are the same for all steps of a trainer."""

    config: TrainerConfig
    loss: Loss
    mesh: Mesh
    # Structure of a plain decoder.
    policy_graph: nnx.GraphDef[Decoder]
    # Structure of the decoder that is trained. With LoRA it has adapters.
    graph: nnx.GraphDef[Decoder]
    optimizer: optax.GradientTransformation
    # Implementation of attention for the mesh's platform.
    attention: Implementation


def make_train_step(
    model: DecoderConfig, config: TrainerConfig, loss: Loss, mesh: Mesh
) -> TrainStep:
    """Return the fixed inputs of `train_step` for a model on a mesh. This makes no arrays."""
    plain = _abstract_decoder(model, config)
    trained = nnx.eval_shape(lambda: _with_adapters(plain, config, seed=0))
    # The mesh decides, not this machine: it may belong to a topology description.
    platform = mesh.devices.flat[0].platform
    if platform in ("cuda", "rocm"):
        platform = "gpu"
    return TrainStep(
        config=config,
        loss=loss,
        mesh=mesh,
        policy_graph=nnx.graphdef(plain),
        graph=nnx.graphdef(trained),
        optimizer=make_optimizer(config),
        attention=resolve(config.attention, time=config.sequence_length, platform=platform),
    )


def train_step(
    setup: TrainStep, state: TrainState, batch: Batch, schedule: Schedule
) -> tuple[TrainState, dict[str, Array]]:
    """Return the state after one update, and the metrics of the update.

    This is a pure function, which `_program` compiles. If the update is a spike
    (`learning.spike_guard`), it is skipped: parameters and optimiser state stay the same.
    """
    config = setup.config
    trained, frozen = _split(state.params, config)

    # Loss and gradient of the whole batch, at once or part by part.
    counts = setup.loss.counts(batch)
    loss_and_gradient = _loss_and_gradient(setup, frozen, counts)
    if config.accumulation_steps == 1:
        (loss, metrics), gradient = loss_and_gradient(trained, batch)
    else:
        parts = _parts(batch, config.accumulation_steps, setup.mesh)
        (loss, metrics), gradient = _accumulated(loss_and_gradient, trained, parts)

    # Compute the update in float32. The second moment and the direction then are float32 too.
    gradient = optax.tree.cast(gradient, jnp.float32)
    wide_params = optax.tree.cast(trained, jnp.float32)
    direction, opt_state = setup.optimizer.update(gradient, state.opt_state, wide_params)
    rate = learning_rate(schedule, state.step)
    updated = apply_updates(trained, direction, rate, state.step)

    metrics |= counts
    metrics["loss"] = loss
    metrics["grad_norm"] = optax.global_norm(gradient)
    metrics["learning_rate"] = rate

    # Skip a spike: select the old values, so that they stay the same bit for bit.
    spikes = state.spikes
    if config.spike_deviations:
        is_spike, spikes = detect_spike(
            spikes,
            loss,
            metrics["grad_norm"],
            deviations=config.spike_deviations,
            window=config.spike_window_steps,
        )
        updated, opt_state = optax.tree.where(
            is_spike, (trained, state.opt_state), (updated, opt_state)
        )
        metrics["skipped"] = spikes.skipped
        metrics["skipped_in_a_row"] = spikes.in_a_row

    next_state = TrainState(
        step=state.step + 1,
        params=nnx.merge_state(updated, frozen),
        opt_state=opt_state,
        spikes=spikes,
    )
    return next_state, metrics


def _loss_and_gradient(setup: TrainStep, frozen: nnx.State, counts: Counts) -> LossAndGradient:
    """Return a function that computes ((loss, metrics), gradient).

    Its arguments are the trained parameters and a batch, or a part of a batch. `counts` are the
    counts of the whole batch.
    """

    def loss(trained: nnx.State, part: Batch) -> tuple[Array, dict[str, Array]]:
        decoder = nnx.merge(setup.graph, trained, frozen)
        return setup.loss(
            decoder, part, counts, attention=setup.attention, remat=setup.config.remat
        )

    return jax.value_and_grad(loss, has_aux=True)


def _parts(batch: Batch, count: int, mesh: Mesh) -> Batch:
    """Cut the arrays of a batch from [rows, time] into [count, rows / count, time].

    Part n has the rows n, n + count, n + 2 count, and so on. So each device cuts the rows that it
    holds, and no row moves to another device.
    """
    layout = NamedSharding(mesh, PartitionSpec(None, RULES["batch"].mesh_axes))

    def cut(array: Array) -> Array:
        parts = jnp.moveaxis(array.reshape(-1, count, *array.shape[1:]), 1, 0)
        return jax.lax.with_sharding_constraint(parts, layout)

    return jax.tree.map(cut, batch)


def _accumulated(
    loss_and_gradient: LossAndGradient, trained: nnx.State, parts: Batch
) -> tuple[tuple[Array, dict[str, Array]], nnx.State]:
    """Return loss, metrics and gradient of a batch, as the sums over its parts.

    The loss of each part is already divided by a count of the whole batch.
    """

    def add_part(
        totals: tuple[Array, nnx.State], part: Batch
    ) -> tuple[tuple[Array, nnx.State], dict[str, Array]]:
        total_loss, total_gradient = totals
        (loss, metrics), gradient = loss_and_gradient(trained, part)
        total_loss = total_loss + loss
        gradient = optax.tree.cast(gradient, jnp.float32)
        return (total_loss, optax.tree.add(total_gradient, gradient)), metrics

    zero_gradient = optax.tree.zeros_like(trained, dtype=jnp.float32)
    zero_loss = jnp.zeros((), jnp.float32)
    (loss, gradient), metrics = jax.lax.scan(add_part, (zero_loss, zero_gradient), parts)
    metrics = jax.tree.map(lambda values: values.sum(axis=0), metrics)
    return (loss, metrics), gradient


def _split(params: nnx.State, config: TrainerConfig) -> tuple[nnx.State, nnx.State]:
    """Return the parameters that are trained, and the frozen ones.

    With LoRA the adapters are trained, else all parameters.
    """
    trained_type = nnx.LoRAParam if config.lora_rank else nnx.Param
    trained, frozen = nnx.split_state(params, trained_type, ...)
    return trained, frozen


def _abstract_decoder(model: DecoderConfig, config: TrainerConfig) -> Decoder:
    """Return a plain decoder with shapes and types in place of arrays."""
    dtype = jnp.dtype(config.dtype)
    return nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=dtype))


def _with_adapters(decoder: Decoder, config: TrainerConfig, seed: Any) -> Decoder:
    """Return the decoder that is trained: with fresh adapters if `lora_rank` is above 0."""
    if not config.lora_rank:
        return decoder
    key = jax.random.key(seed)
    return adapted(decoder, rank=config.lora_rank, alpha=config.lora_alpha, key=key)


def _empty_state(setup: TrainStep, weights: nnx.State, seed: Any) -> TrainState:
    """Return the state at step 0, from the weights of a plain decoder."""
    config = setup.config
    decoder = _with_adapters(nnx.merge(setup.policy_graph, weights), config, seed)
    params = nnx.state(decoder)
    spikes = no_spikes() if config.spike_deviations else ()
    trained, _ = _split(params, config)
    opt_state = setup.optimizer.init(optax.tree.cast(trained, jnp.float32))
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state, spikes=spikes
    )


def _policy(setup: TrainStep, params: nnx.State) -> nnx.State:
    """Return the weights of a plain decoder, with the adapters merged into them."""
    decoder = nnx.merge(setup.graph, params)
    return nnx.state(merged(decoder, rank=setup.config.lora_rank, alpha=setup.config.lora_alpha))


def _score(setup: TrainStep, params: nnx.State, batch: Batch) -> Float[Array, "rows time"]:
    """Return the log-probability of every token of a batch, as `Trainer.score`."""
    decoder = nnx.merge(setup.graph, params)
    return token_log_probs(decoder, batch, attention=setup.attention, remat=setup.config.remat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """The compiled functions of one model on one mesh, and the layout of their arguments."""

    # Structure of a plain decoder, and the sharding of each of its weights.
    policy_graph: nnx.GraphDef[Decoder]
    policy_shardings: nnx.State
    # Parameters with adapters -> weights with the adapters merged into them.
    policy: Callable[[nnx.State], nnx.State]
    # Shapes, types and shardings of a state, and the shardings alone.
    abstract_state: TrainState
    shardings: TrainState
    # (weights of a plain decoder, seed of the adapters) -> state at step 0.
    empty_state: Callable[[nnx.State, np.uint32], TrainState]
    train_step: Callable[[TrainState, Batch, Schedule], tuple[TrainState, dict[str, Array]]]
    score: Callable[[nnx.State, Batch], Array]


@functools.lru_cache(maxsize=8)
def _program(model: DecoderConfig, config: TrainerConfig, loss: Loss, mesh: Mesh) -> _Program:
    """Return the functions of one model on one mesh, each compiled at its first call.

    The process caches the result. So a second trainer of the same model, configuration, loss and
    mesh compiles nothing.
    """
    setup = make_train_step(model, config, loss, mesh)

    # Shapes, types and layout of weights and state.
    parameter_dtype = jnp.dtype(config.parameter_dtype)
    abstract_weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, parameter_dtype),
        nnx.state(_abstract_decoder(model, config)),
    )
    empty_state = functools.partial(_empty_state, setup)
    abstract_state = jax.eval_shape(empty_state, abstract_weights, np.uint32(0))
    shardings = shardings_of(abstract_state, mesh)
    policy_shardings = shardings_of(abstract_weights, mesh)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), abstract_state, shardings
    )
    replicated = NamedSharding(mesh, PartitionSpec())

    return _Program(
        policy_graph=setup.policy_graph,
        policy_shardings=policy_shardings,
        policy=jax.jit(functools.partial(_policy, setup), out_shardings=policy_shardings),
        abstract_state=abstract_state,
        shardings=shardings,
        empty_state=jax.jit(empty_state, out_shardings=shardings, donate_argnums=0),
        # Fix the sharding of the new state. Otherwise the compiler might choose another one, and
        # the next step would be compiled again for it.
        train_step=jax.jit(
            functools.partial(train_step, setup),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
        score=jax.jit(functools.partial(_score, setup), out_shardings=replicated),
    )
