"""The trainer: one compiled step of a loss (`learning.losses`) on packed rows, and the loop around
it.

The loop's order is fixed:

    1. stop, if asked to;
    2. draw the batch of this step, a pure function of (seed, step), from a Grain iterator whose
       place is saved with the state;
    3. dispatch the step;
    4. read the metrics of the step before, while this one runs; a loss or gradient that is not
       finite, and too many spikes (`learning.spike_guard`), end the run here.

The metrics of the last step are read before `fit` returns, and no batch is drawn beyond it: what it
returns is never broken and may be saved. A run restored from there continues with exactly the
batches it would have seen. Where to save, a caller cuts the phase into stretches.

The step is compiled once a process for each (rows, row_tokens), shared by all phases and all
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
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.optimizer import (
    Schedule,
    apply_updates,
    learning_rate,
    make_optimizer,
    schedule,
)
from mujica_jax.learning.spike_guard import detect_spike, no_spikes, raise_if_too_many
from mujica_jax.models.attention import resolve
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.lora import adapted, check_rank, merged
from mujica_jax.models.sharding import RULES, make_mesh, own_rows, shard_batch, shardings_of
from mujica_jax.trajectories.batches import Batches
from mujica_jax.trajectories.packing import Batch, PackedRows


class TrainState(NamedTuple):
    """All that a step changes. `Trainer.train_step` consumes it: its buffers are reused for the
    next state."""

    step: Int[
        Array, ""
    ]  # updates made in this phase; the schedule and the order of batches count from its start
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
    skipped: int = (
        0  # updates of this phase that were spikes and were not made (`learning.spike_guard`)
    )
    of_loss: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  # what this loss tells of itself, by name

    def values(self) -> dict[str, float | int]:
        """All but the step, under the names that the training log has."""
        own = {name: value for name, value in vars(self).items() if name not in ("step", "of_loss")}
        return own | dict(self.of_loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    state: TrainState
    steps: int  # updates made in this phase
    stopped: bool  # True if `should_stop` ended it early
    input_state: dict[str, Any]  # the place in the data, for the checkpoint that holds `state`


class NotFinite(UserError):
    """The loss or the gradient is NaN or infinite."""


class Trainer:
    """A model on a mesh with its compiled step. It holds no weights: they live in the `TrainState`
    that goes round."""

    def __init__(
        self,
        model: DecoderConfig,
        config: TrainerConfig,
        loss: Loss | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """With this loss (None: maximum likelihood with `z_loss`), on these devices (None: those
        that are here); they may be of a topology that is only compiled for. States know nothing of
        the loss: trainers of one model pass them on to each other."""
        check_rows(config)
        check_rank(model, config.lora_rank)
        self.model, self.config = model, config
        self.loss = MLE(z_loss=config.z_loss) if loss is None else loss
        self.mesh = make_mesh(config.data, config.fsdp, config.tensor, devices)
        self._program = _program(model, config, self.loss, self.mesh)

    def initial_state(self, decoder: Decoder, *, seed: int = 0) -> TrainState:
        """Step 0 with a copy of the decoder's weights and an empty optimiser; `seed` draws the
        adapters, where there are some."""
        kept = jnp.dtype(self.config.parameter_dtype)
        weights = jax.tree.map(lambda array: jnp.asarray(array, kept), nnx.state(decoder))
        weights = jax.device_put(weights, self._program.policy_shardings, may_alias=False)
        with jax.set_mesh(self.mesh):
            return self._program.empty_state(weights, np.uint32(seed))

    def next_phase(self, state: TrainState) -> TrainState:
        """The same weights at step 0 of another schedule; Adam's moments are kept and still know
        the gradients, and what a usual loss is has to be learnt again."""
        shardings = self._program.shardings
        spikes = (
            jax.device_put(no_spikes(), shardings.spikes) if self.config.spike_deviations else ()
        )
        return state._replace(step=jax.device_put(np.int32(0), shardings.step), spikes=spikes)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of a state, without its arrays: what a checkpoint is restored
        into."""
        return self._program.abstract_state

    def policy(self, state: TrainState) -> nnx.State:
        """The weights of a plain decoder, adapters merged in. They may share memory with `state`:
        copy what is to outlive it."""
        with jax.set_mesh(self.mesh):
            return self._program.policy(state.params)

    def decoder(self, state: TrainState) -> Decoder:
        """A decoder of its own memory, so that training may go on while it samples."""
        return nnx.merge(self._program.policy_graph, jax.tree.map(jnp.copy, self.policy(state)))

    def train_step(
        self, state: TrainState, batch: Batch, schedule: Schedule
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update with this process's `own_rows` of a batch. Returns at once, with metrics that
        are still being computed; `state` cannot be used again."""
        with jax.set_mesh(self.mesh):
            return self._program.train_step(state, shard_batch(batch, self.mesh), schedule)

    def own_rows(self) -> Int[np.ndarray, " own"]:
        """Which rows of a step's batch this process has to bring."""
        return own_rows(self.config.rows_per_step, self.mesh)

    def lower_step(self) -> jax.stages.Lowered:
        """One update of the configured batch, lowered for the mesh without any array: `.compile()`
        asks for no device."""
        shape = (self.config.rows_per_step, self.config.row_tokens)
        rows = NamedSharding(self.mesh, PartitionSpec(RULES["batch"].mesh_axes))
        integers: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        mask: Any = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows)
        numbers: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        batch = Batch(
            integers, integers, integers, mask, {name: numbers for name in self.loss.columns}
        )
        with jax.set_mesh(self.mesh):
            step: Any = self._program.train_step
            return step.lower(
                self._program.abstract_state,
                batch,
                schedule(peak=1.0, end_value=1.0, total_steps=1),
            )

    def score(self, state: TrainState, rows: PackedRows) -> Float[np.ndarray, "rows time"]:
        """log p of every token given its prefix in its segment; 0 for padding and first tokens."""
        scores = np.zeros(rows.tokens.shape, np.float32)
        for start in range(0, rows.num_rows, self.config.rows_per_step):
            chosen = np.arange(start, start + self.config.rows_per_step)
            # A last batch that is short begins again, to keep its shape.
            batch = rows.batch(chosen[self.own_rows()] % rows.num_rows)
            with jax.set_mesh(self.mesh):
                scored = np.asarray(
                    self._program.score(state.params, shard_batch(batch, self.mesh))
                )
            inside = chosen < rows.num_rows
            scores[chosen[inside]] = scored[inside]
        return scores


