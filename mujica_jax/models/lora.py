"""LoRA adapters on the seven projections of every layer (Hu et al. 2021).

    rows @ W + (alpha / rank) * (rows @ A) @ B

    A: [inputs, rank], drawn (He, uniform)
    B: [rank, outputs], zero

An adapted decoder is a decoder whose `Block` has, beside each stacked kernel, `<kernel>_lora_a` and
`<kernel>_lora_b` (`nnx.LoRAParam`, stacked over layers like the kernel) and an `adapter_scale`, by
which `Block.product` adds them: in float32 to W, else to the product. Adapters are float32 whatever
the compute type. `merged` gives back a plain decoder: the engine and the Hugging Face export know
no adapters. Called by `learning.trainer`; `adapters` stores them.
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
    """Check that the rank is at most each matrix's smaller side. Raises UserError.

    A higher one would train more numbers than the matrix has and express nothing more.
    """
    smallest = min(projections(config), key=lambda weight: min(weight.sides))
    inputs, outputs = smallest.sides
    if rank > min(inputs, outputs):
        raise UserError(
            f"trainer.lora_rank is {rank} and {smallest.name} of this model is a matrix of "
            f"{inputs} x {outputs}: use a rank of at most {min(inputs, outputs)}"
        )


def adapted(decoder: Decoder, *, rank: int, alpha: float, key: Array) -> Decoder:
    """Return the decoder with fresh adapters, which computes what it computed before.

    It shares the weights of `decoder`.
    """
    check_rank(decoder.config, rank)
    adapted_decoder = nnx.clone(decoder)
    layers = adapted_decoder.layers
    layers.adapter_scale = alpha / rank

    layer_keys = jax.random.split(key, decoder.config.num_layers)
    for number, weight in enumerate(projections(decoder.config)):
        inputs, outputs = weight.sides
        dtype = getattr(layers, weight.name).get_value().dtype
        # Twice the number, so that adapters of existing runs are drawn alike.
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        weight_keys = fold_in(layer_keys, 2 * number)
        draw = jax.vmap(functools.partial(HE_UNIFORM, shape=(inputs, rank), dtype=dtype))
        # Drawn in the type of the kernel: fused, it would not be rounded to that.
        a = jax.lax.optimization_barrier(draw(weight_keys))
        b = jnp.zeros((len(layer_keys), rank, outputs))

        # Of a side that was several dimensions, the outermost is split.
        a_axes = ("layers", weight.axes[0], None)
        b_axes = ("layers", None, weight.axes[weight.inputs])
        a_param = nnx.LoRAParam(a.astype(jnp.float32), logical_axes=a_axes)
        b_param = nnx.LoRAParam(b.astype(jnp.float32), logical_axes=b_axes)
        setattr(layers, f"{weight.name}_lora_a", a_param)
        setattr(layers, f"{weight.name}_lora_b", b_param)
    return adapted_decoder


def merged(decoder: Decoder, *, rank: int, alpha: float) -> Decoder:
    """Return a plain decoder that computes the same as the adapted one.

    Every kernel W becomes W + (alpha / rank) * A B.
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
    """Return W + scale * A B, float32."""
    # In full float32: the accelerators' default precision would round what is added to the weights
    # for good.
    product = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + product.reshape(kernel.shape)
