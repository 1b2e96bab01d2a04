"""The trainer: one compiled step of a loss on packed rows, and the loop around it.

The losses are in `learning.losses`.

The loop's order is fixed:

    1. stop, if asked to;
    2. draw the batch of this step, a pure function of (seed, step), from a Grain iterator whose
       place is saved with the state;
    3. dispatch the step;
    4. read the metrics of the step before, while this one runs; a loss or gradient that is not
       finite, and too many spikes (`learning.spike_guard`), end the run here.

The metrics of the last step are read before `fit` returns, and no batch is drawn beyond it: what it
returns is never broken and may be saved. A run restored from there continues with exactly the
batches it would have seen. The caller decides when to save by calling `fit` for a few steps at a
time.

The step is compiled once a process for each (rows, sequence_length), shared by all phases and all
trainers of one model and loss: the learning-rate schedule is an argument. Parameters, optimiser
state and batch lie on the mesh (data, fsdp, tensor). Called by the methods.

With `accumulation_steps` the rows of a batch go through the model part by part inside the step. The
gradients of the parts, each divided by what the loss counts in the whole batch, add up in float32
to the gradient of the whole; activations take the memory of one part.

With `lora_rank` the decoder gets adapters (`models.lora`) and only they have gradients, moments and
decay: its own weights go through a step untouched, bit for bit. What leaves the trainer (`policy`,
`decoder`) is a plain decoder with the adapters merged into its weights.
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

# (trained parameters, batch or part of one) -> ((loss, metrics), gradient)
LossAndGradient = Callable[[nnx.State, Batch], tuple[tuple[Array, dict[str, Array]], nnx.State]]


class TrainState(NamedTuple):
    """All that a step changes.

    `Trainer.train_step` consumes it: its buffers are reused for the next state.
    """

    # Updates made in this phase. The schedule and the order of batches count from its start.
    step: Int[Array, ""]
    params: nnx.State  # with LoRA: the frozen weights and the adapters
    opt_state: Any  # of what is trained
    spikes: Any = ()  # `learning.spike_guard.Spikes` where the configuration asks for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    step: int  # updates made, this one included
    loss: float  # mean over the trained tokens, before the update
    grad_norm: float  # before clipping
    learning_rate: float
    trained_tokens: int
    # Updates of this phase that were spikes and were not made (`learning.spike_guard`).
    skipped: int = 0
    # The metrics of the loss itself, by name.
    loss_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, float | int]:
        """Return all but the step, under the names that the training log has."""
        values = {}
        for name, value in vars(self).items():
            if name not in ("step", "loss_metrics"):
                values[name] = value
        return values | dict(self.loss_metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    state: TrainState
    steps: int  # updates made in this phase
    stopped: bool  # True if `should_stop` ended it early
    input_state: dict[str, Any]  # the place in the data, for the checkpoint that holds `state`


class NotFiniteError(UserError):
    """The loss or the gradient is NaN or infinite."""


class Trainer:
    """A model on a mesh with its compiled step.

    It holds no weights: they live in the `TrainState` that is passed from step to step.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: TrainerConfig,
        loss: Loss | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Prepare the functions of a step. Each one is compiled at its first call.

        `loss` is by default maximum likelihood with `z_loss`. `devices` are by default those that
        are here; they may be of a topology that is only compiled for. States know nothing of the
        loss: trainers of one model pass them on to each other.
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
        """Return step 0 with a copy of the decoder's weights and an empty optimiser.

        `seed` draws the adapters, if there are any.
        """
        dtype = jnp.dtype(self.config.parameter_dtype)
        weights = jax.tree.map(lambda array: jnp.asarray(array, dtype), nnx.state(decoder))
        weights = jax.device_put(weights, self._program.policy_shardings, may_alias=False)
        with jax.set_mesh(self.mesh):
            return self._program.empty_state(weights, np.uint32(seed))

    def next_phase(self, state: TrainState) -> TrainState:
        """Return the same weights at step 0 of another schedule.

        Adam's moments are kept and still know the gradients. The usual loss has to be learnt
        again.
        """
        shardings = self._program.shardings
        step = jax.device_put(np.int32(0), shardings.step)
        spikes = ()
        if self.config.spike_deviations:
            spikes = jax.device_put(no_spikes(), shardings.spikes)
        return state._replace(step=step, spikes=spikes)

    def abstract_state(self) -> TrainState:
        """Return shapes, types and shardings of a state, without its arrays.

        A checkpoint is restored into it.
        """
        return self._program.abstract_state

    def policy(self, state: TrainState) -> nnx.State:
        """Return the weights of a plain decoder, adapters merged in.

        They may share memory with `state`: copy what is to outlive it.
        """
        if not self.config.lora_rank:
            return state.params
        with jax.set_mesh(self.mesh):
            return self._program.policy(state.params)

    def decoder(self, state: TrainState) -> Decoder:
        """Return a decoder with its own memory, so that training may go on while it samples."""
        weights = jax.tree.map(jnp.copy, self.policy(state))
        return nnx.merge(self._program.policy_graph, weights)

    def train_step(
        self, state: TrainState, batch: Batch, schedule: Schedule
    ) -> tuple[TrainState, dict[str, Array]]:
        """Make one update with this process's `own_rows` of a batch.

        Returns at once, with metrics that are still being computed. `state` cannot be used
        again.
        """
        with jax.set_mesh(self.mesh):
            return self._program.train_step(state, shard_batch(batch, self.mesh), schedule)

    def own_rows(self) -> Int[np.ndarray, " own"]:
        """Return which rows of a step's batch this process has to bring."""
        return own_rows(self.config.batch_size, self.mesh)

    def lower_step(self) -> jax.stages.Lowered:
        """Lower one update of the configured batch for the mesh, without any array.

        `.compile()` of the result needs no device.
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
        """Return this process's batches of a fit over `rows`, beginning with the one of `step`.

        `seed` shuffles the rows. After a restart, `Batches.set_state` goes to the place that a
        checkpoint names. Raises UserError if there are no rows.
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
        """Return log p of every token given its prefix in its segment.

        It is 0 for padding and for the first token of a segment.
        """
        log_probs = np.zeros(rows.tokens.shape, np.float32)
        for start in range(0, rows.num_rows, self.config.batch_size):
            # A last batch that is short continues with the first rows, to keep its shape.
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
    """Train from `state.step` until `steps` updates are made in this phase.

    `batches` are those of `Trainer.batches`; the batch of `state.step` must come next. `on_step`
    sees every step once, in order. `should_stop` is asked before each step and ends the loop.
    """
    steps_done = int(state.step)
    assert batches.next_step == steps_done, (
        f"the batch of step {batches.next_step} comes next and the state has made {steps_done} "
        "steps: make the batches with step=int(state.step)"
    )

    max_skips = trainer.config.max_skips_in_a_row
    stopped = False
    unread: tuple[int, dict[str, Array]] | None = None  # number and metrics of the last step
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
    """Return the number of steps in which every row is seen at least `epochs` times."""
    return -(-num_rows * epochs // batch_size)


def _read(step: int, metrics: dict[str, Array], *, max_skips: int) -> StepMetrics:
    """Wait for a step's metrics and check that the run may go on."""
    values: dict[str, Any] = {name: np.asarray(value).item() for name, value in metrics.items()}
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise NotFiniteError(
            f"step {step} has loss {values['loss']} and gradient norm {values['grad_norm']}: the "
            "run ends before this is saved; lower the learning rate or start from another "
            "checkpoint"
        )
    if "skipped" in values:
        raise_if_too_many(values, step=step, max_skips=max_skips)
        del values["skipped_in_a_row"]

    # The rest are counts and metrics of the loss.
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
    """The parts of an update of one model, besides its state, its batch and its schedule."""

    config: TrainerConfig
    loss: Loss
    mesh: Mesh
    policy_graph: nnx.GraphDef[Decoder]  # of a plain decoder
    graph: nnx.GraphDef[Decoder]  # of the decoder that is trained, with adapters if there are any
    optimizer: optax.GradientTransformation
    attention: Implementation


def make_train_step(
    model: DecoderConfig, config: TrainerConfig, loss: Loss, mesh: Mesh
) -> TrainStep:
    """Return what an update of a model on a mesh needs. No array is made."""
    plain = _abstract_decoder(model, config)
    trained = nnx.eval_shape(lambda: _with_adapters(plain, config, seed=0))
    # By the mesh's platform, which need not be the one that compiles.
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
    """Return the state after one update, and its metrics: a pure function, compiled by `_program`.

    If the update is a spike (`learning.spike_guard`), parameters and optimiser state stay.
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

    # The update. In float32, so that the second moment and the directions are float32.
    gradient = optax.tree.cast(gradient, jnp.float32)
    wide_params = optax.tree.cast(trained, jnp.float32)
    direction, opt_state = setup.optimizer.update(gradient, state.opt_state, wide_params)
    rate = learning_rate(schedule, state.step)
    updated = apply_updates(trained, direction, rate, state.step)

    metrics |= counts
    metrics["loss"] = loss
    metrics["grad_norm"] = optax.global_norm(gradient)
    metrics["learning_rate"] = rate

    # A spike is skipped. The old values are selected, not mixed, so that they stay bit for bit.
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
    """Return a function that gives ((loss, metrics), gradient).

    Its arguments are the trained parameters and a batch, or a part of a batch.
    """

    def loss(trained: nnx.State, part: Batch) -> tuple[Array, dict[str, Array]]:
        decoder = nnx.merge(setup.graph, trained, frozen)
        return setup.loss(
            decoder, part, counts, attention=setup.attention, remat=setup.config.remat
        )

    return jax.value_and_grad(loss, has_aux=True)


def _parts(batch: Batch, count: int, mesh: Mesh) -> Batch:
    """Return the rows in `count` parts, [count, rows / count, time].

    Part n has every count-th row from n on, so that each device cuts what it holds and no row
    moves.
    """
    layout = NamedSharding(mesh, PartitionSpec(None, RULES["batch"].mesh_axes))

    def cut(array: Array) -> Array:
        parts = jnp.moveaxis(array.reshape(-1, count, *array.shape[1:]), 1, 0)
        return jax.lax.with_sharding_constraint(parts, layout)

    return jax.tree.map(cut, batch)


def _accumulated(
    loss_and_gradient: LossAndGradient, trained: nnx.State, parts: Batch
) -> tuple[tuple[Array, dict[str, Array]], nnx.State]:
    """Return loss, metrics and gradient summed over all parts.

    Each part is divided by a count of the whole batch already.
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
    """Return the parameters that are trained, and the others."""
    trained_type = nnx.LoRAParam if config.lora_rank else nnx.Param
    trained, frozen = nnx.split_state(params, trained_type, ...)
    return trained, frozen


def _abstract_decoder(model: DecoderConfig, config: TrainerConfig) -> Decoder:
    """Return a plain decoder without its arrays."""
    dtype = jnp.dtype(config.dtype)
    return nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=dtype))


