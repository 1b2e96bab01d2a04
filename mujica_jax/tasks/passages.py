"""Open the passages that a task searches: an index on disk, a service, or BM25 in memory."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import MultiHopConfig, PassageSearch
from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage
from mujica_jax.retrieval.client import open_remote
from mujica_jax.retrieval.graph.endpoint import SCHEME
from mujica_jax.retrieval.graph.index import KIND
from mujica_jax.retrieval.retrieve_protocol import open_protocol
from mujica_jax.retrieval.retriever import IndexRetriever, Retriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage, PassageFile
from mujica_jax.retrieval.text.index import Index, open_index, read_kind
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import local_folder
from mujica_jax.tasks.environment import TextEnvironment, words
from mujica_jax.tasks.question_fields import passage_key, title_key

# Two texts with the same title are versions of one paragraph if they share at least this part of
# their words. In MuSiQue's files there are 626 pairs of paragraphs with the same title. A tenth of
# the pairs share more, and all of these are versions of one paragraph. The median pair shares a
# quarter.
SAME_PARAGRAPH = 0.6

HTTP = ("http://", "https://")

Corpus = Callable[[], Sequence[Passage]]


def fetched_index(index: str | None) -> str | None:
    """Return the local folder of an index. An index in a bucket is first copied to this host."""
    if index is None or not index.startswith("gs://"):
        return index
    return str(distributed.primary_first("the index", lambda: local_folder(index)))


def open_passages(config: PassageSearch, corpus: Corpus) -> tuple[Retriever, Sequence[Passage]]:
    """Return the retriever of a task, and the passages among which gold passages are found.

    `corpus` returns the task's own passages. They are searched if the configuration names no index.
    Raises UserError if the index does not fit the configuration.
    """
    if config.retriever == "http":
        if not is_service(config.index):
            raise UserError(
                f"task.retriever is http, but task.index is {config.index}: give the address of a "
                "server with POST /retrieve, such as --task.index http://HOST:8000"
            )
        assert config.index is not None, "a service has an address"
        return open_protocol(config.index, config.top_k), corpus()

    if config.index is not None and config.index.startswith(HTTP):
        return open_remote(config.index, config.retriever, config.top_k), corpus()

    index = _index(config, corpus)
    is_in_memory = config.index is None
    cache = None
    if not is_in_memory:
        cache = SearchCache(cache_folder("searches"), index.version)
    return IndexRetriever(index, inline=is_in_memory, cache=cache), index.passages


def is_service(index: str | None) -> bool:
    """Return whether the index is the address of a passage service."""
    return index is not None and index.startswith(HTTP)


class OwnPassages(Mapping[str, TextEnvironment]):
    """Environments over the passages that are given with each question, by question id.

    Each environment searches the passages of one question by BM25. It is made on first use.
    """

    def __init__(self, contexts: Mapping[str, Collection[GoldPassage]], top_k: int) -> None:
        self._contexts = contexts
        self._top_k = top_k
        self._environments: dict[str, TextEnvironment] = {}

    def __getitem__(self, id: str) -> TextEnvironment:
        if id not in self._environments:
            index = Bm25Index(as_passages(self._contexts[id]), "default")
            retriever = IndexRetriever(index, inline=True)
            self._environments[id] = TextEnvironment(retriever, self._top_k)
        return self._environments[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)

    def describe(self) -> str:
        """Return how many of a question's passages one search shows, as in "5 of 10 passages"."""
        sizes = sorted({len(passages) for passages in self._contexts.values()})
        size_range = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{min(self._top_k, sizes[-1])} of {size_range} passages"


