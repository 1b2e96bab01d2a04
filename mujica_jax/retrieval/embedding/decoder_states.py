"""A decoder as an encoder of texts, for embedders such as Qwen3-Embedding.

The checkpoint is a decoder of a supported family (`models/families.py`) without its output head.
Its tensors may be stored with the prefix `model.` or without it. Each token sees itself and the
tokens before it, so the state of the last token depends on the whole text. Padding follows the text
and does not change its states.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.companions import read_json
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import FAMILIES, DecoderConfig, from_hugging_face
from mujica_jax.models.layers import Weight, block_weights, model_weights
from mujica_jax.models.tensors import Folder, Tensors, WeightTable

# Beginning of the names of all tensors in a checkpoint that has an output head.
PREFIX = "model."
# Tensors of a checkpoint that are not loaded: a buffer, and the output head.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^lm_head\.")
# Fields of a `config.json` that make a decoder read in both directions, and the value that they
# must not have.
BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True}


def is_decoder(fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of a `config.json` are those of a supported decoder."""
    return fields.get("model_type") in FAMILIES


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a decoder without its output head, from a `config.json`.

    Raises UserError if the decoder reads in both directions, or cannot be computed.
    """
    for name, refused_value in BIDIRECTIONAL.items():
        if fields.get(name) is refused_value:
            raise UserError(
                f"config.json sets {name} to {refused_value}, but decoders are supported as "
                "embedders only if each token sees the tokens before it: choose another embedder"
            )
    # A tied decoder has no head of its own. The class name may be that of the bare model.
    return from_hugging_face({**fields, "architectures": [], "tie_word_embeddings": True})


class DecoderStates(nnx.Module):
    """A decoder that turns token ids into token states, as `Encoder` does."""

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.decoder = decoder

    def __call__(
        self, tokens: Int[Array, "batch time"], present: Bool[Array, "batch time"]
    ) -> Float[Array, "batch time hidden"]:
        """Return the token states after the final norm, in float32.

        `present` is False for padding, which follows the text.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attend = causal_self_attention(present.astype(jnp.int32))
        return self.decoder(tokens, positions, attend).astype(jnp.float32)


def load_decoder_states(
    directory: Folder, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> DecoderStates:
    """Load the decoder of a folder, with parameters in `dtype`. Raises UserError.

    With a `mesh`, every device of its `data` axis gets a copy of the weights.
    """
    folder = pathlib.Path(directory)
    config = decoder_config(read_json(folder / "config.json"))
    table = WeightTable(
        outer=[_without_prefix(weight) for weight in model_weights(config)],
        inner=block_weights(config),
        num_layers=config.num_layers,
        layer="layers.{}.",
        stacked="layers",
    )
    tensors = Tensors(
        folder,
        table,
        needed=f"an embedder of one of {', '.join(FAMILIES)} with its adapters merged",
        ignored=IGNORED,
        prefix=PREFIX,
    )
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    nnx.update(decoder, tensors.load(mesh, dtype))
    return DecoderStates(decoder)


def _without_prefix(weight: Weight) -> Weight:
    """Return the weight with its name in a checkpoint that has no output head."""
    return dataclasses.replace(weight, hugging_face=weight.hugging_face.removeprefix(PREFIX))
