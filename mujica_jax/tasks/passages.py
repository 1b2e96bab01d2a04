"""What tasks over passages search: an index on disk, a service, or BM25 over a corpus in memory."""

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
from mujica_jax.retrieval.retriever import IndexRetriever, Retriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage, PassageFile
from mujica_jax.retrieval.text.index import Index, open_index, read_kind
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import local_folder
from mujica_jax.tasks.environment import TextEnvironment, words
from mujica_jax.tasks.question_fields import passage_key, title_key

# Two texts of one title are versions of one paragraph from this share of common words on. Of 626
# pairs of paragraphs with one title in MuSiQue's files, a tenth share more, and those are versions;
# the median shares a quarter.
SAME_PARAGRAPH = 0.6

HTTP = ("http://", "https://")

Corpus = Callable[[], Sequence[Passage]]


def fetched_index(index: str | None) -> str | None:
    """An index in a bucket is copied to this host once."""
    if index is None or not index.startswith("gs://"):
        return index
    return str(distributed.primary_first("the index", lambda: local_folder(index)))


def open_passages(config: PassageSearch, corpus: Corpus) -> tuple[Retriever, Sequence[Passage]]:
    """What is searched, and the passages in which questions have their gold ones. `corpus` is what
    is searched where the configuration names no index.
    """
    if config.index_rows == "job" and (config.index is None or "://" in config.index):
        raise UserError(
            f"index_rows is job and index is {config.index}: only an index of kind exact, in a "
            "directory, has rows that lie on devices; give one, or set index_rows to host"
        )
    if config.index is not None and config.index.startswith(HTTP):
        return open_remote(config.index, config.retriever, config.top_k), corpus()
    index = _index(config, corpus)
    in_memory = config.index is None
    cache = None if in_memory else SearchCache(cache_folder("searches"), index.version)
    return IndexRetriever(index, inline=in_memory, cache=cache), index.passages


def is_service(index: str | None) -> bool:
    """Whether passages are searched behind an address."""
    return index is not None and index.startswith(HTTP)


