"""AdamW or Muon, with a cosine learning rate, global-norm clipping and weight decay.

    gradient  := gradient * min(1, clip_norm / |gradient|)
    direction := Adam(gradient) + weight_decay * parameter
    parameter := parameter - learning_rate(step) * direction

|gradient| is the norm of the gradient of all trained parameters together. Norm scales and biases
have no weight decay.

Muon (`trainer.optimizer muon`) has another direction for the kernels of the layers:

    direction := 0.2 sqrt(max(inputs, outputs)) * orthogonalised(momentum)
                 + weight_decay * parameter

Newton-Schulz iterations orthogonalise the momentum. The factor gives the direction the usual size
of Adam's direction, so both can use the same learning rate (arXiv 2502.16982, section 2.2).
Embedding, head, norms, biases and LoRA adapters are still updated by Adam.

Types: everything is computed in float32. Parameters and the first moment may be stored in bfloat16.
A parameter in bfloat16 has 8 significant bits. At MyGO's learning rate of 5e-7, an update is about
a hundredth of the last bit. Rounding to the nearest value would drop every such update. So the
updated parameter is rounded up or down at random, with the probabilities that keep its mean. The
random key follows from the step, so a run can be repeated.

The learning rate is not part of the optimiser. A `Schedule` has six numbers, which are arguments of
the compiled step. So warm-up, all rounds of MyGO and the control run share one compiled step.
`learning.trainer` calls this module.
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

# Decay of Muon's momentum.
MUON_MOMENTUM = 0.95
# Root mean square of the numbers in Adam's directions, as arXiv 2502.16982 measured it.
MUON_UPDATE_RMS = 0.2


class Schedule(NamedTuple):
    """A learning rate that rises linearly and then follows a part of a half cosine.

        step < warmup_steps:  rate = peak (step + 1) / warmup_steps
        otherwise:            rate = end_value + (peak - end_value) (1 + cos(pi p)) / 2

    p rises linearly from `begin`, after the warm-up steps, to `end` at step `total_steps`, and then
    stays. 0 is the beginning of the half cosine, where the rate is `peak`. 1 is its end, where the
    rate is `end_value`.
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

    Several phases may share one half cosine. `stretch` is the part of it that belongs to this
    phase, from 0 (the peak) to 1 (the end). Raises UserError if the rates or the warm-up steps do
    not fit together.
    """
    if not 0 <= end_value <= peak:
        raise UserError(
            f"the learning rate goes from {peak} down to {end_value}: set an end between 0 and "
            "the peak"
        )
    assert 0 <= stretch[0] <= stretch[1] <= 1, (
        f"the stretch is {stretch} and must be two rising numbers between 0 and 1"
    )
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"{warmup_steps} warm-up steps do not fit into {total_steps} steps: set at most "
            f"{total_steps} warm-up steps"
        )
    # The types are fixed, because the step would be compiled again for a schedule of other types.
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
    """Return the learning rate of step `step`, counted from 0. `Schedule` has the formula.

    The first warm-up step has the rate peak / warmup_steps, so it changes the parameters.
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
    """Return clipping, direction and weight decay as one Optax transformation.

    The caller multiplies the result of the transformation by minus the learning rate.
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
    """Return Muon as an Optax transformation, without weight decay and learning rate.

    Its result is the orthogonalised momentum, scaled to the usual size of Adam's direction.
    """

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
    """Return the name of the transformation for each parameter.

    It is "muon" for the kernels of the layers, which `models.layers` names `..._kernel`, and
    "adamw" for all other parameters.
    """
    return jax.tree.map_with_path(
        lambda path, _: "muon" if path_name(path).endswith("_kernel") else "adamw", params
    )


def _matrix_dimensions(
    path: jax.tree_util.KeyPath, kernel: Array
) -> optax.contrib.MuonDimensionNumbers:
    """Return which dimensions of a stacked kernel are inputs and which are outputs.

    Dimension 0 is the layer. `output_kernel` is [layers, heads, head_dim, hidden] and has several
    input dimensions. All other kernels have one.
    """
    is_output_kernel = path_name(path).endswith("output_kernel")
    first_output = kernel.ndim - 1 if is_output_kernel else 2
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(1, first_output)),
        output_axis=tuple(range(first_output, kernel.ndim)),
    )


def _scaled_like_adam(
    path: jax.tree_util.KeyPath, update: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return 0.2 sqrt(max(inputs, outputs)) * update, for the update of a kernel."""
    dimensions = _matrix_dimensions(path, update)
    inputs = _size_of_axes(update, dimensions.reduction_axis)
    outputs = _size_of_axes(update, dimensions.output_axis)
    return MUON_UPDATE_RMS * math.sqrt(max(inputs, outputs)) * update


def _size_of_axes(array: Array, axes: Any) -> int:
    """Return the product of the sizes of these dimensions. `axes` is one number or several."""
    return math.prod(array.shape[axis] for axis in np.atleast_1d(axes))


def apply_updates(params: Any, direction: Any, rate: Float[Array, ""], step: Int[Array, ""]) -> Any:
    """Return parameter - rate * direction for all parameters, in the types of the parameters.

    `step` determines how bfloat16 parameters are rounded.
    """
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
    """Round float32 values to bfloat16 at random, or return them as they are for float32.

    A bfloat16 is the upper 16 bits of a float32. The function adds a random number to the lower 16
    bits and cuts them off. The larger the part that is cut off, the more often the sum carries into
    the upper bits. So the mean of the result is the value.

    `number` is the number of the parameter, so that each parameter has its own random key.
    """
    if dtype == jnp.float32:
        return values
    assert dtype == jnp.bfloat16, f"a parameter is {dtype} and must be float32 or bfloat16"
    key = jax.random.fold_in(jax.random.key(number), step)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    upper_bits = bits & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper_bits, jnp.float32).astype(jnp.bfloat16)


def decayed(params: Any) -> Any:
    """Return True for each parameter with weight decay, and False for norm scales and biases.

    The names decide and not the dimensions: a norm scale that is stacked over layers has two
    dimensions, like a matrix.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(("norm", "bias")), params
    )


def path_name(path: jax.tree_util.KeyPath) -> str:
    """Return a tree path as text, such as `params/layers/query_kernel`.

    Flax variables add `value` to the end of a path. The function removes it.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