def fit(
    trainer: Trainer,
    state: TrainState,
    rows: PackedRows,
    *,
    schedule: Schedule,
    steps: int,
    seed: int,
    input_state: dict[str, Any] | None = None,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Train from `state.step` until `steps` updates are made in this phase, or `should_stop` ends
    the loop.

    `input_state` is what the checkpoint of `state` says about the place in the data; without one it
    is the place of `state.step`. `on_step` sees every step once, in order."""
    own, columns = trainer.own_rows(), trainer.loss.columns
    batches = Batches(rows, trainer.config.rows_per_step, seed=seed, own=own, columns=columns)
    done = int(state.step)
    if input_state is None:
        batches.seek(done)
    else:
        batches.set_state(input_state)
    stopped, unread = False, None
    read = functools.partial(_read, max_skips=trainer.config.max_skips_in_a_row)
    while done < steps and not (stopped := should_stop()):
        state, metrics = trainer.train_step(state, next(batches), schedule)
        done += 1
        if unread is not None:
            on_step(read(*unread))
        unread = (done, metrics)
    if unread is not None:
        on_step(read(*unread))
    return FitResult(state=state, steps=done, stopped=stopped, input_state=batches.get_state())


def steps_of_epochs(num_rows: int, rows_per_step: int, epochs: int) -> int:
    """Steps in which every row is seen at least `epochs` times."""
    return -(-num_rows * epochs // rows_per_step)


def _read(step: int, metrics: dict[str, Array], *, max_skips: int) -> StepMetrics:
    """Wait for a step's metrics."""
    values: dict[str, Any] = {name: np.asarray(value).item() for name, value in metrics.items()}
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise NotFinite(
            f"step {step} has loss {values['loss']} and gradient norm {values['grad_norm']}: the "
            "run ends before this is saved; lower the learning rate or start from another "
            "checkpoint"
        )
    if "skipped" in values:
        raise_if_too_many(values, step=step, most=max_skips)
        del values["skipped_in_a_row"]
    own = {field.name for field in dataclasses.fields(StepMetrics)} & set(values)
    of_loss = {name: value for name, value in values.items() if name not in own}
    return StepMetrics(step=step, of_loss=of_loss, **{name: values[name] for name in own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """What is compiled for one model on one mesh."""

    policy_graph: nnx.GraphDef[Decoder]  # of a plain decoder
    policy_shardings: nnx.State
    policy: Callable[[nnx.State], nnx.State]
    abstract_state: TrainState
    shardings: TrainState
    empty_state: Callable[[nnx.State, np.uint32], TrainState]
    train_step: Callable[[TrainState, Batch, Schedule], tuple[TrainState, dict[str, Array]]]
    score: Callable[[nnx.State, Batch], Array]


@functools.lru_cache(maxsize=8)
def _program(model: DecoderConfig, config: TrainerConfig, loss: Loss, mesh: Mesh) -> _Program:
    """Kept for the life of the process, so that a second trainer of the same model compiles
    nothing."""
    plain = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=jnp.dtype(config.dtype)))
    policy_graph, abstract_weights = nnx.split(plain)
    kept = jnp.dtype(config.parameter_dtype)
    abstract_weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kept), abstract_weights
    )
    rank, alpha = config.lora_rank, config.lora_alpha

    def with_adapters(decoder: Decoder, seed: Any) -> Decoder:
        return (
            adapted(decoder, rank=rank, alpha=alpha, key=jax.random.key(seed)) if rank else decoder
        )

    graph = nnx.graphdef(nnx.eval_shape(lambda: with_adapters(plain, 0)))
    optimizer = make_optimizer(config)

    def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
        """What is trained, and the rest."""
        trained, frozen = nnx.split_state(params, nnx.LoRAParam if rank else nnx.Param, ...)
        return trained, frozen

    def empty_state(weights: nnx.State, seed: Any) -> TrainState:
        params = nnx.state(with_adapters(nnx.merge(policy_graph, weights), seed))
        spikes = no_spikes() if config.spike_deviations else ()
        opt_state = optimizer.init(optax.tree.cast(split(params)[0], jnp.float32))
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, spikes)

    def policy(params: nnx.State) -> nnx.State:
        return nnx.state(merged(nnx.merge(graph, params), rank=rank, alpha=alpha))

    # By the mesh's platform, which need not be the one that compiles.
    platform = mesh.devices.flat[0].platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    attention = resolve(config.attention, time=config.row_tokens, platform=platform)

    def train_step(
        state: TrainState, batch: Batch, schedule: Schedule
    ) -> tuple[TrainState, dict[str, Array]]:
        trained, frozen = split(state.params)
        counts = loss.counts(batch)

        def loss_of(trained: nnx.State, part: Batch) -> tuple[Array, dict[str, Array]]:
            decoder = nnx.merge(graph, trained, frozen)
            return loss(decoder, part, counts, attention=attention, remat=config.remat)

        loss_and_gradient = jax.value_and_grad(loss_of, has_aux=True)
        if config.accumulation_steps == 1:
            (value, metrics), gradient = loss_and_gradient(trained, batch)
        else:
            parts = _parts(batch, config.accumulation_steps, mesh)
            (value, metrics), gradient = _accumulated(loss_and_gradient, trained, parts)
        # So that the second moment and the directions are float32.
        gradient, wide = (optax.tree.cast(tree, jnp.float32) for tree in (gradient, trained))
        direction, opt_state = optimizer.update(gradient, state.opt_state, wide)
        rate = learning_rate(schedule, state.step)
        after, spikes = apply_updates(trained, direction, rate, state.step), state.spikes
        metrics |= counts | {
            "loss": value,
            "grad_norm": optax.global_norm(gradient),
            "learning_rate": rate,
        }
        if config.spike_deviations:
            limits = {"deviations": config.spike_deviations, "window": config.spike_window_steps}
            skip, spikes = detect_spike(spikes, value, metrics["grad_norm"], **limits)
            # Chosen, not mixed, so that each is what it was.
            after, opt_state = optax.tree.where(
                skip, (trained, state.opt_state), (after, opt_state)
            )
            metrics |= {"skipped": spikes.skipped, "skipped_in_a_row": spikes.in_a_row}
        return TrainState(
            state.step + 1, nnx.merge_state(after, frozen), opt_state, spikes
        ), metrics

    def score(params: nnx.State, batch: Batch) -> Array:
        return token_log_probs(
            nnx.merge(graph, params), batch, attention=attention, remat=config.remat
        )

    abstract_state = jax.eval_shape(empty_state, abstract_weights, np.uint32(0))
    shardings, policy_shardings = (
        shardings_of(abstract_state, mesh),
        shardings_of(abstract_weights, mesh),
    )
    whole = NamedSharding(mesh, PartitionSpec())
    return _Program(
        policy_graph=policy_graph,
        policy_shardings=policy_shardings,
        policy=jax.jit(policy, out_shardings=policy_shardings) if rank else lambda params: params,
        abstract_state=jax.tree.map(
            lambda leaf, at: leaf.update(sharding=at), abstract_state, shardings
        ),
        shardings=shardings,
        empty_state=jax.jit(empty_state, out_shardings=shardings, donate_argnums=0),
        # The state's layout is fixed on the way out, or the compiler might choose another one and
        # compile again for it.
        train_step=jax.jit(train_step, out_shardings=(shardings, whole), donate_argnums=0),
        score=jax.jit(score, out_shardings=whole),
    )


