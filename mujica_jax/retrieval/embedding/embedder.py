"""Turn texts into vectors with an encoder (`encoder.py`) in the sentence-transformers layout.

Besides the files of the encoder, these files of the folder are read:

- `tokenizer.json`;
- `modules.json` and `1_Pooling/config.json`: how token states become one vector;
- `sentence_bert_config.json`: how many tokens of a text are read;
- `config_sentence_transformers.json`: the prefixes of queries and passages.

Texts are sorted by length and padded to one of a few lengths. So only a few programs are compiled,
and there is little padding. The rows of a batch are split over the `data` axis of the mesh.
"""

import dataclasses
import functools
import json
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
from jaxtyping import Array, Float

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json, refuse_pointer
from mujica_jax.models.tensors import Folder
from mujica_jax.retrieval.embedding.encoder import Encoder, encoder_config

Pooling = Literal["cls", "mean"]
Role = Literal["query", "passage"]

# Lengths to which texts are padded, in tokens. From 64 on, padding adds at most a quarter.
LENGTHS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Number of tokens in a batch, by platform. On two CPU cores, 4,096 and 16,384 were equally fast.
# Accelerators need more.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 65_536
# The number of tokens is divided by this for queries. A query often arrives alone, and a whole
# batch is computed for it.
QUERY_SHARE = 8
# Of a long text, this number of characters is read for each token. English has about four.
CHARACTERS_A_TOKEN = 16
END_OF_WORD = re.compile(r"(?<=\S)[ \t\r\n]")
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

    # "cls" takes the state of the first token, "mean" the mean over all tokens.
    pooling: Pooling
    # Scale embeddings to length 1, so that a dot product is a cosine.
    normalised: bool
    # The largest number of tokens of a text, with its two special tokens. Longer texts are cut.
    max_tokens: int
    # Text that is put before every query.
    query_prefix: str = ""
    # Text that is put before every passage.
    passage_prefix: str = ""


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
    max_tokens = encoder_config(read_json(folder / "config.json")).max_positions
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

    fields = read_json(folder / paths[0] / "config.json")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    poolings: dict[str, Pooling] = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
    }
    if len(modes) != 1 or modes[0] not in poolings:
        raise UserError(
            f"{folder}/{paths[0]} has the pooling {', '.join(modes) or 'none'}, which is not "
            "supported: give an embedder with cls or mean pooling"
        )
    return poolings[modes[0]], "Normalize" in kinds


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
        self, directory: Folder, config: EmbedderConfig, encoder: Encoder, mesh: Mesh | None = None
    ) -> None:
        """Load the tokenizer in `directory`. Raises UserError if it cannot be used.

        With a `mesh`, the rows of a batch are split over its `data` axis.
        """
        self.config = config
        self.encoder = encoder
        self.mesh = mesh
        path = pathlib.Path(directory) / "tokenizer.json"
        if not path.exists():
            raise UserError(
                f"{path} is missing: give the folder of an embedder with its fast tokenizer"
            )
        read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            # The package raises plain exceptions.
            raise UserError(f"{path} cannot be used ({error}): download it again") from error
        # The text "[SEP]" in a passage is five characters, not a special token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(config.max_tokens)
        if self._tokenizer.get_vocab_size() > encoder.config.vocab_size:
            raise UserError(
                f"the tokenizer of {directory} has {self._tokenizer.get_vocab_size()} entries, but "
                f"the model has only {encoder.config.vocab_size}: take both from the same checkpoint"
            )
        shorter_lengths = [length for length in LENGTHS if length < config.max_tokens]
        self._lengths = (*shorter_lengths, config.max_tokens)

    @property
    def dimension(self) -> int:
        """The dimension of an embedding."""
        return self.encoder.config.hidden_size

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
        lengths = [self._padded_length(len(ids)) for ids in encoded]
        longest_first = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))

        embeddings = np.zeros((len(texts), self.dimension), np.float32)
        # Places and embeddings of the last batch. They are copied after the next batch is started,
        # so that the device computes during the copy.
        pending: tuple[list[int], Array] | None = None
        num_started = 0
        while num_started < len(longest_first):
            length = lengths[longest_first[num_started]]
            rows = self._rows(length, role)
            places = longest_first[num_started : num_started + rows]
            if role == "query":
                places = [place for place in places if lengths[place] == length]
            num_started += len(places)
            batch_embeddings = self._run([encoded[place] for place in places], rows, length)
            if pending is not None:
                _copy_rows(*pending, embeddings)
            pending = (places, batch_embeddings)
            on_batch(num_started)
        if pending is not None:
            _copy_rows(*pending, embeddings)
        return embeddings

    def _padded_length(self, num_tokens: int) -> int:
        """Return the smallest length for padding that is at least `num_tokens`."""
        return next(length for length in self._lengths if length >= num_tokens)

    def _rows(self, length: int, role: Role) -> int:
        """Return the number of rows in a batch of texts of this padded length.

        It is the same for all batches of a length and a role, so that each is compiled once. It is
        a multiple of the size of the data axis.
        """
        data = 1 if self.mesh is None else self.mesh.shape["data"]
        tokens = BATCH_TOKENS.get(jax.default_backend(), ACCELERATOR_BATCH_TOKENS)
        if role == "query":
            tokens //= QUERY_SHARE
        return max(1, tokens // length // data) * data

    def _run(self, encoded: Sequence[Sequence[int]], rows: int, length: int) -> Array:
        """Start to embed one batch, padded to [rows, length]. Return its embeddings.

        `encoded` are the token ids of each text. The call does not wait for the computation.
        """
        tokens = np.zeros((rows, length), np.int32)
        present = np.zeros((rows, length), bool)
        # Padding rows have one token too, because a softmax over no tokens is undefined.
        present[:, 0] = True
        for row, ids in enumerate(encoded):
            tokens[row, : len(ids)] = ids
            present[row, : len(ids)] = True
        batch = (tokens, present)
        if self.mesh is not None:
            batch = jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))
        graph, weights = nnx.split(self.encoder)
        return _embed(
            graph, weights, *batch, pooling=self.config.pooling, normalised=self.config.normalised
        )


