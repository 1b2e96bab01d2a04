"""A BERT or (XLM-)RoBERTa encoder for checkpoints of bge, e5 and MiniLM in the Hugging Face layout.

This is BERT of Devlin et al. (2019), with learned positions, bidirectional attention, and layer
norm after each residual connection. RoBERTa and XLM-RoBERTa are the same network, but their
positions are counted from `pad_token_id + 1`. The encoder is loaded from `config.json` and
`*.safetensors` of a folder. `embedder.py` uses it to make one vector of a text, and
`cross_encoder.py` to score pairs of a query and a passage.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.models.attention import MASKED_SCORE, softmax_mix
from mujica_jax.models.companions import read_json
from mujica_jax.models.layers import Weight
from mujica_jax.models.tensors import Folder, Tensors, WeightTable

# Tensors of a checkpoint that are not loaded: a buffer, and heads that no embedder uses.
IGNORED = re.compile(r"(^|\.)position_ids$|(^|\.)pooler\.dense\.(weight|bias)$|^lm_head\.")
# The supported values of `model_type`, and the prefix that each gives to the names of its tensors in
# a checkpoint with a head.
PREFIXES: Mapping[str, str] = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
# Id of the padding token of RoBERTa and XLM-RoBERTa, if `config.json` does not set it.
ROBERTA_PAD_TOKEN = 1
# Standard deviation of randomly initialised matrices.
INITIALIZER_RANGE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The sizes of an encoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    # Rows of the table of positions.
    max_positions: int
    type_vocab_size: int
    layer_norm_eps: float
    # Row of the table of positions that the first token takes.
    first_position: int = 0
    # Beginning of the names of tensors, in a checkpoint that also has a head.
    prefix: str = "bert."

    @property
    def max_tokens(self) -> int:
        """The longest text that the encoder can read, in tokens."""
        return self.max_positions - self.first_position

    @property
    def head_dim(self) -> int:
        """The dimension of an attention head."""
        return self.hidden_size // self.num_heads


def encoder_config(fields: Mapping[str, Any]) -> EncoderConfig:
    """Return the configuration of an encoder from the fields of a `config.json`.

    Raises UserError if a field is missing, or asks for a computation that the encoder does not
    have.
    """
    model_type = fields.get("model_type") or "bert"
    if model_type not in PREFIXES:
        raise UserError(
            f"config.json says model_type={model_type!r}, but the encoder supports only "
            f"{', '.join(map(repr, PREFIXES))}: give a checkpoint of one of these"
        )
    computed_fields = {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for name, computed in computed_fields.items():
        value = fields.get(name, computed)
        if value not in (computed, None):
            raise UserError(
                f"config.json says {name}={value!r}, but the encoder supports only {computed!r}: "
                "give a BERT checkpoint"
            )

    try:
        config = EncoderConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=fields["num_attention_heads"],
            max_positions=fields["max_position_embeddings"],
            type_vocab_size=fields["type_vocab_size"],
            layer_norm_eps=fields["layer_norm_eps"],
            first_position=_first_position(fields),
            prefix=PREFIXES[model_type],
        )
    except KeyError as missing:
        raise UserError(f"config.json lacks {missing.args[0]}: give a BERT checkpoint") from None

    for name, value in vars(config).items():
        if name in ("first_position", "prefix"):
            continue
        is_size = type(value) is int and value > 0
        is_epsilon = name == "layer_norm_eps" and isinstance(value, float)
        if not is_size and not is_epsilon:
            raise UserError(
                f"config.json has {value!r} for {name}, but a number above 0 is needed: give a "
                "BERT checkpoint"
            )
    if config.hidden_size % config.num_heads:
        raise UserError(
            f"config.json has hidden_size {config.hidden_size}, which is not a multiple of "
            f"num_attention_heads {config.num_heads}: give a BERT checkpoint"
        )
    if config.max_tokens < 1:
        raise UserError(
            f"config.json has max_position_embeddings {config.max_positions}, but the first token "
            f"takes position {config.first_position}: download the checkpoint again"
        )
    return config


def _first_position(fields: Mapping[str, Any]) -> int:
    """Return the row of the table of positions that the first token takes. Raises UserError.

    RoBERTa and XLM-RoBERTa leave out the rows up to the one of the padding token's id.
    """
    if (fields.get("model_type") or "bert") == "bert":
        return 0
    pad_token = fields.get("pad_token_id", ROBERTA_PAD_TOKEN)
    if type(pad_token) is not int or pad_token < 0:
        raise UserError(
            f"config.json has {pad_token!r} for pad_token_id, but a whole number from 0 on is "
            "needed: download the checkpoint again"
        )
    return pad_token + 1


def embedding_weights(config: EncoderConfig) -> tuple[Weight, ...]:
    """Return the weights outside the layers."""
    hidden = config.hidden_size
    return (
        _embedding_table("words", config.vocab_size, hidden, hugging_face="word"),
        _embedding_table("positions", config.max_positions, hidden, hugging_face="position"),
        _embedding_table("types", config.type_vocab_size, hidden, hugging_face="token_type"),
        *_layer_norm("embedding", hidden, hugging_face="embeddings.LayerNorm"),
    )


def layer_weights(config: EncoderConfig) -> tuple[Weight, ...]:
    """Return the weights of one layer. The encoder stacks those of all layers."""
    hidden = config.hidden_size
    mlp = config.intermediate_size
    return (
        *dense_weights("query", hidden, hidden, hugging_face="attention.self.query"),
        *dense_weights("key", hidden, hidden, hugging_face="attention.self.key"),
        *dense_weights("value", hidden, hidden, hugging_face="attention.self.value"),
        *dense_weights("output", hidden, hidden, hugging_face="attention.output.dense"),
        *_layer_norm("attention", hidden, hugging_face="attention.output.LayerNorm"),
        *dense_weights("up", hidden, mlp, hugging_face="intermediate.dense"),
        *dense_weights("down", mlp, hidden, hugging_face="output.dense"),
        *_layer_norm("mlp", hidden, hugging_face="output.LayerNorm"),
    )


def weight_table(config: EncoderConfig) -> WeightTable:
    """Return all weights with their names in a checkpoint."""
    return WeightTable(
        outer=embedding_weights(config),
        inner=layer_weights(config),
        num_layers=config.num_layers,
        layer="encoder.layer.{}.",
        stacked=None,
    )


def _embedding_table(name: str, rows: int, hidden: int, *, hugging_face: str) -> Weight:
    """Return the weight of an embedding table, [rows, hidden]."""
    return _whole(name, (rows, hidden), f"embeddings.{hugging_face}_embeddings.weight")


def dense_weights(
    name: str, inputs: int, outputs: int, *, hugging_face: str
) -> tuple[Weight, Weight]:
    """Return the kernel [inputs, outputs] and the bias [outputs] of a dense layer."""
    kernel = _whole(f"{name}_kernel", (inputs, outputs), f"{hugging_face}.weight", inputs=1)
    bias = _whole(f"{name}_bias", (outputs,), f"{hugging_face}.bias", initializer="zeros")
    return kernel, bias


def _layer_norm(name: str, size: int, *, hugging_face: str) -> tuple[Weight, Weight]:
    """Return the scale and the shift of a layer norm, both [size]."""
    scale = _whole(f"{name}_scale", (size,), f"{hugging_face}.weight", initializer="ones")
    shift = _whole(f"{name}_shift", (size,), f"{hugging_face}.bias", initializer="zeros")
    return scale, shift


def _whole(
    name: str,
    shape: tuple[int, ...],
    hugging_face: str,
    *,
    initializer: Literal["normal", "ones", "zeros"] = "normal",
    inputs: int = 0,
) -> Weight:
    """Return a weight that is not sharded: every device has a whole copy."""
    return Weight(
        name=name,
        shape=shape,
        axes=(None,) * len(shape),
        hugging_face=hugging_face,
        initializer=initializer,
        inputs=inputs,
    )


class _Layers(nnx.Module):
    """All layers. Each parameter has a leading axis [num_layers]."""

    attention_scale: nnx.Param
    attention_shift: nnx.Param
    mlp_scale: nnx.Param
    mlp_shift: nnx.Param

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        for weight in layer_weights(config):
            drawn = weight.draw(rngs.params(), INITIALIZER_RANGE, (config.num_layers,))
            setattr(self, weight.name, nnx.Param(drawn))


class Encoder(nnx.Module):
    """A BERT or RoBERTa encoder, which turns token ids into token states.

    Parameters are float32. Matrix products are computed in `dtype`, norms and softmax in float32.
    """

    words: nnx.Param
    positions: nnx.Param
    types: nnx.Param
    embedding_scale: nnx.Param
    embedding_shift: nnx.Param

    def __init__(
        self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.config = config
        self.dtype = dtype
        for weight in embedding_weights(config):
            drawn = weight.draw(rngs.params(), INITIALIZER_RANGE)
            setattr(self, weight.name, nnx.Param(drawn))
        self.layers = _Layers(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        present: Bool[Array, "batch time"],
        types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time hidden"]:
        """Return the token states after the last layer.

        `present` is False for padding, which follows the text. No token attends to padding.
        `types` are the token type ids: 0 for the first text of a pair, and 1 for the second. Without
        them, all are 0.
        """
        batch, time = tokens.shape
        first = self.config.first_position
        type_states = self.types[...][0 if types is None else types]
        positions = self.positions[...][first : first + time]
        embedded = self.words[...][tokens] + positions + type_states
        hidden = self._normed(
            embedded.reshape(batch * time, -1), self.embedding_scale[...], self.embedding_shift[...]
        )
        bias = jnp.where(present, 0.0, MASKED_SCORE)[:, None, None, :]
        graph, weights = nnx.split(self.layers)

        def run_layer(rows: Array, layer_weights: nnx.State) -> tuple[Array, None]:
            layer = nnx.merge(graph, layer_weights)
            return self._layer(layer, rows, bias, batch), None

        hidden, _ = jax.lax.scan(run_layer, hidden.astype(self.dtype), weights)
        return hidden.reshape(batch, time, -1).astype(jnp.float32)

    def _layer(self, layer: _Layers, rows: Array, bias: Array, batch: int) -> Array:
        """Return norm(y + mlp(y)), where y = norm(x + attention(x)).

        `rows` is x, [batch * time, hidden].
        """

        def dense(name: str, inputs: Array) -> Array:
            kernel = getattr(layer, f"{name}_kernel")[...].astype(self.dtype)
            bias = getattr(layer, f"{name}_bias")[...].astype(self.dtype)
            return inputs @ kernel + bias

        def heads(name: str) -> Array:
            projected = dense(name, rows).reshape(
                batch, -1, self.config.num_heads, self.config.head_dim
            )
            return projected.transpose(0, 2, 1, 3)

        scale = self.config.head_dim**-0.5
        mixed = softmax_mix(heads("query") * scale, heads("key"), heads("value"), bias)
        attended = dense("output", mixed.transpose(0, 2, 1, 3).reshape(rows.shape))
        rows = self._normed(rows + attended, layer.attention_scale[...], layer.attention_shift[...])
        widened = jax.nn.gelu(dense("up", rows), approximate=False)
        return self._normed(
            rows + dense("down", widened), layer.mlp_scale[...], layer.mlp_shift[...]
        )

    def _normed(
        self, rows: Float[Array, "rows hidden"], scale: Array, shift: Array
    ) -> Float[Array, "rows hidden"]:
        """Return (rows - mean) / sqrt(variance + epsilon) * scale + shift, computed in float32."""
        wide = rows.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.config.layer_norm_eps) * scale + shift
        return normed.astype(self.dtype)


def load_encoder(
    directory: Folder, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Encoder:
    """Load the encoder of a Hugging Face folder. Raises UserError.

    With a `mesh`, every device of the mesh gets a copy of the weights.
    """
    folder = pathlib.Path(directory)
    config = encoder_config(read_json(folder / "config.json"))
    encoder = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    tensors = Tensors(
        folder,
        weight_table(config),
        needed="a BERT or RoBERTa checkpoint",
        ignored=IGNORED,
        prefix=config.prefix,
    )
    nnx.update(encoder, tensors.load(mesh))
    return encoder
