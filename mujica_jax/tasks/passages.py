"""What tasks over passages search: an index on disk, a service, or BM25 over a corpus in memory."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.tasks import PassageSearch
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
from mujica_jax.tasks.environment import TextEnvironment

Corpus = Callable[[], Sequence[Passage]]


def fetched_index(index: str | None) -> str | None:
    """An index in a bucket is copied to this host once."""
    if index is None or not index.startswith("gs://"):
        return index
    return str(distributed.primary_first("the index", lambda: local_folder(index)))


def open_passages(config: PassageSearch, corpus: Corpus) -> tuple[Retriever, Sequence[Passage]]:
    """What is searched, and the passages in which questions have their gold ones. `corpus` is what is searched where
    the configuration names no index.
    """
    if config.index_rows == "job" and (config.index is None or "://" in config.index):
        raise UserError(
            f"index_rows is job and index is {config.index}: only an index of kind exact, in a directory, has rows "
            "that lie on devices; give one, or set index_rows to host"
        )
    if config.index is not None and config.index.startswith(("http://", "https://")):
        return open_remote(config.index, config.retriever, config.top_k), corpus()
    index = _index(config, corpus)
    in_memory = config.index is None
    cache = None if in_memory else SearchCache(cache_folder("searches"), index.version)
    return IndexRetriever(index, inline=in_memory, cache=cache), index.passages


class OwnPassages(Mapping[str, TextEnvironment]):
    """Of each question, by id, the passages that are given with it: searched by BM25, and read in when they are."""

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


def as_passages(given: Collection[GoldPassage]) -> list[Passage]:
    return [Passage(id=str(number), title=of.title, text=of.text) for number, of in enumerate(given)]


def titled(passages: Sequence[Passage], titles: Collection[str]) -> list[Passage]:
    if isinstance(passages, PassageFile):
        return passages.titled(titles)
    return [passage for passage in passages if passage.title in titles]


def _index(config: PassageSearch, corpus: Corpus) -> Index:
    """The index that the configuration names; without one, BM25 over the corpus."""
    if config.index is None:
        if config.retriever == "dense":
            raise UserError(
                "retriever is dense and index is None: make an index of the corpus with `python -m mujica_jax.index "
                f"build --corpus FILE --kind exact --embedder {config.embedder} --out DIR` and give --task.index DIR"
            )
        return Bm25Index(corpus(), "default")
    kind = KIND if config.index.startswith(SCHEME) else read_kind(config.index)
    if kind == KIND:
        raise UserError(
            f"environment is text and the index {config.index} is a graph: give an index of passages, or "
            "--task.environment graph"
        )
    if (kind == "bm25") != (config.retriever == "bm25"):
        raise UserError(
            f"retriever is {config.retriever} and the index {config.index} is of kind {kind}: give --task.retriever "
            f"{'bm25' if kind == 'bm25' else 'dense'} or another index"
        )
    embedder = config.embedder if config.retriever == "dense" else None
    index = open_index(config.index, embedder, rows=config.index_rows)
    if config.top_k > len(index.passages):
        raise UserError(
            f"top_k is {config.top_k} and the index {config.index} holds {len(index.passages):,} passages: lower top_k"
        )
    return index
