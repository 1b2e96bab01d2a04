"""The parts of a decoder layer: weights, RMS norm, rotary positions, and the block itself.

    x   = hidden + attention(rms_norm(hidden))
    out = x + mlp(rms_norm(x))
    mlp(x) = (silu(x gate_kernel) * (x up_kernel)) down_kernel

`block_weights` and `model_weights` declare every weight once, with its name, shape, logical axes,
initialiser and Hugging Face name. Initialisation, abstract shapes, sharding, and import and export
of checkpoints all follow from these two tables.

Dimensions in shapes:

    batch      sequences (rows, in training)
    time       positions of a sequence
    hidden     width of the residual stream, `hidden_size`
    heads      query heads; kv_heads are the key and value heads
    head_dim   numbers per head; half_head_dim is the number of rotated pairs
    mlp        width of the MLP, `intermediate_size`
    vocab      rows of the embedding, `vocab_size`
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mujica_jax import kernels
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.sharding import constrain

LayerIndex = int | Int[Array, ""]
# attend(layer_index, query, key, value) -> mixed values. Query and result have the shape [batch,
# time, heads, head_dim], key and value [batch, time, kv_heads, head_dim]. Query and key are already
# rotated.
Attend = Callable[[LayerIndex, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """The declaration of one weight, for initialisation, sharding and checkpoints."""

    # Name of the attribute of `Block` or `Decoder` that holds the weight.
    name: str
    # Shape without the leading `layers` axis.
    shape: tuple[int, ...]
    # The logical axis of each dimension (`sharding.RULES`).
    axes: tuple[str | None, ...]
    # Name in a Hugging Face checkpoint. For a weight of a block, this is the part of the name after
    # `model.layers.{index}.`.
    hugging_face: str
    # Distribution of a fresh value. The caller gives the standard deviation of "normal".
    initializer: Literal["normal", "ones", "zeros"] = "normal"
    # Number of leading dimensions that a product contracts. The others are outputs. 0 means that
    # the weight is no kernel. transformers stores a kernel as a matrix [outputs, inputs].
    inputs: int = 0

    def draw(
        self, key: Array, standard_deviation: float, leading: tuple[int, ...] = ()
    ) -> Float[Array, "*shape"]:
        """Return a fresh float32 value of shape (*leading, *shape), drawn as `initializer` says."""
        shape = (*leading, *self.shape)
        if self.initializer == "normal":
            return standard_deviation * jax.random.normal(key, shape, jnp.float32)
        if self.initializer == "ones":
            return jnp.ones(shape, jnp.float32)
        return jnp.zeros(shape, jnp.float32)

    @property
    def sides(self) -> tuple[int, int]:
        """Return the number of inputs and of outputs of a kernel, seen as a matrix."""
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])

    @property
    def hugging_face_shape(self) -> tuple[int, ...]:
        """Return the shape that the weight has in a Hugging Face checkpoint."""
        if self.inputs:
            return self.sides[::-1]
        if self.hugging_face.endswith(".bias"):
            return (math.prod(self.shape),)
        return self.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerProduct:
    """A kernel stored as int8, whose products are computed in integers.

        product = (round(row / row_scale) @ qvalue) * row_scale * kernel_scale

    The rows that are multiplied are rounded to int8 too. Each row and each output channel has its
    own scale.
    """

    # A qwix.QArray of the kernel's shape.
    kernel: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    def product(
        self, rows: Float[Array, "rows inputs"], inputs: int
    ) -> Float[Array, "rows outputs"]:
        """Return rows @ kernel. The first `inputs` dimensions of the kernel are contracted."""
        qwix = importlib.import_module("qwix")
        rounded = qwix.quantize(rows.astype(jnp.float32), jnp.int8, channelwise_axes=(0,))
        matrix = self.kernel.qvalue.reshape(math.prod(self.shape[:inputs]), -1)
        sums = jax.lax.dot_general(
            rounded.qvalue, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )
        return (sums * rounded.scale * self.kernel.scale.reshape(1, -1)).astype(rows.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """A kernel that is stored as a matrix [outputs, inputs] (`kernels.prefers_output_major`)."""

    # Float[Array, "outputs inputs"], or a `decoder.PerLayer` with one such array for each layer.
    matrix: Any
    # Shape of the kernel as `Weight.shape` declares it.
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def product(
        self, rows: Float[Array, "rows inputs"], inputs: int
    ) -> Float[Array, "rows outputs"]:
        """Return rows @ kernel. `inputs` is not needed, because the matrix is two-dimensional."""
        del inputs
        return output_major_product(rows, self.matrix.astype(rows.dtype)).astype(rows.dtype)


def block_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Return the declarations of the weights of one layer.

    `Block` stores each of them for all layers, with a leading `layers` axis.
    """
    hidden = config.hidden_size
    mlp = config.intermediate_size
    head_dim = config.head_dim
    traits = config.traits

    query_key_norms = ()
    if traits.qk_norm:
        query_key_norms = (
            _scale("query_norm", head_dim, "self_attn.q_norm.weight"),
            _scale("key_norm", head_dim, "self_attn.k_norm.weight"),
        )
    return (
        _scale("attention_norm", hidden, "input_layernorm.weight"),
        *_head_projection("query", config, axis="heads", hugging_face="q_proj"),
        *_head_projection("key", config, axis="kv_heads", hugging_face="k_proj"),
        *_head_projection("value", config, axis="kv_heads", hugging_face="v_proj"),
        *query_key_norms,
        _kernel(
            "output_kernel",
            shape=(config.num_heads, head_dim, hidden),
            axes=("heads", "head_dim", "embed"),
            hugging_face="self_attn.o_proj",
        ),
        _scale("mlp_norm", hidden, "post_attention_layernorm.weight"),
        _kernel(
            "gate_kernel",
            shape=(hidden, mlp),
            axes=("embed", "mlp"),
            hugging_face="mlp.gate_proj",
        ),
        _kernel(
            "up_kernel",
            shape=(hidden, mlp),
            axes=("embed", "mlp"),
            hugging_face="mlp.up_proj",
        ),
        _kernel(
            "down_kernel",
            shape=(mlp, hidden),
            axes=("mlp", "embed"),
            hugging_face="mlp.down_proj",
        ),
    )