def _parts(batch: Batch, count: int, mesh: Mesh) -> Batch:
    """The rows in `count` parts, [count, rows / count, time]. Part n has every count-th row from n
    on, so that each device cuts what it holds and no row moves."""
    layout = NamedSharding(mesh, PartitionSpec(None, RULES["batch"].mesh_axes))

    def cut(array: Array) -> Array:
        parts = jnp.moveaxis(array.reshape(-1, count, *array.shape[1:]), 1, 0)
        return jax.lax.with_sharding_constraint(parts, layout)

    return jax.tree.map(cut, batch)


def _accumulated(
    loss_and_gradient: Callable[
        [nnx.State, Batch], tuple[tuple[Array, dict[str, Array]], nnx.State]
    ],
    trained: nnx.State,
    parts: Batch,
) -> tuple[tuple[Array, dict[str, Array]], nnx.State]:
    """Loss, metrics and gradient of all parts together: each is divided by a count of the whole
    already."""

    def add_part(
        total: tuple[Array, nnx.State], part: Batch
    ) -> tuple[tuple[Array, nnx.State], dict[str, Array]]:
        (loss, metrics), gradient = loss_and_gradient(trained, part)
        return (
            total[0] + loss,
            optax.tree.add(total[1], optax.tree.cast(gradient, jnp.float32)),
        ), metrics

    nothing = optax.tree.zeros_like(trained, dtype=jnp.float32)
    (loss, gradient), metrics = jax.lax.scan(add_part, (jnp.zeros((), jnp.float32), nothing), parts)
    return (loss, jax.tree.map(lambda of_parts: of_parts.sum(axis=0), metrics)), gradient
