"""Turn texts into batches of token ids with a few fixed shapes.

Texts are sorted by length and padded to one of a few lengths. So only a few programs are compiled,
and there is little padding. `embedder.py` and `cross_encoder.py` use this module.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json
from mujica_jax.models.tensors import Folder

# Lengths to which texts are padded, in tokens. From 64 on, padding adds at most a quarter.
LENGTHS = (
    *(16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896),
    *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
)
# Number of tokens in a batch, by platform. On two CPU cores, 4,096 and 16,384 were equally fast.
# Accelerators need more.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 65_536
# The scores of attention take memory in proportion to tokens * length. Above this length, a batch
# has fewer tokens, so that the scores take no more memory.
LONG_TEXT_TOKENS = 512
# Of a long text, this number of characters is read for each token. English has about four.
CHARACTERS_A_TOKEN = 16
END_OF_WORD = re.compile(r"(?<=\S)[ \t\r\n]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The texts of one batch, by their places in the input, and the shape of its arrays."""

    places: list[int]
    rows: int
    # Padded length, in tokens.
    length: int

    def padded(
        self, encoded: Sequence[Sequence[int]]
    ) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
        """Return the token ids of the batch, and which of them are no padding.

        `encoded` are the ids of all texts of the input.
        """
        tokens = np.zeros((self.rows, self.length), np.int32)
        present = np.zeros((self.rows, self.length), bool)
        # Padding rows have one token too, because a softmax over no tokens is undefined.
        present[:, 0] = True
        for row, place in enumerate(self.places):
            ids = encoded[place]
            tokens[row, : len(ids)] = ids
            present[row, : len(ids)] = True
        return tokens, present


class Batching:
    """The shapes of the batches of one model."""

    def __init__(
        self, max_tokens: int, mesh: Mesh | None = None, *, lengths: Sequence[int] = LENGTHS
    ) -> None:
        """Plan batches of texts of at most `max_tokens` tokens, padded to one of `lengths`.

        With a `mesh`, the number of rows is a multiple of the size of its `data` axis.
        """
        shorter_lengths = [length for length in lengths if length < max_tokens]
        self._lengths = (*shorter_lengths, max_tokens)
        self._data_size = 1 if mesh is None else mesh.shape["data"]

    def plan(
        self, text_lengths: Sequence[int], *, is_uniform: bool, divisor: int = 1
    ) -> Iterator[Batch]:
        """Yield batches of texts with these numbers of tokens, the longest texts first.

        The number of tokens in a batch is divided by `divisor`. The number of rows is the same for
        all batches of a padded length, so that each length is compiled once. With `is_uniform`, a
        batch only has texts of one padded length. A text is then always computed in the same shape,
        whatever other texts there are.
        """
        padded_lengths = [self._padded_length(length) for length in text_lengths]
        longest_first = sorted(range(len(text_lengths)), key=lambda place: -text_lengths[place])
        num_planned = 0
        while num_planned < len(longest_first):
            length = padded_lengths[longest_first[num_planned]]
            rows = self._rows(length, divisor)
            places = longest_first[num_planned : num_planned + rows]
            if is_uniform:
                places = [place for place in places if padded_lengths[place] == length]
            num_planned += len(places)
            yield Batch(places=places, rows=rows, length=length)

    def _padded_length(self, num_tokens: int) -> int:
        """Return the smallest length for padding that is at least `num_tokens`."""
        return next(length for length in self._lengths if length >= num_tokens)

    def _rows(self, length: int, divisor: int) -> int:
        """Return the number of rows in a batch of texts of this padded length."""
        tokens = BATCH_TOKENS.get(jax.default_backend(), ACCELERATOR_BATCH_TOKENS) // divisor
        if length > LONG_TEXT_TOKENS:
            tokens = tokens * LONG_TEXT_TOKENS // length
        return max(1, tokens // length // self._data_size) * self._data_size


def open_tokenizer(directory: Folder, vocab_size: int) -> tokenizers.Tokenizer:
    """Load the fast tokenizer of a folder, without padding. Raises UserError.

    `vocab_size` is the number of tokens of the model.
    """
    path = pathlib.Path(directory) / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"{path} is missing: give the folder of a model with its fast tokenizer, which "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers writes"
        )
    read_json(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The package raises plain exceptions.
        raise UserError(f"{path} cannot be used ({error}): download it again") from error
    # The text "[SEP]" in a passage is five characters, not a special token.
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(
            f"the tokenizer of {directory} has {tokenizer.get_vocab_size()} entries, but the model "
            f"has only {vocab_size}: take both from the same checkpoint"
        )
    return tokenizer


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
    beginnings = [beginning_of(text, CHARACTERS_A_TOKEN * max_tokens) for text in texts]
    encoded = [entry.ids for entry in tokenizer.encode_batch(beginnings)]
    for place, (text, beginning) in enumerate(zip(texts, beginnings, strict=True)):
        if len(beginning) < len(text) and len(encoded[place]) < max_tokens:
            encoded[place] = tokenizer.encode(text).ids
    return encoded


def beginning_of(text: str, characters: int) -> str:
    """Return the beginning of a text: at least `characters`, up to the end of a word."""
    if len(text) <= characters:
        return text
    word_end = END_OF_WORD.search(text, characters)
    return text[: word_end.start()] if word_end else text
