"""AdamW or Muon, with a cosine learning rate, global-norm clipping and weight decay.

    gradient  := gradient * min(1, clip_norm / |gradient|)
    direction := Adam(gradient) + weight_decay * parameter
    parameter := parameter - learning_rate(step) * direction

Norm scales and biases have no decay. With `optimizer muon` the layers' matrices follow their
orthogonalised momentum (Newton-Schulz), times 0.2 sqrt(max(inputs, outputs)), instead of Adam's
direction. That has the usual size of Adam's, so both take the same learning rate (arXiv 2502.16982,
section 2.2). Embedding, head, norms, biases and adapters stay with Adam.

All of it is computed in float32, whatever parameters and the first moment are kept in. A parameter
kept in bfloat16 has 8 bits: at MyGO's rates (5e-7) an update is a hundredth of their last bit, and
rounding to nearest would drop every one. So it is rounded up or down at random, up with the
probability that keeps the mean, by a key that follows from the step.

The learning rate is no part of the optimiser: a `Schedule` is six numbers that reach the compiled
step as arguments, so warm-up, every round of MyGO and the control run share one compilation. Called
by `learning.trainer`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from mujica_jax.config.schema import TrainerConfig
from mujica_jax.errors import UserError

MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # of Adam's directions, measured where Muon was scaled up (arXiv 2502.16982)


class Schedule(NamedTuple):
    """A learning rate that rises linearly and then follows a stretch of half a cosine.

    It rises from 0 to `peak` over `warmup_steps`, then falls towards `end_value` until
    `total_steps`. `begin` and `end` name the stretch: 0 is the peak of the cosine, 1 its end, where
    the rate stays.
    """

    peak: np.float32 | Float[Array, ""]
    end_value: np.float32 | Float[Array, ""]
    total_steps: np.int32 | Int[Array, ""]
    warmup_steps: np.int32 | Int[Array, ""]
    begin: np.float32 | Float[Array, ""]
    end: np.float32 | Float[Array, ""]


def schedule(
    *,
    peak: float,
    end_value: float,
    total_steps: int,
    warmup_steps: int = 0,
    stretch: tuple[float, float] = (0.0, 1.0),
) -> Schedule:
    """Return a checked schedule for one phase of training.

    `stretch` is the phase's part of a cosine that several phases share, from 0 (its peak) to 1 (its
    end). Raises UserError if the rates or the warm-up steps do not fit.
    """
    if not 0 <= end_value <= peak:
        raise UserError(
            f"the learning rate goes from {peak} down to {end_value}: give an end between 0 and "
            "the peak"
        )
    assert 0 <= stretch[0] <= stretch[1] <= 1, f"{stretch} is no stretch of a cosine"
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"{warmup_steps} warm-up steps do not fit into {total_steps} steps: give at most as "
            "many warm-up steps as steps"
        )
    # Fixed types, because a schedule with other types would compile the step again.
    begin, end = stretch
    return Schedule(
        peak=np.float32(peak),
        end_value=np.float32(end_value),
        total_steps=np.int32(total_steps),
        warmup_steps=np.int32(warmup_steps),
        begin=np.float32(begin),
        end=np.float32(end),
    )


def learning_rate(schedule: Schedule, step: int | Int[Array, ""]) -> Float[Array, ""]:
    """Return the rate of the update number `step`, counted from 0.

    The first warm-up step is not idle: it runs at peak / warmup_steps.
    """
    peak, end_value, total_steps, warmup_steps, begin, end = (
        jnp.asarray(value, jnp.float32) for value in schedule
    )
    step = jnp.asarray(step, jnp.float32)

    # Linear warm-up.
    rising_rate = peak * (step + 1.0) / jnp.maximum(warmup_steps, 1.0)

    # Cosine.
    progress = (step - warmup_steps) / jnp.maximum(total_steps - warmup_steps, 1.0)
    progress = jnp.clip(progress, 0.0, 1.0)
    progress = begin + (end - begin) * progress
    falling_rate = end_value + (peak - end_value) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))

    return jnp.where(step < warmup_steps, rising_rate, falling_rate)


def make_optimizer(config: TrainerConfig) -> optax.GradientTransformation:
    """Return clipping, direction and decay as one Optax transformation.

    The caller multiplies its updates by minus the learning rate.
    """
    direction = optax.scale_by_adam(
        b1=config.b1, b2=config.b2, mu_dtype=jnp.dtype(config.first_moment_dtype)
    )
    if config.optimizer == "muon":
        direction = optax.partition(
            {"muon": _muon(config), "adamw": direction}, _transformation_names
        )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def _muon(config: TrainerConfig) -> optax.GradientTransformation:
    """Return orthogonalised momentum, scaled to the usual size of Adam's direction."""

    def dimensions(params: Any) -> Any:
        return jax.tree.map_with_path(_matrix_dimensions, params)

    def scale_like_adam(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map_with_path(_scaled_like_adam, updates)

    return optax.chain(
        optax.contrib.scale_by_muon(
            beta=MUON_MOMENTUM,
            mu_dtype=jnp.dtype(config.first_moment_dtype),
            weight_dimension_numbers=dimensions,
        ),
        optax.stateless(scale_like_adam),
    )


def _transformation_names(params: Any) -> Any:
    """Return the name of each parameter's transformation.

    It is "muon" for the matrices of the layers, known by the names of `models.layers`, and "adamw"
    for all other parameters.
    """
    return jax.tree.map_with_path(
        lambda path, _: "muon" if path_name(path).endswith("_kernel") else "adamw", params
    )


def _matrix_dimensions(
    path: jax.tree_util.KeyPath, kernel: Array
) -> optax.contrib.MuonDimensionNumbers:
    """Return which dimensions of a kernel are inputs and which outputs; the first is the layer."""
    is_output_kernel = path_name(path).endswith("output_kernel")
    first_output = kernel.ndim - 1 if is_output_kernel else 2
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(1, first_output)),
        output_axis=tuple(range(first_output, kernel.ndim)),
    )


