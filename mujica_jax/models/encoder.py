"""A BERT encoder as text embedder: bge, e5, contriever and MiniLM checkpoints in the Hugging Face and sentence-transformers layout.

BERT of Devlin et al. (2019): learned positions, bidirectional attention, layer norm after each residual. What is read of a folder:
`config.json`, `tokenizer.json`, `*.safetensors`; `modules.json` with `1_Pooling/config.json` says how token states become one vector,
`sentence_bert_config.json` how many tokens are read, `config_sentence_transformers.json` which prefix queries and passages carry.

Texts are sorted by length and padded to a few lengths, so that a corpus compiles a handful of programs and pads little; the rows of a
batch are split over the mesh's `data` axis.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.models.attention import MASKED_SCORE, softmax_mix
from mujica_jax.models.layers import Weight
from mujica_jax.models.tensors import Tensors, read_json
from mujica_jax.models.truncation import encode_truncated

Pooling = Literal["cls", "mean"]
Role = Literal["query", "passage"]

# Lengths that texts are padded to, in tokens. From 64 on padding costs at most a fifth.
LENGTHS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Tokens in one batch: on two CPU cores 4,096 and 16,384 were equally fast; an accelerator wants more.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 65_536
QUERY_SHARE = (
    8  # a batch of queries has so many times fewer tokens: often one comes alone, and it computes a whole batch
)
# Prefixes that the authors of these models train with and that their folders do not state: (query, passage).
PREFIXES: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
    "e5": ("query: ", "passage: "),
}
IGNORED = re.compile(
    r"(^|\.)(position_ids|pooler\.dense\.(weight|bias))$"
)  # a buffer, and a head that no embedder uses
LAYER = "encoder.layer."


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    type_vocab_size: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def encoder_config(fields: Mapping[str, Any]) -> EncoderConfig:
    """From a `config.json`. What would change the mathematics and is not computed here is refused by name."""
    computed = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for name, ours in computed.items():
        if (value := fields.get(name, ours)) not in (ours, None):
            raise UserError(
                f"config.json says {name}={value!r} and the encoder computes {ours!r}: give a BERT checkpoint"
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
        )
    except KeyError as missing:
        raise UserError(f"config.json lacks {missing.args[0]}: give a BERT checkpoint") from None
    if config.hidden_size % config.num_heads:
        raise UserError(
            f"config.json has hidden_size {config.hidden_size} and num_attention_heads {config.num_heads}: the heads must divide it"
        )
    return config


def embedding_weights(config: EncoderConfig) -> tuple[Weight, ...]:
    hidden = config.hidden_size

    def table(name: str, rows: int, theirs: str) -> Weight:
        return Weight(
            name=name, shape=(rows, hidden), axes=(None, None), hugging_face=f"embeddings.{theirs}_embeddings.weight"
        )

    return (
        table("words", config.vocab_size, "word"),
        table("positions", config.max_positions, "position"),
        table("types", config.type_vocab_size, "token_type"),
        *_layer_norm("embedding", hidden, "embeddings.LayerNorm"),
    )


def layer_weights(config: EncoderConfig) -> tuple[Weight, ...]:
    """The weights of one layer; the encoder stacks them."""
    hidden, mlp = config.hidden_size, config.intermediate_size

    def dense(name: str, inputs: int, outputs: int, theirs: str) -> tuple[Weight, Weight]:
        return (
            Weight(
                name=f"{name}_kernel",
                shape=(inputs, outputs),
                axes=(None, None),
                hugging_face=f"{theirs}.weight",
                inputs=1,
            ),
            Weight(
                name=f"{name}_bias", shape=(outputs,), axes=(None,), hugging_face=f"{theirs}.bias", initializer="zeros"
            ),
        )

    return (
        *dense("query", hidden, hidden, "attention.self.query"),
        *dense("key", hidden, hidden, "attention.self.key"),
        *dense("value", hidden, hidden, "attention.self.value"),
        *dense("output", hidden, hidden, "attention.output.dense"),
        *_layer_norm("attention", hidden, "attention.output.LayerNorm"),
        *dense("up", hidden, mlp, "intermediate.dense"),
        *dense("down", mlp, hidden, "output.dense"),
        *_layer_norm("mlp", hidden, "output.LayerNorm"),
    )


def _layer_norm(name: str, size: int, theirs: str) -> tuple[Weight, Weight]:
    return (
        Weight(name=f"{name}_scale", shape=(size,), axes=(None,), hugging_face=f"{theirs}.weight", initializer="ones"),
        Weight(name=f"{name}_shift", shape=(size,), axes=(None,), hugging_face=f"{theirs}.bias", initializer="zeros"),
    )


class _Layers(nnx.Module):
    """All layers, stacked."""

    attention_scale: nnx.Param
    attention_shift: nnx.Param
    mlp_scale: nnx.Param
    mlp_shift: nnx.Param

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        for weight in layer_weights(config):
            setattr(self, weight.name, nnx.Param(weight.draw(rngs.params(), 0.02, (config.num_layers,))))


class Encoder(nnx.Module):
    """Token states of texts. Parameters are float32; products run in `dtype`, norms and softmax in float32."""

    words: nnx.Param
    positions: nnx.Param
    types: nnx.Param
    embedding_scale: nnx.Param
    embedding_shift: nnx.Param

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        self.config, self.dtype = config, dtype
        for weight in embedding_weights(config):
            setattr(self, weight.name, nnx.Param(weight.draw(rngs.params(), 0.02)))
        self.layers = _Layers(config, rngs)

    def __call__(
        self, tokens: Int[Array, "batch time"], present: Bool[Array, "batch time"]
    ) -> Float[Array, "batch time hidden"]:
        """States after the last layer. Where `present` is False a token is padding: nobody attends to it."""
        batch, time = tokens.shape
        embedded = self.words[...][tokens] + self.positions[...][:time] + self.types[...][0]
        hidden = self._normed(embedded.reshape(batch * time, -1), self.embedding_scale[...], self.embedding_shift[...])
        bias = jnp.where(present, 0.0, MASKED_SCORE)[:, None, None, :]
        graph, weights = nnx.split(self.layers)

        def layer(rows: Array, of_layer: nnx.State) -> tuple[Array, None]:
            return self._layer(nnx.merge(graph, of_layer), rows, bias, batch), None

        hidden, _ = jax.lax.scan(layer, hidden.astype(self.dtype), weights)
        return hidden.reshape(batch, time, -1).astype(jnp.float32)

    def _layer(self, layer: _Layers, rows: Array, bias: Array, batch: int) -> Array:
        """norm(x + attention(x)), then norm(that + mlp(that)); products on two-dimensional rows."""

        def dense(name: str, inputs: Array) -> Array:
            kernel, shift = (getattr(layer, f"{name}_{part}")[...].astype(self.dtype) for part in ("kernel", "bias"))
            return inputs @ kernel + shift

        def heads(name: str) -> Array:
            projected = dense(name, rows).reshape(batch, -1, self.config.num_heads, self.config.head_dim)
            return projected.transpose(0, 2, 1, 3)

        scale = self.config.head_dim**-0.5
        mixed = softmax_mix(heads("query") * scale, heads("key"), heads("value"), bias)
        attended = dense("output", mixed.transpose(0, 2, 1, 3).reshape(rows.shape))
        rows = self._normed(rows + attended, layer.attention_scale[...], layer.attention_shift[...])
        widened = jax.nn.gelu(dense("up", rows), approximate=False)
        return self._normed(rows + dense("down", widened), layer.mlp_scale[...], layer.mlp_shift[...])

    def _normed(self, rows: Float[Array, "rows hidden"], scale: Array, shift: Array) -> Float[Array, "rows hidden"]:
        wide = rows.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.config.layer_norm_eps) * scale + shift).astype(self.dtype)


def load_encoder(
    directory: str | os.PathLike[str], *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Encoder:
    """The encoder of a Hugging Face folder, on every device of `mesh` if one is given."""
    folder = pathlib.Path(directory)
    config = encoder_config(read_json(folder / "config.json"))
    encoder = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    outer, inner = embedding_weights(config), layer_weights(config)
    expected = {weight.hugging_face for weight in outer} | {
        f"{LAYER}{layer}.{weight.hugging_face}" for layer in range(config.num_layers) for weight in inner
    }
    tensors = Tensors(folder, expected, wanted="a BERT checkpoint", ignored=IGNORED, prefix="bert.")
    loaded: dict[str, Any] = {weight.name: tensors.load(weight, weight.hugging_face, mesh) for weight in outer}
    loaded["layers"] = {}
    for weight in inner:
        names = [f"{LAYER}{layer}.{weight.hugging_face}" for layer in range(config.num_layers)]
        loaded["layers"][weight.name] = tensors.load_stacked(weight, names, None, mesh)
    nnx.update(encoder, loaded)
    return encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderConfig:
    """How token states become an embedding."""

    pooling: Pooling
    normalised: bool  # to length 1, so that a dot product is a cosine
    max_tokens: int  # of a text with its two special tokens; longer ones are cut
    query_prefix: str = ""
    passage_prefix: str = ""


def embedder_config(directory: str | os.PathLike[str], *, prefixes: str | None = None) -> EmbedderConfig:
    """What a folder says; without `modules.json` (contriever) the mean of the states, not normalised.

    `prefixes` names an entry of PREFIXES; None takes the folder's own prompts, or none.
    """
    folder = pathlib.Path(directory)
    if prefixes is not None and prefixes not in PREFIXES:
        raise UserError(f"prefixes is {prefixes!r}: give one of {', '.join(PREFIXES)}")
    max_tokens = encoder_config(read_json(folder / "config.json")).max_positions
    stated = folder / "sentence_bert_config.json"
    if stated.exists():
        max_tokens = min(max_tokens, read_json(stated).get("max_seq_length") or max_tokens)
    pooling, normalised = _pooling(folder)
    prompts_file = folder / "config_sentence_transformers.json"
    prompts = (read_json(prompts_file).get("prompts") or {}) if prompts_file.exists() else {}
    own = (prompts.get("query", ""), prompts.get("passage", prompts.get("document", "")))
    query_prefix, passage_prefix = own if prefixes is None else PREFIXES[prefixes]
    return EmbedderConfig(
        pooling=pooling,
        normalised=normalised,
        max_tokens=max_tokens,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )


def _pooling(folder: pathlib.Path) -> tuple[Pooling, bool]:
    if not (folder / "modules.json").exists():
        return "mean", False
    modules = json.loads((folder / "modules.json").read_text())
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise UserError(f"{folder}/modules.json has a module {unknown[0]}, which is not computed here")
    where = next((module["path"] for module in modules if module["type"].endswith("Pooling")), None)
    if where is None:
        raise UserError(f"{folder}/modules.json has no Pooling module: an embedding needs one")
    stated = read_json(folder / where / "config.json")
    chosen = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value]
    poolings: dict[str, Pooling] = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    if len(chosen) != 1 or chosen[0] not in poolings:
        raise UserError(f"{folder}/{where} pools by {', '.join(chosen) or 'nothing'}: cls or mean is computed here")
    return poolings[chosen[0]], "Normalize" in kinds


class Embedder:
    """Texts to vectors."""

    def __init__(
        self, directory: str | os.PathLike[str], config: EmbedderConfig, encoder: Encoder, mesh: Mesh | None = None
    ) -> None:
        self.config, self.encoder, self.mesh = config, encoder, mesh
        path = pathlib.Path(directory) / "tokenizer.json"
        if not path.exists():
            raise UserError(f"{path} is missing: give the directory of an embedder with its fast tokenizer")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True  # a passage that says [SEP] says five characters
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(config.max_tokens)
        if self._tokenizer.get_vocab_size() > encoder.config.vocab_size:
            raise UserError(
                f"the tokenizer of {directory} has {self._tokenizer.get_vocab_size()} entries and the model embeds "
                f"{encoder.config.vocab_size}: take both from the same checkpoint"
            )
        self._lengths = (*(length for length in LENGTHS if length < config.max_tokens), config.max_tokens)
        self._program = _program(config.pooling, config.normalised)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        *,
        prefixes: str | None = None,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ) -> "Embedder":
        config = embedder_config(directory, prefixes=prefixes)
        return cls(directory, config, load_encoder(directory, dtype=dtype, mesh=mesh), mesh)

    @property
    def dimension(self) -> int:
        return self.encoder.config.hidden_size

    def embed(
        self, texts: Sequence[str], role: Role, *, on_batch: Callable[[int], None] = lambda done: None
    ) -> Float[np.ndarray, "texts hidden"]:
        """One float32 row a text, in their order. `on_batch` is told how many are done.

        Passages fill batches of nearly equal lengths. A query is computed in batches of its own length and of one size, so that its
        numbers are the same to the bit whatever it comes with: what a search finds must not depend on who else asks.
        """
        prefix = self.config.query_prefix if role == "query" else self.config.passage_prefix
        encoded = encode_truncated(self._tokenizer, [prefix + text for text in texts], self.config.max_tokens)
        lengths = [next(size for size in self._lengths if size >= len(ids)) for ids in encoded]
        order = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))
        embeddings = np.zeros((len(texts), self.dimension), np.float32)
        started = 0
        pending: tuple[list[int], Array] | None = None
        while started < len(order):
            length = lengths[order[started]]  # of the longest that is left
            rows = self._rows(length, role)
            chosen = [
                place for place in order[started : started + rows] if role == "passage" or lengths[place] == length
            ]
            started += len(chosen)
            result = self._run([encoded[place] for place in chosen], rows, length)
            if pending is not None:  # read one batch late: the device computes the next while this one is copied
                embeddings[pending[0]] = np.asarray(pending[1])[: len(pending[0])]
            pending = chosen, result
            on_batch(started)
        if pending is not None:
            embeddings[pending[0]] = np.asarray(pending[1])[: len(pending[0])]
        return embeddings

    def _rows(self, length: int, role: Role) -> int:
        """Rows of a batch of this length: fixed, so that each length is compiled once a role; a multiple of the data axis."""
        data = 1 if self.mesh is None else self.mesh.shape["data"]
        tokens = BATCH_TOKENS.get(jax.default_backend(), ACCELERATOR_BATCH_TOKENS)
        if role == "query":
            tokens //= QUERY_SHARE
        return max(1, tokens // length // data) * data

    def _run(self, encoded: Sequence[Sequence[int]], rows: int, length: int) -> Array:
        tokens = np.zeros((rows, length), np.int32)
        present = np.zeros((rows, length), bool)
        present[:, 0] = True  # rows beyond the texts read one token, so that no softmax is over nothing
        for row, ids in enumerate(encoded):
            tokens[row, : len(ids)] = ids
            present[row, : len(ids)] = True
        batch = (tokens, present)
        if self.mesh is not None:
            batch = jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))
        graph, weights = nnx.split(self.encoder)
        return self._program(graph, weights, *batch)


@functools.cache
def _program(pooling: Pooling, normalised: bool) -> Callable[..., Array]:
    """Compiled once a shape, whichever embedder asks."""

    def embed(graph: nnx.GraphDef, weights: nnx.State, tokens: Array, present: Array) -> Float[Array, "batch hidden"]:
        states = nnx.merge(graph, weights)(tokens, present)
        if pooling == "cls":
            pooled = states[:, 0]
        else:
            weight = present[..., None].astype(jnp.float32)
            pooled = jnp.sum(states * weight, axis=1) / jnp.sum(weight, axis=1)
        if normalised:
            pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
        return pooled

    return jax.jit(embed, static_argnums=0)
