"""LoRA adapters on the seven kernels of every layer (Hu et al., 2021, arXiv 2106.09685).

    product(rows) = rows @ W + (alpha / rank) * (rows @ A) @ B

    W: [inputs, outputs], frozen
    A: [inputs, rank], trained, drawn at the start (He uniform)
    B: [rank, outputs], trained, zero at the start

An adapted decoder is a decoder with three additions in its `Block`. Beside each stacked kernel it
has `<kernel>_lora_a` and `<kernel>_lora_b`, which are `nnx.LoRAParam`s of shape [layers, ...].
`adapter_scale` holds alpha / rank. `Block.product` adds the adapter: to W itself if it computes in
float32, else to the product with W. Adapters are float32 for every compute type.

`merged` turns an adapted decoder into a plain one, because the engine and the Hugging Face export
support only plain decoders. `learning.trainer` calls this module, and `adapters` reads and writes
adapters.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mujica_jax.errors import UserError
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import projections

HE_UNIFORM = jax.nn.initializers.he_uniform()


def check_rank(config: DecoderConfig, rank: int) -> None:
    """Check that the rank is at most the smaller side of each kernel.

    A higher rank would train more numbers than the kernel has, and could express nothing more.
    Raises UserError.
    """
    smallest = min(projections(config), key=lambda weight: min(weight.sides))
    inputs, outputs = smallest.sides
    if rank > min(inputs, outputs):
        raise UserError(
            f"trainer.lora_rank is {rank}, but {smallest.name} of this model is a matrix of "
            f"{inputs} x {outputs}: use a rank of at most {min(inputs, outputs)}"
        )


def adapted(decoder: Decoder, *, rank: int, alpha: float, key: Array) -> Decoder:
    """Return the decoder with fresh adapters. It shares the weights of `decoder`.

    B is zero, so the result computes the same as `decoder`. `key` is a random key for A. Raises
    UserError if the rank is too high.
    """
    check_rank(decoder.config, rank)
    adapted_decoder = nnx.clone(decoder)
    layers = adapted_decoder.layers
    layers.adapter_scale = alpha / rank

    layer_keys = jax.random.split(key, decoder.config.num_layers)
    for number, weight in enumerate(projections(decoder.config)):
        inputs, outputs = weight.sides
        dtype = getattr(layers, weight.name).get_value().dtype
        # The factor of 2 has no meaning today. It keeps the values that earlier versions drew.
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        weight_keys = fold_in(layer_keys, 2 * number)
        draw = jax.vmap(functools.partial(HE_UNIFORM, shape=(inputs, rank), dtype=dtype))
        # A is drawn in the type of the kernel. Without the barrier XLA would fuse the conversion to
        # float32 into the draw, and A would not be rounded to that type.
        a = jax.lax.optimization_barrier(draw(weight_keys))
        b = jnp.zeros((len(layer_keys), rank, outputs))

        # A side of a kernel may consist of several dimensions. The mesh splits the first of them.
        a_axes = ("layers", weight.axes[0], None)
        b_axes = ("layers", None, weight.axes[weight.inputs])
        a_param = nnx.LoRAParam(a.astype(jnp.float32), logical_axes=a_axes)
        b_param = nnx.LoRAParam(b.astype(jnp.float32), logical_axes=b_axes)
        setattr(layers, f"{weight.name}_lora_a", a_param)
        setattr(layers, f"{weight.name}_lora_b", b_param)
    return adapted_decoder


def merged(decoder: Decoder, *, rank: int, alpha: float) -> Decoder:
    """Return a plain decoder that computes the same as the adapted one.

    Each kernel W becomes W + (alpha / rank) * A B.
    """
    plain = nnx.eval_shape(lambda: Decoder(decoder.config, rngs=nnx.Rngs(0), dtype=decoder.dtype))
    nnx.update(plain, nnx.state(decoder, nnx.Not(nnx.LoRAParam)))
    for weight in projections(decoder.config):
        kernel = getattr(plain.layers, weight.name)
        a = getattr(decoder.layers, f"{weight.name}_lora_a").get_value()
        b = getattr(decoder.layers, f"{weight.name}_lora_b").get_value()
        kernel.set_value(add_product(kernel.get_value(), a, b, alpha / rank))
    return plain


def add_product(
    kernel: Float[Array, "layers *shape"],
    a: Float[Array, "layers inputs rank"],
    b: Float[Array, "layers rank outputs"],
    scale: float | Float[Array, "layers 1 1"],
) -> Float[Array, "layers *shape"]:
    """Return the kernel W plus scale * A B, in float32."""
    # Multiply with full float32 precision. By default accelerators multiply float32 matrices with
    # less, and the weights would keep this error.
    product = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + product.reshape(kernel.shape)