def _head_projection(
    name: str, config: DecoderConfig, *, axis: Literal["heads", "kv_heads"], hugging_face: str
) -> tuple[Weight, ...]:
    """Return the weights that project hidden states to heads.

    These are a kernel [hidden, heads, head_dim] and, in families with attention bias, a bias
    [heads, head_dim]. `name` is "query", "key" or "value", and `hugging_face` the module's name in
    transformers.
    """
    heads = config.num_heads if axis == "heads" else config.num_kv_heads
    shape = (config.hidden_size, heads, config.head_dim)
    axes = ("embed", axis, "head_dim")
    kernel = Weight(
        name=f"{name}_kernel",
        shape=shape,
        axes=axes,
        hugging_face=f"self_attn.{hugging_face}.weight",
        inputs=1,
    )
    if not config.traits.attention_bias:
        return (kernel,)

    bias = Weight(
        name=f"{name}_bias",
        shape=shape[1:],
        axes=axes[1:],
        hugging_face=f"self_attn.{hugging_face}.bias",
        initializer="zeros",
    )
    return (kernel, bias)


def _kernel(
    name: str, *, shape: tuple[int, ...], axes: tuple[str, ...], hugging_face: str
) -> Weight:
    """Return a kernel without a bias. Its last dimension is the outputs, all others are inputs."""
    return Weight(
        name=name,
        shape=shape,
        axes=axes,
        hugging_face=f"{hugging_face}.weight",
        inputs=len(shape) - 1,
    )


def _scale(name: str, size: int, hugging_face: str) -> Weight:
    """Return the scale of an RMS norm over `size` numbers, which is initialised to ones."""
    return Weight(
        name=name, shape=(size,), axes=("norm",), hugging_face=hugging_face, initializer="ones"
    )


def projections(config: DecoderConfig) -> tuple[Weight, ...]:
    """Return the declarations of the kernels of one layer.

    LoRA adds adapters to these kernels, and the engine may store them in eight bits.
    """
    return tuple(weight for weight in block_weights(config) if weight.inputs)


def model_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Return the declarations of the weights outside the layers.

    These are `embedding` [vocab, hidden], `final_norm` [hidden] and `head` [vocab, hidden]. A model
    with tied embeddings has no `head`: it computes its logits with `embedding`.
    """
    shape = (config.vocab_size, config.hidden_size)
    axes = ("vocab", "embed")
    embedding = Weight(
        name="embedding", shape=shape, axes=axes, hugging_face="model.embed_tokens.weight"
    )
    norm = _scale("final_norm", config.hidden_size, "model.norm.weight")
    if config.tie_word_embeddings:
        return (embedding, norm)

    head = Weight(name="head", shape=shape, axes=axes, hugging_face="lm_head.weight")
    return (embedding, norm, head)


@jax.custom_vjp
def _adapted_product(rows: Array, frozen: Array, a: Array, b: Array) -> Array:
    """Return rows @ (frozen + a @ b) in float32.

    `rows` is [rows, inputs], `frozen` [inputs, outputs], `a` [inputs, rank] and `b` [rank,
    outputs]. One product with the sum of the matrices is cheaper than two products and the sum of
    their results. In float32 the sum loses almost nothing of a @ b. The gradient is written out:
    automatic differentiation would first compute the gradient of the whole matrix.
    """
    return _adapted_forward(rows, frozen, a, b)[0]


def _adapted_forward(
    rows: Array, frozen: Array, a: Array, b: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Return the product, and the operands that the backward pass needs."""
    # The product is a plain matmul, so that the rematerialisation policy "dots" can store it.
    return rows @ (frozen + a @ b), (rows, frozen, a, b)


