"""Quantise the engine's weights to eight bits with qwix.

    kernel = values * scale
    int8:          scale = max |kernel| / 127.5
    float8_e4m3fn: scale = max |kernel| / 448

Each output channel has its own scale, in float32, and the maximum runs over all inputs of the
channel. The values take a quarter of the memory of float32, or half of the memory of bfloat16.

Values of `engine.weights`:

    compute   no quantisation
    int8      kernels in int8, activations as they are
    fp8       kernels in float8_e4m3fn, activations as they are
    w8a8      kernels in int8. The rows that are multiplied are rounded to int8 too, with one scale
              for each row, so that products are products of integers (`layers.IntegerProduct`)

Only the seven kernels of each layer are quantised. Embedding, norms, biases and head keep the
compute type. Training does not use the quantised weights: each new policy is quantised again for
the engine. `runs.parts` calls this module, and `layers.Block` multiplies with its results.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import IntegerProduct, projections
from mujica_jax.runtime.extras import import_extra

Storage = Literal["compute", "int8", "fp8", "w8a8"]
# Type of the stored values.
TYPES: Mapping[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "w8a8": jnp.int8}


def engine_weights(
    weights: nnx.State, config: DecoderConfig, storage: Storage, dtype: DTypeLike
) -> nnx.State:
    """Return a copy of a decoder's weights for the engine.

    The kernels of the layers are stored as `storage` says, and all other weights in `dtype`.
    """
    quantized_kernels = {}
    if storage != "compute":
        quantized_kernels = {weight.name: weight for weight in projections(config)}

    def copy(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        if path[0] == "layers" and path[1] in quantized_kernels:
            inputs = quantized_kernels[path[1]].inputs
            return variable.replace(_quantized(variable.get_value(), inputs, storage))
        return jax.tree.map(lambda array: jnp.array(array, dtype), variable)

    return nnx.map_state(copy, weights)


# Compiled, because without compilation each operation would make a float32 copy of the kernel.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(kernel: Float[Array, "layers *shape"], inputs: int, storage: str) -> Any:
    """Return a kernel as a `qwix.QArray`, or for "w8a8" as an `IntegerProduct` that holds one.

    The first `inputs` dimensions after the `layers` axis are contracted. The values and the scales
    both keep the `layers` axis, so that a scan slices them like a kernel.
    """
    qwix = import_extra("qwix", f"engine.weights {storage}")
    channels = (0, *range(1 + inputs, kernel.ndim))
    quantized = qwix.quantize(kernel.astype(jnp.float32), TYPES[storage], channelwise_axes=channels)
    return IntegerProduct(quantized) if storage == "w8a8" else quantized
