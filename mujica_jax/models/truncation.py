"""Tokens of the beginnings of texts: an embedder takes a few hundred, and a text may be as long as a book."""

import re
from collections.abc import Sequence

import tokenizers

CHARACTERS_A_TOKEN = 16  # that are read at first; English takes about four
_end_of_word = re.compile(r"(?<=\S)[ \t\r\n]")


def encode_truncated(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Ids of each text, which the tokenizer cuts at `max_tokens`, without reading a text much further than they reach.

    What is read ends in front of a space, and twice as much is read where that gives fewer tokens than the limit. So
    the ids are those of the whole text for every tokenizer that begins again behind a space, as BERT's do. One whose
    tokens reach across spaces can give others near the end, of a text of more than CHARACTERS_A_TOKEN * max_tokens
    characters.
    """
    encoded: list[list[int]] = [[] for _ in texts]
    left, characters = list(range(len(texts))), CHARACTERS_A_TOKEN * max_tokens
    while left:
        read = [_truncated(texts[place], characters) for place in left]
        for place, entry in zip(left, tokenizer.encode_batch(read), strict=True):
            encoded[place] = entry.ids
        left = [
            place
            for place, part in zip(left, read, strict=True)
            if len(part) < len(texts[place]) and len(encoded[place]) < max_tokens
        ]
        characters *= 2
    return encoded


def _truncated(text: str, characters: int) -> str:
    """At least so many characters of the text, up to the end of a word."""
    found = _end_of_word.search(text, characters) if len(text) > characters else None
    return text[: found.start()] if found else text