def _adapted_backward(
    operands: tuple[Array, ...], gradient: Array
) -> tuple[Array, None, Array, Array]:
    """Return the gradients of `rows`, `frozen` (None), `a` and `b`.

    `gradient` is the gradient of the product, [rows, outputs].
    """
    rows, frozen, a, b = operands
    a_gradient = rows.T @ (gradient @ b.T)
    b_gradient = (rows @ a).T @ gradient
    rows_gradient = gradient @ (frozen + a @ b).T
    return rows_gradient, None, a_gradient, b_gradient


_adapted_product.defvjp(_adapted_forward, _adapted_backward)


def output_major_product(
    rows: Float[Array, "rows inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "rows outputs"]:
    """Return rows @ matrix.T in float32, by a CPU kernel if there is one for these shapes."""
    multiply = kernels.product(
        rows=rows.shape[0],
        inputs=rows.shape[1],
        outputs=(matrix.shape[0],),
        dtype=rows.dtype,
    )
    if multiply is not None:
        return multiply(rows, matrix)[0]

    last_axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, last_axes, preferred_element_type=jnp.float32)


def rms_norm(
    inputs: Float[Array, "*batch features"], scale: Float[Array, " features"], epsilon: float
) -> Float[Array, "*batch features"]:
    """Return inputs / sqrt(mean(inputs^2) + epsilon) * scale.

    The result is computed in float32 and has the type of `inputs`.
    """
    wide = inputs.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(inputs.dtype)


def rotary_frequencies(config: DecoderConfig) -> Float[Array, " half_head_dim"]:
    """Return the frequency of each rotated pair, in radians per position.

        frequency(i) = rope_theta^(-2 i / head_dim),  i = 0 ... head_dim / 2 - 1

    If the configuration has `rope_scaling`, Llama-3.1's rule is applied to them: it slows low
    frequencies by `factor`.
    """
    frequencies = 1.0 / config.rope_theta ** (
        jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    )
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies

    # A pair that turns more than `high_freq_factor` times within the original context keeps its
    # frequency. A pair that turns less than `low_freq_factor` times is slowed by `factor`. In
    # between, the two frequencies are blended.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled_share = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    unscaled_share = jnp.clip(unscaled_share, 0.0, 1.0)
    return unscaled_share * frequencies + (1.0 - unscaled_share) * frequencies / scaling.factor


def rotary_angles(
    positions: Int[Array, "batch time"], config: DecoderConfig
) -> tuple[Float[Array, "batch time 1 half_head_dim"], Float[Array, "batch time 1 half_head_dim"]]:
    """Return the cosine and the sine of position * frequency, in float32.

    float32 is needed for the positions: bfloat16 would round 257 to 256.
    """
    angles = positions.astype(jnp.float32)[:, :, None, None] * rotary_frequencies(config)
    # The barrier makes XLA compute the cosines and sines once. Without it XLA fuses them into every
    # rotation and computes them again for each head and layer.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(
    inputs: Float[Array, "batch time heads head_dim"],
    rotation: tuple[
        Float[Array, "batch time 1 half_head_dim"], Float[Array, "batch time 1 half_head_dim"]
    ],
) -> Float[Array, "batch time heads head_dim"]:
    """Rotate the pairs (i, i + head_dim/2) of each head by the angles of `rotary_angles`.

        first'  = first cos - second sin
        second' = second cos + first sin

    Hugging Face checkpoints pair the numbers in this order, not as (2 i, 2 i + 1).
    """
    cosine, sine = rotation
    first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return rotated.astype(inputs.dtype)


