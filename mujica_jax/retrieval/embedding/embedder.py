"""Turn texts into vectors with an encoder or a decoder in the sentence-transformers layout.

The model is a BERT or RoBERTa encoder (`encoder.py`), or a decoder without its output head
(`decoder_states.py`). Besides the files of the model, these files of the folder are read:

- `tokenizer.json`;
- `modules.json` and `1_Pooling/config.json`: how token states become one vector;
- `sentence_bert_config.json`: how many tokens of a text are read;
- `config_sentence_transformers.json`: the prefixes of queries and passages.

`token_batches.py` puts texts into batches. The rows of a batch are split over the `data` axis of the
mesh.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json, refuse_pointer
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.tensors import Folder
from mujica_jax.retrieval.embedding.decoder_states import (
    DecoderStates,
    decoder_config,
    is_decoder,
    load_decoder_states,
)
from mujica_jax.retrieval.embedding.encoder import (
    Encoder,
    EncoderConfig,
    encoder_config,
    load_encoder,
)
from mujica_jax.retrieval.embedding.token_batches import (
    Batching,
    encode_truncated,
    open_tokenizer,
)

Pooling = Literal["cls", "mean", "last"]
Role = Literal["query", "passage"]

# The number of tokens is divided by this for queries. A query often arrives alone, and a whole
# batch is computed for it.
QUERY_SHARE = 8
# The longest text that is read with a decoder, in tokens. Decoders read much longer texts than
# passages, and attention over them would take too much memory.
MAX_DECODER_TOKENS = 8192
# Pooling of the fields `pooling_mode_...` and of the values of `pooling_mode` in a
# `1_Pooling/config.json`.
POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
# Prefixes of (queries, passages) with which these models were trained. Their folders do not state
# them.
PREFIXES: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
    "e5": ("query: ", "passage: "),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderConfig:
    """The settings that determine how a text becomes an embedding."""

    # "cls" takes the state of the first token, "last" that of the last token, and "mean" the mean
    # over all tokens.
    pooling: Pooling
    # Scale embeddings to length 1, so that a dot product is a cosine.
    normalised: bool
    # The largest number of tokens of a text, with its two special tokens. Longer texts are cut.
    max_tokens: int
    # Text that is put before every query.
    query_prefix: str = ""
    # Text that is put before every passage.
    passage_prefix: str = ""


def model_config(folder: pathlib.Path) -> EncoderConfig | DecoderConfig:
    """Return the configuration of the encoder or decoder in a folder. Raises UserError."""
    fields = read_json(folder / "config.json")
    return decoder_config(fields) if is_decoder(fields) else encoder_config(fields)


def load_model(
    folder: pathlib.Path, *, dtype: DTypeLike, mesh: Mesh | None = None
) -> Encoder | DecoderStates:
    """Load the encoder or decoder of a folder. Raises UserError.

    Products are computed in `dtype`. With a `mesh`, every device of the mesh gets a copy of the
    weights.
    """
    if is_decoder(read_json(folder / "config.json")):
        return load_decoder_states(folder, dtype=dtype, mesh=mesh)
    return load_encoder(folder, dtype=dtype, mesh=mesh)


def _context_tokens(config: EncoderConfig | DecoderConfig) -> int:
    """Return the longest text that is read with a model, in tokens."""
    if isinstance(config, DecoderConfig):
        return min(config.context_tokens, MAX_DECODER_TOKENS)
    return config.max_tokens


def embedder_config(directory: Folder, *, prefixes: str | None = None) -> EmbedderConfig:
    """Read from a folder how its model embeds texts. Raises UserError.

    Without `modules.json` (as in contriever), an embedding is the mean of the token states and is
    not normalised.

    `prefixes` is an entry of PREFIXES. None takes the prompts in the folder, or no prefixes.
    """
    folder = pathlib.Path(directory)
    if prefixes is not None and prefixes not in PREFIXES:
        raise UserError(f"prefixes is {prefixes!r}: give one of {', '.join(PREFIXES)}")
    max_tokens = _max_tokens(folder)
    pooling, normalised = _pooling(folder)
    query_prefix, passage_prefix = _own_prefixes(folder)
    if prefixes is not None:
        query_prefix, passage_prefix = PREFIXES[prefixes]
    return EmbedderConfig(
        pooling=pooling,
        normalised=normalised,
        max_tokens=max_tokens,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )


def _max_tokens(folder: pathlib.Path) -> int:
    """Return the largest number of tokens of a text. Raises UserError."""
    max_tokens = _context_tokens(model_config(folder))
    file = folder / "sentence_bert_config.json"
    if not file.exists():
        return max_tokens

    limit = read_json(file).get("max_seq_length") or max_tokens
    if type(limit) is not int or limit < 1:
        raise UserError(
            f"{file} sets max_seq_length to {limit!r}, but a whole number above 0 is needed: "
            "correct it"
        )
    return min(max_tokens, limit)


def _own_prefixes(folder: pathlib.Path) -> tuple[str, str]:
    """Return the prefixes of queries and passages in a folder's files. Raises UserError."""
    file = folder / "config_sentence_transformers.json"
    prompts = (read_json(file).get("prompts") or {}) if file.exists() else {}
    is_map = isinstance(prompts, dict)
    if not is_map or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise UserError(
            f"{file} sets prompts to {prompts!r}, but an object of strings is needed: correct it"
        )
    passage_prefix = prompts.get("passage", prompts.get("document", ""))
    return prompts.get("query", ""), passage_prefix