def _with_adapters(decoder: Decoder, config: TrainerConfig, seed: Any) -> Decoder:
    """Return the decoder that is trained: with fresh adapters if the configuration has a rank."""
    if not config.lora_rank:
        return decoder
    key = jax.random.key(seed)
    return adapted(decoder, rank=config.lora_rank, alpha=config.lora_alpha, key=key)


def _empty_state(setup: TrainStep, weights: nnx.State, seed: Any) -> TrainState:
    """Return step 0 with the weights of a plain decoder."""
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
    """Return the weights of a plain decoder, adapters merged in."""
    decoder = nnx.merge(setup.graph, params)
    return nnx.state(merged(decoder, rank=setup.config.lora_rank, alpha=setup.config.lora_alpha))


def _score(setup: TrainStep, params: nnx.State, batch: Batch) -> Float[Array, "rows time"]:
    """Return log p of every token of a batch."""
    decoder = nnx.merge(setup.graph, params)
    return token_log_probs(decoder, batch, attention=setup.attention, remat=setup.config.remat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """The compiled functions of one model on one mesh, and the layout of their arguments."""

    policy_graph: nnx.GraphDef[Decoder]  # of a plain decoder
    policy_shardings: nnx.State
    policy: Callable[[nnx.State], nnx.State]  # used where there are adapters
    abstract_state: TrainState
    shardings: TrainState
    empty_state: Callable[[nnx.State, np.uint32], TrainState]
    train_step: Callable[[TrainState, Batch, Schedule], tuple[TrainState, dict[str, Array]]]
    score: Callable[[nnx.State, Batch], Array]


@functools.lru_cache(maxsize=8)
def _program(model: DecoderConfig, config: TrainerConfig, loss: Loss, mesh: Mesh) -> _Program:
    """Compile what is used of one model on one mesh.

    The result is kept for the life of the process, so that a second trainer of the same model
    compiles nothing.
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
        # The state's layout is fixed on the way out, or the compiler might choose another one and
        # compile again for it.
        train_step=jax.jit(
            functools.partial(train_step, setup),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
        score=jax.jit(functools.partial(_score, setup), out_shardings=replicated),
    )
