"""BM25 search over passages, built on bm25s, with two tokenisers.

    score(q, d) = sum over t in q of  idf(t) * tf / (tf + k1 * (1 - b + b * |d| / avg|d|))
    idf(t) = ln(1 + (N - df + 1/2) / (df + 1/2))

Here t is a word of query q. tf is the number of times that t occurs in passage d, and |d| is the
number of words of d. df is the number of passages with t, and N is the number of all passages. The
indexed text of a passage is its title, a newline, and its text.

- `default`: the defaults of bm25s (words of at least two characters, English stop words removed, k1
  = 1.5, b = 0.75).
- `elasticsearch`: Lucene's standard analyser and similarity (Unicode word tokens, no stop words, k1
  = 1.2, b = 0.75), with |d| rounded as Lucene stores it in one byte.

Published results depend on the tokeniser. On the 2Wiki corpus of 6,119 passages, recall@2 of the
two differs by 3.5 points.

Both split text at spaces and punctuation. This does not work for some scripts. Chinese, Japanese
and Thai have no spaces between words. In the scripts of India, both tokenisers would cut words at
vowel signs. A run of such characters is therefore indexed as its pairs of neighbouring characters,
as in Lucene's CJK analyser: 东京大学 becomes 东京, 京大, 大学. Passages are also indexed by each single
Chinese character, so that a query of one character finds them. An index of an older release has no
such pairs, and queries to it are split without pairs too.
"""

import array
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.manifest import read_json, rebuild_advice
from mujica_jax.retrieval.text.corpus import Index, Passage

if TYPE_CHECKING:
    import bm25s

Tokeniser = Literal["default", "elasticsearch"]

# Number of texts whose words are in memory as strings at the same time.
TEXTS_AT_ONCE = 4096
LUCENE_K1 = 1.2
LUCENE_B = 0.75
# Lucene stores a length in one byte. It rounds only the part of a length that exceeds this number.
LUCENE_EXACT = 24
# File in the folder of an index that describes how words were made. Indexes of older releases,
# without pairs of characters, do not have it.
WORDS_FILE = "words.json"
WORDS = {"scripts_without_spaces": "pairs of characters"}

# Unicode word boundaries (UAX 29). A word is a run of word characters and combining marks. An
# apostrophe, point or colon joins letters. An apostrophe, point, comma or semicolon joins digits.
_WORD = r"[\w\u0300-\u036f]+"
_HAN = (
    "\u2e80-\u2fd5\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U000323af"
)
_KANA = (
    "\u3041-\u3096\u3099-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff"
)
_HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb"
# Thai, Lao, Tibetan, Myanmar and Khmer have no spaces between words. The scripts of India have
# spaces, but both tokenisers would drop their words or cut them at vowel signs. Digits and
# punctuation are left out of these ranges.
_SOUTH_ASIAN = (
    "\u0900-\u0963\u0971-\u09e3\u09f0-\u0a65\u0a70-\u0ae5\u0af0-\u0b65\u0b70-\u0be5\u0bf0-\u0c65"
)
_SOUTH_ASIAN += "\u0c70-\u0ce5\u0cf0-\u0d65\u0d70-\u0de5\u0df2-\u0df3"
_SOUTH_EAST_ASIAN = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ebd\u0ec0-\u0ece\u0edc-\u0edf\u0f40-\u0fbc"
_SOUTH_EAST_ASIAN += "\u1000-\u103f\u1050-\u108f\u109a-\u109f\u1780-\u17d3\uaa60-\uaa7f"
_run_of_characters = re.compile(f"[{_HAN}{_KANA}{_HANGUL}{_SOUTH_ASIAN}{_SOUTH_EAST_ASIAN}]+")
_han = re.compile(f"[{_HAN}]")
# Full-width letters and half-width Katakana, which occur in Chinese and Japanese text.
_other_widths = re.compile("[\uff01-\uffdc]+")

_unicode_words = re.compile(
    rf"{_WORD}(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)['’.,;](?=\d)){_WORD})*"
)


