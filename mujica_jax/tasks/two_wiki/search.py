"""What 2WikiMultihopQA is searched in: an index or a service of passages, a graph or an endpoint."""

import functools
from collections.abc import Sequence

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.errors import UserError
from mujica_jax.retrieval.client import open_remote
from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
from mujica_jax.retrieval.graph.index import KIND, open_graph
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.retrieval.retriever import IndexRetriever, Retriever
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage, read_corpus
from mujica_jax.retrieval.text.dense import ranked
from mujica_jax.retrieval.text.embedders import find_embedder
from mujica_jax.retrieval.text.index import Index, open_index, read_kind
from mujica_jax.tasks.environment import Ranking
from mujica_jax.tasks.two_wiki.records import CORPUS_FILES, Record, data_files, passages_of


def open_passages(config: TwoWikiConfig, records: Sequence[Record]) -> tuple[Retriever, Sequence[Passage]]:
    """What is searched, and the passages in which questions have their gold ones. `records` are all questions: the
    passages they come with are the corpus where the data folder has none.
    """
    if config.index_rows == "job" and (config.index is None or "://" in config.index):
        raise UserError(
            f"index_rows is job and index is {config.index}: only an index of kind exact, in a directory, has rows "
            "that lie on devices; give one, or set index_rows to host"
        )
    if config.index is not None and config.index.startswith(("http://", "https://")):
        return open_remote(config.index, config.retriever, config.top_k), _corpus(config, records)
    index = _index(config, records)
    in_memory = config.index is None
    cache = None if in_memory else SearchCache(cache_folder("searches"), index.version)
    return IndexRetriever(index, inline=in_memory, cache=cache), index.passages


def open_knowledge_graph(index: str, queries_per_second: float) -> KnowledgeGraph:
    """A graph on disk, or one behind an endpoint that answers."""
    if index.startswith(SCHEME):
        return open_endpoint(index, queries_per_second)
    if index.startswith(("http://", "https://")):
        raise UserError(
            f"environment is graph and the index {index} is a service of passages: write {SCHEME}{index} for a SPARQL "
            "endpoint, or give the directory of a graph"
        )
    return open_graph(index)


def ranking(config: TwoWikiConfig) -> Ranking | None:
    """The order of an entity's triples where they exceed `top_k`. None: by the words they share with the query."""
    if config.retriever == "bm25":
        return None
    return functools.partial(ranked, find_embedder(config.embedder).load())


def _index(config: TwoWikiConfig, records: Sequence[Record]) -> Index:
    """The index that the configuration names; without one, BM25 over the corpus of the data folder."""
    if config.index is None:
        if config.retriever == "dense":
            raise UserError(
                "retriever is dense and index is None: make an index of the corpus with `python -m mujica_jax.index "
                f"build --corpus FILE --kind exact --embedder {config.embedder} --out DIR` and give --task.index DIR"
            )
        return Bm25Index(_corpus(config, records), "default")
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


def _corpus(config: TwoWikiConfig, records: Sequence[Record]) -> list[Passage]:
    if files := data_files(config.data_dir, CORPUS_FILES, "passages", needed=False):
        return read_corpus(files)
    return passages_of(records) or read_corpus(data_files(config.data_dir, CORPUS_FILES, "passages"))