def _pooling(folder: pathlib.Path) -> tuple[Pooling, bool]:
    """Return the pooling, and whether embeddings are normalised. Raises UserError."""
    if not (folder / "modules.json").exists():
        fields = read_json(folder / "config.json")
        if is_decoder(fields):
            raise UserError(
                f"{folder} is a decoder ({fields['model_type']}) without modules.json and "
                "1_Pooling/config.json, which say how its token states become one vector: download "
                "these files of the embedder too, or write them as docs/guides/passages.md shows"
            )
        return "mean", False
    modules = _modules(folder / "modules.json")
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UserError(
                f"{folder}/modules.json has a module {kind}, which is not supported: give an "
                "embedder with only Transformer, Pooling and Normalize"
            )
    paths = [module["path"] for module in modules if module["type"].endswith("Pooling")]
    if not paths:
        raise UserError(
            f"{folder}/modules.json has no Pooling module: give an embedder that has one"
        )
    return _pooling_mode(folder / paths[0]), "Normalize" in kinds


def _pooling_mode(folder: pathlib.Path) -> Pooling:
    """Return the pooling that the `config.json` of a Pooling module names. Raises UserError."""
    fields = read_json(folder / "config.json")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    if isinstance(fields.get("pooling_mode"), str):
        modes = [fields["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(
            f"{folder} has the pooling {', '.join(modes) or 'none'}, which is not supported: give "
            f"an embedder whose config.json there names one of {', '.join(POOLINGS)}"
        )
    return POOLINGS[modes[0]]


def _modules(file: pathlib.Path) -> list[dict[str, Any]]:
    """Return the modules in `modules.json`: a list of objects with a type and a path.

    Raises UserError if the file holds something else.
    """
    refuse_pointer(file)
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): download it again") from error
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        raise UserError(
            f"{file} is not a list of modules with a type and a path: download it again"
        )
    return modules


