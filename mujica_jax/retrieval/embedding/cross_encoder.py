"""A cross-encoder: a BERT or (XLM-)RoBERTa encoder with a head that scores a query and a passage.

    BERT           score = w . tanh(P h + p) + b      the head is `bert.pooler` and `classifier`
    (XLM-)RoBERTa  score = w . tanh(P h + p) + b      the head is `classifier`

    h is the state of the first token after the last layer. The input is one sequence: the query, a
    separator, the passage.

The checkpoint is one of a `...ForSequenceClassification` with one label, such as
cross-encoder/ms-marco-MiniLM-L6-v2 and BAAI/bge-reranker-v2-m3. The score is the label's logit: any
real number, higher for passages that answer the query better. `find_cross_encoder.py` finds a
checkpoint by its name.
"""

import functools
import pathlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json
from mujica_jax.models.layers import Weight
from mujica_jax.models.tensors import Folder, Tensors, WeightTable, open_file, safetensors_files
from mujica_jax.retrieval.embedding.encoder import (
    INITIALIZER_RANGE,
    Encoder,
    EncoderConfig,
    dense_weights,
    encoder_config,
    weight_table,
)
from mujica_jax.retrieval.embedding.token_batches import (
    CHARACTERS_A_TOKEN,
    Batch,
    Batching,
    beginning_of,
    open_tokenizer,
)

# The longest pair of query and passage, in tokens. Longer passages are cut. Checkpoints that read
# longer texts were trained on pairs of at most this length.
MAX_PAIR_TOKENS = 1024
# Lengths to which pairs are padded, in tokens. They are fewer than those of texts, because the pairs
# of a few queries should fill whole batches.
PAIR_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The number of tokens in a batch is divided by this. The pairs of one query fill a few batches.
BATCH_DIVISOR = 4
# Tensors of a checkpoint that are not loaded: a buffer.
IGNORED = re.compile(r"(^|\.)position_ids$")
# Names of the dense layers of the head in a checkpoint, by the prefix of the encoder's tensors: the
# layer before tanh, and the one that gives the score.
HEADS = {
    "bert.": ("pooler.dense", "classifier"),
    "roberta.": ("classifier.dense", "classifier.out_proj"),
}
ADVICE = (
    "give a cross-encoder with one label, such as cross-encoder/ms-marco-MiniLM-L6-v2 or "
    "BAAI/bge-reranker-v2-m3"
)


def check_cross_encoder(directory: Folder) -> EncoderConfig:
    """Return the configuration of a cross-encoder's encoder.

    Raises UserError if the folder holds an embedder, a classifier of several labels, or a model of
    another kind.
    """
    folder = pathlib.Path(directory)
    fields = read_json(folder / "config.json")
    config = encoder_config(fields)
    names: set[str] = set()
    for path in safetensors_files(folder):
        with open_file(path) as opened:
            names |= set(opened.keys())
    _, score = HEADS[config.prefix]
    if f"{score}.weight" not in names:
        raise UserError(
            f"{folder} has no weights {score}.weight, so it is an embedder or a bare encoder and "
            f"cannot score pairs: {ADVICE}"
        )
    # transformers takes two labels if the file names none.
    labels = fields.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if num_labels != 1:
        raise UserError(
            f"{folder} classifies into {num_labels} labels, but a reranker has one score: {ADVICE}"
        )
    return config


def head_weights(config: EncoderConfig) -> tuple[Weight, ...]:
    """Return the weights of the head."""
    pooler, score = HEADS[config.prefix]
    hidden = config.hidden_size
    return (
        *dense_weights("pooler", hidden, hidden, hugging_face=pooler),
        *dense_weights("score", hidden, 1, hugging_face=score),
    )


def cross_encoder_table(config: EncoderConfig) -> WeightTable:
    """Return all weights of a cross-encoder, with their names in a checkpoint."""
    table = weight_table(config)
    return WeightTable(
        outer=[*table.outer, *head_weights(config)],
        inner=table.inner,
        num_layers=table.num_layers,
        layer=table.layer,
        stacked=table.stacked,
    )


class PairScorer(Encoder):
    """An encoder with the head of a cross-encoder."""

    pooler_kernel: nnx.Param
    pooler_bias: nnx.Param
    score_kernel: nnx.Param
    score_bias: nnx.Param

    def __init__(
        self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ) -> None:
        super().__init__(config, rngs=rngs, dtype=dtype)
        for weight in head_weights(config):
            drawn = weight.draw(rngs.params(), INITIALIZER_RANGE)
            setattr(self, weight.name, nnx.Param(drawn))

    def scores(
        self,
        tokens: Int[Array, "batch time"],
        present: Bool[Array, "batch time"],
        types: Int[Array, "batch time"],
    ) -> Float[Array, " batch"]:
        """Return the score of each pair, in float32."""
        first_states = self(tokens, present, types)[:, 0]
        pooled = jnp.tanh(first_states @ self.pooler_kernel[...] + self.pooler_bias[...])
        return (pooled @ self.score_kernel[...] + self.score_bias[...])[:, 0]