class OwnPassages(Mapping[str, TextEnvironment]):
    """Of each question, by id, the passages that are given with it: searched by BM25, and read in
    when they are."""

    def __init__(self, given: Mapping[str, Collection[GoldPassage]], top_k: int) -> None:
        self._given, self._top_k = given, top_k
        self._made: dict[str, TextEnvironment] = {}

    def __getitem__(self, id: str) -> TextEnvironment:
        if id not in self._made:
            index = Bm25Index(as_passages(self._given[id]), "default")
            self._made[id] = TextEnvironment(IndexRetriever(index, inline=True), self._top_k)
        return self._made[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def describe(self) -> str:
        """Say how many of a question's passages one search shows at most."""
        sizes = sorted({len(passages) for passages in self._given.values()})
        own_passages = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{self._top_k} of {own_passages} passages"


def leave_incomplete_out(
    config: MultiHopConfig | TwoWikiConfig, incomplete: Collection[str], questions: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which questions the distractor setting leaves out, and a sentence about them.

    `incomplete` are the ids of questions without all gold passages among their own. Raises
    UserError where all are.
    """
    if not incomplete:
        return (), ()
    missing = (
        f"{len(incomplete):,} of {questions:,} questions have not all gold passages among their own"
    )
    if config.keep_incomplete:
        return (), (f"{missing} and are asked all the same (task.keep_incomplete is True)",)
    if len(incomplete) == questions:
        raise UserError(
            f"none of the {questions:,} questions in {config.data_dir} has all of its gold "
            "passages among its own, which task.setting distractor means (HotpotQA's fullwiki file "
            "is such a file): give files with them, set --task.setting open, or keep these "
            "questions with --task.keep-incomplete True"
        )
    return tuple(incomplete), (
        f"{missing} and are left out (--task.keep-incomplete True keeps them)",
    )


class GoldInCorpus:
    """Finds gold passages among the passages that are searched: by title and text.

    A corpus can hold other versions of a paragraph (another cut of the article, a newer text). If
    it has the title and not the text, the passage of that title with the most words in common
    counts, if these are enough. With `by_title` every passage of the title counts: behind an
    address the texts are not known.
    """

    def __init__(
        self, passages: Iterable[Passage], titles: Collection[str], *, by_title: bool = False
    ) -> None:
        self._by_title = by_title
        self._passages: dict[str, dict[tuple[str, str], GoldPassage]] = {}
        for passage in titled(passages, titles):
            gold = GoldPassage(title=passage.title, text=passage.text)
            self._passages.setdefault(title_key(passage.title), {}).setdefault(
                passage_key(gold), gold
            )

    def find(self, passage: GoldPassage) -> GoldPassage | None:
        """Return the gold passage as it is searched, or None where the corpus lacks it."""
        of_title = self._passages.get(title_key(passage.title), {})
        if self._by_title:
            text = passage.text or next((other.text for other in of_title.values()), "")
            return dataclasses.replace(passage, text=text, by_title=True) if text else None
        if not of_title:
            return None
        if not passage.text.strip():
            # Nothing says which of several passages is meant, so each of them counts.
            return (
                next(iter(of_title.values()))
                if len(of_title) == 1
                else GoldPassage(title=passage.title)
            )
        if passage_key(passage) in of_title:
            return of_title[passage_key(passage)]
        likest = max(of_title.values(), key=lambda other: _shared_words(passage.text, other.text))
        return likest if _shared_words(passage.text, likest.text) >= SAME_PARAGRAPH else None

    def find_all(self, passages: Collection[GoldPassage]) -> tuple[GoldPassage, ...] | None:
        """Return all of them as they are searched. None where there are none, or where the corpus
        lacks one."""
        searched = [self.find(passage) for passage in passages]
        known = tuple(dict.fromkeys(passage for passage in searched if passage is not None))
        return known if passages and None not in searched else None


def as_passages(given: Collection[GoldPassage]) -> list[Passage]:
    return [
        Passage(id=str(number), title=of.title, text=of.text) for number, of in enumerate(given)
    ]


def titled(passages: Iterable[Passage], titles: Collection[str]) -> list[Passage]:
    """Return the passages with one of these titles, however its accents, spaces and entities are
    written."""
    keys = {title_key(title) for title in titles}
    if not isinstance(passages, PassageFile):
        return [passage for passage in passages if title_key(passage.title) in keys]
    return passages.titled({*titles, *keys})


def _shared_words(first: str, second: str) -> float:
    """Return the share of the different words of the shorter text that the longer one has too."""
    first_words = words(first)
    second_words = words(second)
    smaller = min(len(first_words), len(second_words))
    return len(first_words & second_words) / smaller if smaller else 0.0


def _index(config: PassageSearch, corpus: Corpus) -> Index:
    """The index that the configuration names; without one, BM25 over the corpus."""
    if config.index is None:
        if config.retriever == "dense":
            raise UserError(
                "retriever is dense and index is None: make an index of the corpus with `python -m "
                f"mujica_jax.index build --corpus FILE --embedder {config.embedder} --out DIR` and "
                "give --task.index DIR"
            )
        return Bm25Index(corpus(), "default")
    kind = KIND if config.index.startswith(SCHEME) else read_kind(config.index)
    if kind == KIND:
        raise UserError(
            f"environment is text and the index {config.index} is a graph: give an index of "
            "passages, or --task.environment graph"
        )
    if (kind == "bm25") != (config.retriever == "bm25"):
        raise UserError(
            f"retriever is {config.retriever} and the index {config.index} is of kind {kind}: give "
            f"--task.retriever {'bm25' if kind == 'bm25' else 'dense'} or another index"
        )
    embedder = config.embedder if config.retriever == "dense" else None
    index = open_index(config.index, embedder, rows=config.index_rows)
    if config.top_k > len(index.passages):
        raise UserError(
            f"top_k is {config.top_k} and the index {config.index} holds {len(index.passages):,} "
            "passages: lower top_k"
        )
    return index