def _scaled_like_adam(
    path: jax.tree_util.KeyPath, update: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return 0.2 sqrt(max(inputs, outputs)) * update."""
    dimensions = _matrix_dimensions(path, update)
    inputs = _size_of_axes(update, dimensions.reduction_axis)
    outputs = _size_of_axes(update, dimensions.output_axis)
    return MUON_UPDATE_RMS * math.sqrt(max(inputs, outputs)) * update


def _size_of_axes(array: Array, axes: Any) -> int:
    return math.prod(array.shape[axis] for axis in np.atleast_1d(axes))


def apply_updates(params: Any, direction: Any, rate: Float[Array, ""], step: Int[Array, ""]) -> Any:
    """Return the parameters after an update, in the types they have."""
    leaves, structure = jax.tree.flatten(params)
    changes = jax.tree.leaves(direction)
    updated_leaves = []
    for number, (leaf, change) in enumerate(zip(leaves, changes, strict=True)):
        updated = leaf.astype(jnp.float32) - rate * change
        updated_leaves.append(_rounded(updated, leaf.dtype, step, number))
    return jax.tree.unflatten(structure, updated_leaves)


def _rounded(
    values: Float[Array, "..."], dtype: Any, step: Int[Array, ""], number: int
) -> Float[Array, "..."]:
    """Round to bfloat16 at random, or return float32 as it is.

    Bfloat16 is the upper half of float32's bits. Random lower bits carry into it as often as they
    should. `number` is the parameter's, for a random key of its own.
    """
    if dtype == jnp.float32:
        return values
    assert dtype == jnp.bfloat16, f"parameters are kept in float32 or bfloat16, not in {dtype}"
    key = jax.random.fold_in(jax.random.key(number), step)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    upper_bits = bits & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper_bits, jnp.float32).astype(jnp.bfloat16)


def decayed(params: Any) -> Any:
    """Return True for matrices, False for norm scales and biases.

    By name: stacked over layers, all of them have two dimensions or more.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(("norm", "bias")), params
    )


def path_name(path: jax.tree_util.KeyPath) -> str:
    """Return a tree path as `params/layers/query_kernel`, without the `value` inside a variable."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