class CrossEncoder:
    """A model that scores how well passages answer a query."""

    def __init__(self, directory: Folder, scorer: PairScorer) -> None:
        """Load the tokenizer in `directory`. Raises UserError if it cannot be used."""
        self._scorer = scorer
        config = scorer.config
        self.max_tokens = max_pair_tokens(pathlib.Path(directory), config)
        self._tokenizer = open_tokenizer(directory, config.vocab_size)
        # This is what transformers does with `truncation=True`: the longer text is cut, which is
        # the passage unless the query fills half of the pair.
        self._tokenizer.enable_truncation(self.max_tokens, strategy="longest_first")
        self._batching = Batching(self.max_tokens, lengths=PAIR_LENGTHS)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " pairs"]:
        """Return the scores of pairs of a query and a passage, in float32.

        A batch has pairs of one padded length, and the number of rows is fixed. The score of a pair
        is then the same to the last bit, whatever other pairs are scored with it.
        """
        encodings = self._encode(pairs)
        ids = [encoding.ids for encoding in encodings]
        # The second text of a pair has type 1. RoBERTa has one type only.
        has_types = self._scorer.config.type_vocab_size > 1
        types = [encoding.type_ids if has_types else [] for encoding in encodings]

        # Start all batches before the first is waited for. Their results are small.
        started: list[tuple[Batch, Array]] = []
        graph, weights = nnx.split(self._scorer)
        for batch in self._batching.plan(
            [len(pair_ids) for pair_ids in ids], is_uniform=True, divisor=BATCH_DIVISOR
        ):
            tokens, present = batch.padded(ids)
            batch_types, _ = batch.padded(types)
            started.append((batch, _score(graph, weights, tokens, present, batch_types)))

        scores = np.zeros(len(pairs), np.float32)
        for batch, batch_scores in started:
            scores[batch.places] = np.asarray(batch_scores)[: len(batch.places)]
        return scores

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[tokenizers.Encoding]:
        """Return the encodings of pairs, cut at `max_tokens`.

        Only the beginning of a long text is tokenised, as in `token_batches.encode_truncated`.
        """
        characters = CHARACTERS_A_TOKEN * self.max_tokens
        beginnings = [
            (beginning_of(query, characters), beginning_of(passage, characters))
            for query, passage in pairs
        ]
        encodings = self._tokenizer.encode_batch(beginnings)
        for place, (pair, beginning) in enumerate(zip(pairs, beginnings, strict=True)):
            if pair != beginning and len(encodings[place].ids) < self.max_tokens:
                encodings[place] = self._tokenizer.encode(*pair)
        return encodings


def load_cross_encoder(directory: Folder, *, dtype: DTypeLike = jnp.float32) -> CrossEncoder:
    """Load the cross-encoder of a Hugging Face folder. Raises UserError."""
    folder = pathlib.Path(directory)
    config = check_cross_encoder(folder)
    scorer = nnx.eval_shape(lambda: PairScorer(config, rngs=nnx.Rngs(0), dtype=dtype))
    tensors = Tensors(
        folder,
        cross_encoder_table(config),
        needed="a BERT or RoBERTa cross-encoder",
        ignored=IGNORED,
        prefix=config.prefix,
    )
    nnx.update(scorer, tensors.load(None))
    return CrossEncoder(folder, scorer)


def max_pair_tokens(folder: pathlib.Path, config: EncoderConfig) -> int:
    """Return the longest pair that is read, in tokens.

    It is the limit of the model, of `tokenizer_config.json` or MAX_PAIR_TOKENS, whichever is
    smallest.
    """
    max_tokens = min(config.max_tokens, MAX_PAIR_TOKENS)
    file = folder / "tokenizer_config.json"
    limit = read_json(file).get("model_max_length") if file.exists() else None
    # transformers writes 1e30 if there is no limit.
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 1:
        max_tokens = int(min(max_tokens, limit))
    return max_tokens


@functools.partial(jax.jit, static_argnames=("graph",))
def _score(
    graph: nnx.GraphDef, weights: nnx.State, tokens: Array, present: Array, types: Array
) -> Float[Array, " batch"]:
    """Return the scores of a batch of pairs."""
    return nnx.merge(graph, weights).scores(tokens, present, types)