def _copy_rows(places: list[int], batch_embeddings: Array, embeddings: np.ndarray) -> None:
    """Copy the embeddings of a batch, without padding rows, to their places in `embeddings`."""
    embeddings[places] = np.asarray(batch_embeddings)[: len(places)]


def encode_truncated(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Return the token ids of each text, cut at `max_tokens`.

    A text may be as long as a book. To save time, only its beginning is tokenised, up to a space.
    If the beginning gives fewer than `max_tokens` tokens, the whole text is tokenised.

    The result is the same as for the whole text if the tokenizer first splits texts at spaces, as
    in BERT. With other tokenizers, ids near the cut can differ for texts of more than
    CHARACTERS_A_TOKEN * max_tokens characters.
    """
    beginnings = [_beginning(text, CHARACTERS_A_TOKEN * max_tokens) for text in texts]
    encoded = [entry.ids for entry in tokenizer.encode_batch(beginnings)]
    for place, (text, beginning) in enumerate(zip(texts, beginnings, strict=True)):
        if len(beginning) < len(text) and len(encoded[place]) < max_tokens:
            encoded[place] = tokenizer.encode(text).ids
    return encoded


def _beginning(text: str, characters: int) -> str:
    """Return the beginning of a text: at least `characters`, up to the end of a word."""
    if len(text) <= characters:
        return text
    word_end = END_OF_WORD.search(text, characters)
    return text[: word_end.start()] if word_end else text


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
    else:
        weight = present[..., None].astype(jnp.float32)
        pooled = jnp.sum(states * weight, axis=1) / jnp.sum(weight, axis=1)
    if normalised:
        pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    return pooled