def _is_module(value: Any) -> bool:
    """Return whether a JSON value is an object with a type and a path, both strings."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("type"), str) and isinstance(value.get("path"), str)


class Embedder:
    """A model that turns texts into vectors."""

    def __init__(
        self,
        directory: Folder,
        config: EmbedderConfig,
        model: Encoder | DecoderStates,
        mesh: Mesh | None = None,
    ) -> None:
        """Load the tokenizer in `directory`. Raises UserError if it cannot be used.

        With a `mesh`, the rows of a batch are split over its `data` axis.
        """
        self.config = config
        self.model = model
        self.mesh = mesh
        self._tokenizer = open_tokenizer(directory, model.config.vocab_size)
        self._tokenizer.enable_truncation(config.max_tokens)
        self._batching = Batching(config.max_tokens, mesh)

    @property
    def dimension(self) -> int:
        """The dimension of an embedding."""
        return self.model.config.hidden_size

    def embed(
        self,
        texts: Sequence[str],
        role: Role,
        *,
        on_batch: Callable[[int], None] = lambda done: None,
    ) -> Float[np.ndarray, "texts hidden"]:
        """Return the embeddings of texts in float32, [texts, hidden], in the order of the texts.

        `on_batch` is called with the number of texts done so far.

        A batch of passages has texts of nearly equal lengths. A batch of queries only has queries
        of one padded length, and the number of rows is fixed. The embedding of a query is then the
        same to the last bit, whatever other queries are in the batch. Otherwise the result of a
        search would depend on other searches.
        """
        prefix = self.config.query_prefix if role == "query" else self.config.passage_prefix
        encoded = encode_truncated(
            self._tokenizer, [prefix + text for text in texts], self.config.max_tokens
        )
        batches = self._batching.plan(
            [len(ids) for ids in encoded],
            is_uniform=role == "query",
            divisor=QUERY_SHARE if role == "query" else 1,
        )
        embeddings = np.zeros((len(texts), self.dimension), np.float32)
        # Places and embeddings of the last batch. They are copied after the next batch is started,
        # so that the device computes during the copy.
        pending: tuple[list[int], Array] | None = None
        num_started = 0
        for batch in batches:
            num_started += len(batch.places)
            batch_embeddings = self._run(*batch.padded(encoded))
            if pending is not None:
                _copy_rows(*pending, embeddings)
            pending = (batch.places, batch_embeddings)
            on_batch(num_started)
        if pending is not None:
            _copy_rows(*pending, embeddings)
        return embeddings

    def _run(self, tokens: np.ndarray, present: np.ndarray) -> Array:
        """Start to embed one batch, [rows, length]. Return its embeddings.

        The call does not wait for the computation.
        """
        batch: tuple = (tokens, present)
        mesh = contextlib.nullcontext()
        if self.mesh is not None:
            batch = jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))
            # The attention of a decoder splits its rows over the devices of this mesh.
            mesh = jax.set_mesh(self.mesh)
        graph, weights = nnx.split(self.model)
        with mesh:
            return _embed(
                graph,
                weights,
                *batch,
                pooling=self.config.pooling,
                normalised=self.config.normalised,
            )


def _copy_rows(places: list[int], batch_embeddings: Array, embeddings: np.ndarray) -> None:
    """Copy the embeddings of a batch, without padding rows, to their places in `embeddings`."""
    embeddings[places] = np.asarray(batch_embeddings)[: len(places)]


@functools.partial(jax.jit, static_argnames=("graph", "pooling", "normalised"))
def _embed(
    graph: nnx.GraphDef,
    weights: nnx.State,
    tokens: Array,
    present: Array,
    *,
    pooling: Pooling,
    normalised: bool,
) -> Float[Array, "batch hidden"]:
    """Return the embeddings of a batch of token ids. `present` is False for padding.

    `tokens` and `present` are [batch, time].
    """
    states = nnx.merge(graph, weights)(tokens, present)
    if pooling == "cls":
        pooled = states[:, 0]
    elif pooling == "last":
        last = jnp.sum(present, axis=1) - 1
        pooled = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
    else:
        weight = present[..., None].astype(jnp.float32)
        pooled = jnp.sum(states * weight, axis=1) / jnp.sum(weight, axis=1)
    if normalised:
        pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    return pooled
