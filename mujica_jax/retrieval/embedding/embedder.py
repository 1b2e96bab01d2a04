"""Texts to vectors, by an encoder (`models.encoder`) in the sentence-transformers layout.

What is read of a folder beside the encoder's files: `tokenizer.json`; `modules.json` with
`1_Pooling/config.json` says how token states become one vector, `sentence_bert_config.json` how
many tokens are read, `config_sentence_transformers.json` which prefix queries and passages carry.

Texts are sorted by length and padded to a few lengths, so that a corpus compiles a handful of
programs and pads little; the rows of a batch are split over the mesh's `data` axis.
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

# Lengths that texts are padded to, in tokens. From 64 on padding costs at most a fifth.
LENGTHS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Tokens in one batch: on two CPU cores 4,096 and 16,384 were equally fast; an accelerator wants
# more.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 65_536
# A batch of queries has this many times fewer tokens: a query often comes alone, and a whole batch
# is computed for it.
QUERY_SHARE = 8
# Characters of a long text that are read for each token; English takes about four.
CHARACTERS_A_TOKEN = 16
END_OF_WORD = re.compile(r"(?<=\S)[ \t\r\n]")
# Prefixes that the authors of these models train with and that their folders do not state: (query,
# passage).
PREFIXES: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
    "e5": ("query: ", "passage: "),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderConfig:
    """The way from token states to an embedding."""

    pooling: Pooling
    normalised: bool  # to length 1, so that a dot product is a cosine
    max_tokens: int  # of a text with its two special tokens; longer ones are cut
    query_prefix: str = ""
    passage_prefix: str = ""


def embedder_config(directory: Folder, *, prefixes: str | None = None) -> EmbedderConfig:
    """Read how a folder's model embeds.

    Without `modules.json` (contriever) an embedding is the mean of the states, not normalised.

    `prefixes` names an entry of PREFIXES; None takes the folder's own prompts, or none.
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
    """Read how many tokens of a text are embedded. Raises UserError."""
    max_tokens = encoder_config(read_json(folder / "config.json")).max_positions
    file = folder / "sentence_bert_config.json"
    if not file.exists():
        return max_tokens

    limit = read_json(file).get("max_seq_length") or max_tokens
    if type(limit) is not int or limit < 1:
        raise UserError(
            f"{file} sets max_seq_length to {limit!r} and a whole number is needed: correct it"
        )
    return min(max_tokens, limit)


def _own_prefixes(folder: pathlib.Path) -> tuple[str, str]:
    """Read the prefixes of queries and passages that a folder names. Raises UserError."""
    file = folder / "config_sentence_transformers.json"
    prompts = (read_json(file).get("prompts") or {}) if file.exists() else {}
    is_map = isinstance(prompts, dict)
    if not is_map or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise UserError(
            f"{file} sets prompts to {prompts!r} and a map of texts is needed: correct it"
        )
    passage_prefix = prompts.get("passage", prompts.get("document", ""))
    return prompts.get("query", ""), passage_prefix


def _pooling(folder: pathlib.Path) -> tuple[Pooling, bool]:
    """Read how states become one vector, and whether that is normalised. Raises UserError."""
    if not (folder / "modules.json").exists():
        return "mean", False
    modules = _modules(folder / "modules.json")
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UserError(
                f"{folder}/modules.json has a module {kind}, which is not computed here"
            )
    paths = [module["path"] for module in modules if module["type"].endswith("Pooling")]
    if not paths:
        raise UserError(f"{folder}/modules.json has no Pooling module: an embedding needs one")

    fields = read_json(folder / paths[0] / "config.json")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    poolings: dict[str, Pooling] = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
    }
    if len(modes) != 1 or modes[0] not in poolings:
        raise UserError(
            f"{folder}/{paths[0]} pools by {', '.join(modes) or 'nothing'}: cls or mean is "
            "computed here"
        )
    return poolings[modes[0]], "Normalize" in kinds


def _modules(file: pathlib.Path) -> list[dict[str, Any]]:
    """Read the modules of an embedder: a list of objects with a type and a path.

    Raises UserError if the file holds no such list.
    """
    refuse_pointer(file)
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): download it again") from error
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        raise UserError(f"{file} holds no list of modules with type and path: download it again")
    return modules