def leave_incomplete_out(
    config: MultiHopConfig | TwoWikiConfig, incomplete: Collection[str], questions: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids of questions that the distractor setting leaves out, and notes about them.

    `incomplete` holds the ids of questions whose own passages lack a gold passage. `questions` is
    the number of all questions. Raises UserError if all questions would be left out.
    """
    if not incomplete:
        return (), ()
    missing = (
        f"{len(incomplete):,} of {questions:,} questions lack a gold passage among their own "
        "passages"
    )
    if config.keep_incomplete:
        note = f"{missing}; they are asked, because task.keep_incomplete is True"
        return (), (note,)
    if len(incomplete) == questions:
        raise UserError(
            f"task.setting is distractor, but none of the {questions:,} questions in "
            f"{config.data_dir} has all of its gold passages among its own passages (HotpotQA's "
            "fullwiki file lacks them): give other files, or --task.setting open, or "
            "--task.keep-incomplete to ask these questions anyway"
        )
    note = f"{missing}; they are left out, and --task.keep-incomplete would keep them"
    return tuple(incomplete), (note,)


class GoldInCorpus:
    """A lookup of gold passages among the searched passages, by title and text.

    A corpus can hold another version of a paragraph (another cut of the article, or a newer text).
    If the corpus has the title but not the text, the passage with that title and the most words in
    common is compared. It counts as gold if the two share at least SAME_PARAGRAPH of their words.

    With `by_title` every passage with the title counts as gold. This is for passage services, whose
    texts are not known.
    """

    def __init__(
        self, passages: Iterable[Passage], titles: Collection[str], *, by_title: bool = False
    ) -> None:
        self._by_title = by_title
        self._passages: dict[str, dict[tuple[str, str], GoldPassage]] = {}
        for passage in titled(passages, titles):
            gold_passage = GoldPassage(title=passage.title, text=passage.text)
            same_title = self._passages.setdefault(title_key(passage.title), {})
            same_title.setdefault(passage_key(gold_passage), gold_passage)

    def find(self, passage: GoldPassage) -> GoldPassage | None:
        """Return the gold passage in the corpus's version, or None if the corpus lacks it."""
        same_title = self._passages.get(title_key(passage.title), {})
        candidates = list(same_title.values())
        if self._by_title:
            text = passage.text
            if not text and candidates:
                text = candidates[0].text
            return dataclasses.replace(passage, text=text, by_title=True) if text else None
        if not candidates:
            return None

        # Without a text, each of several passages with this title counts as gold.
        if not passage.text.strip():
            return candidates[0] if len(candidates) == 1 else GoldPassage(title=passage.title)

        if passage_key(passage) in same_title:
            return same_title[passage_key(passage)]
        most_similar = max(candidates, key=lambda other: _shared_words(passage.text, other.text))
        if _shared_words(passage.text, most_similar.text) < SAME_PARAGRAPH:
            return None
        return most_similar

    def find_all(self, passages: Collection[GoldPassage]) -> tuple[GoldPassage, ...] | None:
        """Return all gold passages in the corpus's versions, each once.

        The result is None if there are no gold passages, or if the corpus lacks one.
        """
        if not passages:
            return None
        corpus_passages: dict[GoldPassage, None] = {}
        for passage in passages:
            corpus_passage = self.find(passage)
            if corpus_passage is None:
                return None
            corpus_passages[corpus_passage] = None
        return tuple(corpus_passages)


def as_passages(gold_passages: Collection[GoldPassage]) -> list[Passage]:
    """Return gold passages as the passages of an index, numbered from 0."""
    return [
        Passage(id=str(number), title=passage.title, text=passage.text)
        for number, passage in enumerate(gold_passages)
    ]


def titled(passages: Iterable[Passage], titles: Collection[str]) -> list[Passage]:
    """Return the passages with one of these titles.

    Titles also match if their accents, spaces or HTML entities are written in another way.
    """
    keys = {title_key(title) for title in titles}
    if not isinstance(passages, PassageFile):
        return [passage for passage in passages if title_key(passage.title) in keys]
    return passages.titled({*titles, *keys})


def _shared_words(first: str, second: str) -> float:
    """Return which share of the shorter text's distinct words the longer text has too."""
    first_words = words(first)
    second_words = words(second)
    word_count = min(len(first_words), len(second_words))
    if not word_count:
        return 0.0
    return len(first_words & second_words) / word_count


def _index(config: PassageSearch, corpus: Corpus) -> Index:
    """Return the index that the configuration names, or else BM25 over the corpus."""
    if config.index is None:
        if config.retriever == "dense":
            raise UserError(
                "task.retriever is dense, but task.index is None: make an index of the corpus with "
                f"`python -m mujica_jax.index build --corpus FILE --embedder {config.embedder} "
                "--out DIR` and give --task.index DIR"
            )
        return Bm25Index(corpus(), "default")

    kind = KIND if config.index.startswith(SCHEME) else read_kind(config.index)
    if kind == KIND:
        raise UserError(
            f"task.environment is text, but task.index {config.index} is a graph: give an index of "
            "passages, or --task.environment graph"
        )
    if (kind == "bm25") != (config.retriever == "bm25"):
        raise UserError(
            f"task.retriever is {config.retriever}, but task.index {config.index} is of kind "
            f"{kind}: give --task.retriever {'bm25' if kind == 'bm25' else 'dense'}, or another "
            "index"
        )

    embedder = config.embedder if config.retriever == "dense" else None
    index = open_index(config.index, embedder)
    if config.top_k > len(index.passages):
        raise UserError(
            f"task.top_k is {config.top_k}, but task.index {config.index} only holds "
            f"{len(index.passages):,} passages: lower task.top_k"
        )
    return index