class Block(nnx.Module):
    """One decoder layer, which stores the weights of all layers.

    Each weight has the shape [layers, *`Weight.shape`]. To call the block as one layer, merge that
    layer's slice of every weight into it (`nnx.merge`), as `Decoder` does.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        self.dtype = dtype
        # alpha / rank if `models.lora` has added adapters, else 0.
        self.adapter_scale = 0.0
        for weight in block_weights(config):
            drawn = weight.draw(rngs.params(), config.initializer_range, (config.num_layers,))
            setattr(self, weight.name, nnx.Param(drawn, logical_axes=("layers", *weight.axes)))

    def __call__(
        self,
        layer_index: LayerIndex,
        hidden: Float[Array, "batch time hidden"],
        rotation: tuple[Array, Array],
        attend: Attend,
    ) -> Float[Array, "batch time hidden"]:
        """Return x + mlp(norm(x)), where x = hidden + attention(norm(hidden)).

        `rotation` holds cosine and sine of the rotary angles (`rotary_angles`). `layer_index` is
        passed on to `attend`.
        """
        batch, time, width = hidden.shape
        # Flatten batch and time: XLA on CPU is two to three times faster at products of
        # two-dimensional arrays than at products of three-dimensional ones.
        rows = hidden.reshape(batch * time, width)

        # Attention.
        normed = self._norm(rows, "attention_norm")
        queries, keys, values = self._products(normed, "query_kernel", "key_kernel", "value_kernel")
        query = self._heads(queries, "query", batch)
        key = self._heads(keys, "key", batch)
        value = self._heads(values, "value", batch)
        if self.config.traits.qk_norm:
            query = self._norm(query, "query_norm")
            key = self._norm(key, "key_norm")
        mixed = attend(layer_index, rotate(query, rotation), rotate(key, rotation), value)
        rows = rows + self.product(mixed.reshape(batch * time, -1), "output_kernel", inputs=2)

        # MLP.
        normed = self._norm(rows, "mlp_norm")
        gate, up = self._products(normed, "gate_kernel", "up_kernel")
        rows = rows + self.product(jax.nn.silu(gate) * up, "down_kernel")
        return constrain(rows.reshape(hidden.shape), ("batch", None, None))

    def product(
        self, rows: Float[Array, "rows inputs"], name: str, inputs: int = 1
    ) -> Float[Array, "rows outputs"]:
        """Return rows @ kernel, plus adapter_scale * (rows @ a) @ b if the kernel has an adapter.

        `name` is the name of the kernel. Its first `inputs` dimensions are contracted, and all
        others are outputs. Only this method and `_products` multiply with a kernel.
        """
        kernel = getattr(self, name).get_value()
        if isinstance(kernel, IntegerProduct | OutputMajor):
            return kernel.product(rows, inputs)
        if not isinstance(kernel, jax.Array):
            # Qwix stores the kernel in eight bits. XLA fuses the conversion into the product.
            qwix = importlib.import_module("qwix")
            kernel = qwix.dequantize(kernel)
        matrix = kernel.astype(self.dtype).reshape(math.prod(kernel.shape[:inputs]), -1)
        if not self.adapter_scale:
            return rows @ matrix

        # Adapters are kept in float32, and the sum of both products is float32 too.
        a = getattr(self, f"{name}_lora_a").get_value()
        b = getattr(self, f"{name}_lora_b").get_value()
        if rows.dtype == jnp.float32:
            return _adapted_product(rows, matrix, a, self.adapter_scale * b)
        return (rows @ matrix + self.adapter_scale * ((rows @ a) @ b)).astype(rows.dtype)

    def _norm(
        self, inputs: Float[Array, "*batch features"], name: str
    ) -> Float[Array, "*batch features"]:
        """Return the RMS norm of `inputs`, with the scale of this name."""
        return rms_norm(inputs, getattr(self, name)[...], self.config.rms_norm_eps)

    def _products(
        self, rows: Float[Array, "rows hidden"], *names: str
    ) -> Sequence[Float[Array, "rows _"]]:
        """Return rows @ kernel for each of these kernels.

        If all of them are stored as [outputs, inputs] and a CPU kernel fits, one call computes all
        products.
        """
        weights = [getattr(self, name).get_value() for name in names]
        if all(isinstance(weight, OutputMajor) for weight in weights):
            multiply = kernels.product(
                rows=rows.shape[0],
                inputs=rows.shape[1],
                outputs=[weight.matrix.shape[0] for weight in weights],
                dtype=rows.dtype,
            )
            if multiply is not None:
                matrices = [weight.matrix.astype(rows.dtype) for weight in weights]
                return [result.astype(rows.dtype) for result in multiply(rows, *matrices)]
        return [self.product(rows, name) for name in names]

    def _heads(
        self, projected: Float[Array, "rows outputs"], name: str, batch: int
    ) -> Float[Array, "batch time heads head_dim"]:
        """Add the bias, in families that have one, and split the outputs into heads.

        `name` is "query", "key" or "value".
        """
        if self.config.traits.attention_bias:
            bias = getattr(self, f"{name}_bias")[...].astype(self.dtype)
            projected = projected + bias.reshape(-1)
        heads_shape = getattr(self, f"{name}_kernel").shape[1:]
        return projected.reshape(batch, -1, *heads_shape)