class Bm25Index(Index):
    """A BM25 index in memory, or mapped from disk.

    Building takes about 70 microseconds for each passage. A search reads only the postings of the
    query's words.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        tokeniser: Tokeniser = "default",
        on_passages: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Index the passages. Their words are kept in memory as numbers.

        `on_passages` is called with the number of passages read so far.
        """
        documents: list[array.array[int]] = []
        # Words are numbered in corpus order, so that every build writes the same files.
        vocabulary: dict[str, int] = {}
        # A hash of everything that results depend on.
        version = hashlib.sha256(tokeniser.encode())
        contents = (passage.contents for passage in passages)
        while texts := list(itertools.islice(contents, TEXTS_AT_ONCE)):
            for text, words in zip(texts, indexed_words(texts, tokeniser), strict=True):
                word_ids = (vocabulary.setdefault(word, len(vocabulary)) for word in words)
                documents.append(array.array("i", word_ids))
                version.update(f"{len(text)} {text}".encode())
                if _has_runs(text):
                    # Older releases indexed this text without pairs, so the version must differ.
                    version.update(WORDS_FILE.encode())
            on_passages(len(documents))

        self.passages = passages
        self.version = version.hexdigest()[:16]
        self.tokeniser: Tokeniser = tokeniser
        self._has_pairs = True
        self._index: bm25s.BM25 | None = None
        # bm25s cannot index a corpus that has no word at all.
        if vocabulary:
            self._index = _empty_index(tokeniser)
            self._index.index(
                (documents, vocabulary), create_empty_token=False, show_progress=False
            )

    @classmethod
    def load(
        cls,
        folder: Path,
        passages: Sequence[Passage],
        tokeniser: Tokeniser = "default",
        *,
        version: str,
    ) -> "Bm25Index":
        """Load an index that `save` has written, over the same passages. Raises UserError."""
        import bm25s

        loaded = cls((), tokeniser)
        loaded.passages = passages
        loaded.version = version
        if (folder / "params.index.json").exists():
            loaded._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        loaded._has_pairs = (folder / WORDS_FILE).exists()
        if loaded._has_pairs and read_json(folder / WORDS_FILE) != WORDS:
            raise UserError(
                f"{folder / WORDS_FILE} describes a way to make words that this release does not "
                f"know: {rebuild_advice(folder.parent)}, or use the release that built it"
            )
        return loaded

    def save(self, folder: Path) -> None:
        """Save the postings. The caller saves the passages.

        If the corpus has no words, the folder stays empty.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._index is not None:
            self._index.save(folder, show_progress=False)
            (folder / WORDS_FILE).write_text(json.dumps(WORDS) + "\n")

    def encode(self, queries: Sequence[str]) -> list[list[str]]:
        """Return the words of each query."""
        if not self._has_pairs:
            return _spaced_words(queries, self.tokeniser)
        return _words_and_runs(queries, self.tokeniser, _pairs)

    def search_encoded(self, queries: list[list[str]], k: int) -> list[list[tuple[int, float]]]:
        """Return the positions and scores of the k best passages of each query, best first."""
        return [self._search_one(words, k) for words in queries]

    def _search_one(self, words: list[str], k: int) -> list[tuple[int, float]]:
        """Return the positions and scores of the k best passages, equal scores in corpus order."""
        token_ids = self._index.get_tokens_ids(words) if self._index is not None else []
        if not token_ids:
            return []
        scores = self._index.get_scores_from_ids(token_ids)  # pyright: ignore[reportOptionalMemberAccess]
        matching = np.flatnonzero(scores > 0)
        if len(matching) > k:
            # Keep all passages with the score of the k-th. The stable sort then orders them.
            kth = len(matching) - k
            threshold = np.partition(scores[matching], kth)[kth]
            matching = matching[scores[matching] >= threshold]
        best = matching[np.argsort(-scores[matching], kind="stable")][:k]
        return [(int(position), float(scores[position])) for position in best]


def indexed_words(texts: Sequence[str], tokeniser: Tokeniser) -> list[list[str]]:
    """Return the words by which each passage is indexed."""
    return _words_and_runs(texts, tokeniser, _pairs_and_characters)


def _words_and_runs(
    texts: Sequence[str], tokeniser: Tokeniser, words_of_run: Callable[[str], list[str]]
) -> list[list[str]]:
    """Return the words of each text: first those between spaces, then those of its runs.

    A run is a sequence of characters of a script without spaces. `words_of_run` splits it.
    """
    texts = [_in_usual_form(text) for text in texts]
    words = _spaced_words([_run_of_characters.sub(" ", text) for text in texts], tokeniser)
    for number, text in enumerate(texts):
        runs = _run_of_characters.findall(text)
        if runs:
            # For a text without words, bm25s returns one empty word.
            words_of_text = [word for word in words[number] if word]
            for run in runs:
                words_of_text.extend(words_of_run(run))
            words[number] = words_of_text
    return words


def _in_usual_form(text: str) -> str:
    """Return a text with composed accents (NFC), and with letters of the usual width."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", text)
    return _other_widths.sub(lambda letters: unicodedata.normalize("NFKC", letters[0]), text)


