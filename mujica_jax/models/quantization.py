"""Quantise the engine's weights to eight bits with qwix.

This takes a quarter of the memory of float32, and half of that of bfloat16.

    kernel = values * scale
    int8:          scale = max |kernel| / 127.5
    float8_e4m3fn: scale = max |kernel| / 448

The scale is float32, one for each output channel. `w8a8` stores int8 and rounds the rows that are
multiplied to int8 too, with one scale for each row. Then a product is one of integers
(`layers.IntegerProduct`). The other types leave activations unrounded.

Only the seven projections of each layer are quantised. Embedding, norms, biases and head keep the
compute type. Training stays in float32: the engine's copy is made again for every policy.
`runs.parts` calls this module; `layers.Block` multiplies.
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
TYPES: Mapping[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "w8a8": jnp.int8}


def engine_weights(
    weights: nnx.State, config: DecoderConfig, storage: Storage, dtype: DTypeLike
) -> nnx.State:
    """Return a copy of a decoder's weights to sample with.

    The projections of its layers are stored as `storage` says, everything else in `dtype`.
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


# Compiled, because op by op float32 temporaries would be as large as the matrix.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(kernel: Float[Array, "layers *shape"], inputs: int, storage: str) -> Any:
    """Return a kernel as a `qwix.QArray`, or as an `IntegerProduct` around one.

    The first `inputs` dimensions after the layers are contracted. Both arrays of the result keep
    the leading axis, so that a scan slices them like a kernel.
    """
    qwix = import_extra("qwix", f"engine.weights {storage}")
    channels = (0, *range(1 + inputs, kernel.ndim))
    quantized = qwix.quantize(kernel.astype(jnp.float32), TYPES[storage], channelwise_axes=channels)
    return IntegerProduct(quantized) if storage == "w8a8" else quantized