def _is_module(value: Any) -> bool:
    """Return whether a JSON value is an object with a type and a path."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("type"), str) and isinstance(value.get("path"), str)


class Embedder:
    """Texts to vectors."""

    def __init__(
        self, directory: Folder, config: EmbedderConfig, encoder: Encoder, mesh: Mesh | None = None
    ) -> None:
        self.config = config
        self.encoder = encoder
        self.mesh = mesh
        path = pathlib.Path(directory) / "tokenizer.json"
        if not path.exists():
            raise UserError(
                f"{path} is missing: give the directory of an embedder with its fast tokenizer"
            )
        read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            raise UserError(f"{path} cannot be used ({error}): download it again") from error
        # A passage that says [SEP] says five characters.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(config.max_tokens)
        if self._tokenizer.get_vocab_size() > encoder.config.vocab_size:
            raise UserError(
                f"the tokenizer of {directory} has {self._tokenizer.get_vocab_size()} entries and "
                f"the model embeds {encoder.config.vocab_size}: take both from the same checkpoint"
            )
        shorter_lengths = [length for length in LENGTHS if length < config.max_tokens]
        self._lengths = (*shorter_lengths, config.max_tokens)

    @property
    def dimension(self) -> int:
        return self.encoder.config.hidden_size

    def embed(
        self,
        texts: Sequence[str],
        role: Role,
        *,
        on_batch: Callable[[int], None] = lambda done: None,
    ) -> Float[np.ndarray, "texts hidden"]:
        """Return one float32 row per text, in their order. `on_batch` gets how many are done.

        Passages fill batches of nearly equal lengths. A query is computed in batches of its own
        length and of one size, so that its numbers are the same to the bit whatever it comes with:
        the result of a search must not depend on the other searches.
        """
        prefix = self.config.query_prefix if role == "query" else self.config.passage_prefix
        encoded = encode_truncated(
            self._tokenizer, [prefix + text for text in texts], self.config.max_tokens
        )
        lengths = [self._padded_length(len(ids)) for ids in encoded]
        longest_first = sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))

        embeddings = np.zeros((len(texts), self.dimension), np.float32)
        # Places and embeddings of the last batch. They are read one batch late: the device computes
        # the next one while they are copied.
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
        return next(length for length in self._lengths if length >= num_tokens)

    def _rows(self, length: int, role: Role) -> int:
        """Return the number of rows in a batch of this length.

        It is fixed, so that each length is compiled once a role. It is a multiple of the data axis.
        """
        data = 1 if self.mesh is None else self.mesh.shape["data"]
        tokens = BATCH_TOKENS.get(jax.default_backend(), ACCELERATOR_BATCH_TOKENS)
        if role == "query":
            tokens //= QUERY_SHARE
        return max(1, tokens // length // data) * data

    def _run(self, encoded: Sequence[Sequence[int]], rows: int, length: int) -> Array:
        """Embed one batch, padded to rows x length. Returns while it is being computed."""
        tokens = np.zeros((rows, length), np.int32)
        present = np.zeros((rows, length), bool)
        # Rows beyond the texts read one token, so that no softmax is over nothing.
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
    """Copy the embeddings of a batch, without its padding, to their places."""
    embeddings[places] = np.asarray(batch_embeddings)[: len(places)]


def encode_truncated(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Return the ids of each text, which the tokenizer cuts at `max_tokens`.

    A text may be as long as a book, so only its beginning is read, up to a space. The whole text is
    read if the beginning gives fewer tokens than the limit. So the ids are those of the whole text
    for every tokenizer that begins again behind a space, as BERT's do. A tokenizer whose tokens
    reach across spaces can give other ids near the end of a text that has more than
    CHARACTERS_A_TOKEN * max_tokens characters.
    """
    beginnings = [_beginning(text, CHARACTERS_A_TOKEN * max_tokens) for text in texts]
    encoded = [entry.ids for entry in tokenizer.encode_batch(beginnings)]
    for place, (text, beginning) in enumerate(zip(texts, beginnings, strict=True)):
        if len(beginning) < len(text) and len(encoded[place]) < max_tokens:
            encoded[place] = tokenizer.encode(text).ids
    return encoded


def _beginning(text: str, characters: int) -> str:
    """Return at least this many characters, up to the end of a word."""
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
    """Embed a batch of token ids; `present` is False for padding."""
    states = nnx.merge(graph, weights)(tokens, present)
    if pooling == "cls":
        pooled = states[:, 0]
    else:
        weight = present[..., None].astype(jnp.float32)
        pooled = jnp.sum(states * weight, axis=1) / jnp.sum(weight, axis=1)
    if normalised:
        pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    return pooled