def _has_runs(text: str) -> bool:
    """Return whether a text has a run of characters of a script without spaces."""
    return not text.isascii() and _run_of_characters.search(_in_usual_form(text)) is not None


def _pairs(run: str) -> list[str]:
    """Return all pairs of neighbouring characters of a run. A single character stays alone."""
    return [run[start : start + 2] for start in range(len(run) - 1)] or [run]


def _pairs_and_characters(run: str) -> list[str]:
    """Return the pairs of a run, followed by each of its Chinese characters."""
    if len(run) == 1:
        return _pairs(run)
    return _pairs(run) + _han.findall(run)


def _spaced_words(texts: Sequence[str], tokeniser: Tokeniser) -> list[list[str]]:
    """Return the words of each text, split at spaces and punctuation."""
    if tokeniser == "elasticsearch":
        return [unicode_words(text) for text in texts]
    import bm25s

    tokens: Any = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False, allow_empty=False
    )
    return tokens


def unicode_words(text: str) -> list[str]:
    """Return the words of a text, split as in Lucene's standard analyser, in lower case."""
    return [word.lower() for word in _unicode_words.findall(text)]


def lucene_length(words: int) -> int:
    """Return a document length as Lucene rounds it (SmallFloat.intToByte4 and back).

    The length is exact below 40. Above, the part that exceeds 24 is rounded down to four
    significant bits.
    """
    if words < LUCENE_EXACT:
        return words
    excess = words - LUCENE_EXACT
    dropped_bits = max(0, excess.bit_length() - 4)
    return LUCENE_EXACT + (excess >> dropped_bits << dropped_bits)


def _empty_index(tokeniser: Tokeniser) -> "bm25s.BM25":
    """Return a bm25s index without documents.

    For `elasticsearch`, scores are computed with Lucene's rounded lengths. The average length is
    exact, as in Lucene.
    """
    import bm25s

    if tokeniser == "default":
        return bm25s.BM25()

    class LuceneIndex(bm25s.BM25):
        def build_index_from_ids(
            self,
            unique_token_ids: list[int],
            corpus_token_ids: list[list[int]],
            show_progress: bool = True,
            leave_progress: bool = False,
        ) -> dict[str, Any]:
            """Return the scores of all words in all documents, as bm25s stores them."""
            lengths = np.array([len(ids) for ids in corpus_token_ids])
            rounded_lengths = np.array([lucene_length(int(length)) for length in lengths])

            # bm25s stores scores in columns: sorted by token, then by document.
            pairs = np.concatenate([np.asarray(ids) for ids in corpus_token_ids], dtype=np.int64)
            pairs *= len(lengths)
            pairs += np.repeat(np.arange(len(lengths)), lengths)
            pairs.sort()
            first = np.flatnonzero(np.diff(pairs, prepend=-1))
            frequency = np.diff(first, append=len(pairs))
            token, document = np.divmod(pairs[first], len(lengths))
            del pairs, first

            document_frequency = np.bincount(token, minlength=len(unique_token_ids))
            idf = np.log1p((len(lengths) - document_frequency + 0.5) / (document_frequency + 0.5))
            relative_length = self.b * rounded_lengths[document] / lengths.mean()
            saturation = self.k1 * (1 - self.b + relative_length)
            self.nonoccurrence_array = None
            return {
                "data": (idf[token] * frequency / (frequency + saturation)).astype(self.dtype),
                "indices": document.astype(self.int_dtype),
                "indptr": np.concatenate([[0], np.cumsum(document_frequency)]),
                "num_docs": len(lengths),
            }

    return LuceneIndex(k1=LUCENE_K1, b=LUCENE_B)
