"""Open the knowledge graph of a task, and choose what ranks its triples."""

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
from mujica_jax.retrieval.graph.index import open_graph
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.tasks.ranking import DenseRanking, Ranking, WordRanking


def open_knowledge_graph(index: str, queries_per_second: float) -> KnowledgeGraph:
    """Open a graph on disk, or one behind an endpoint. Raises UserError if it does not answer."""
    if index.startswith(SCHEME):
        return open_endpoint(index, queries_per_second)
    if index.startswith(("http://", "https://")):
        raise UserError(
            f"environment is graph and the index {index} is a service of passages: write "
            f"{SCHEME}{index} for a SPARQL endpoint, or give the directory of a graph"
        )
    return open_graph(index)


def ranking(config: TwoWikiConfig | QaldConfig) -> Ranking:
    """Return what orders the triples of an entity that has more than `top_k`.

    Raises UserError without the embedder.
    """
    if config.retriever == "dense":
        return DenseRanking(find_embedder(config.embedder).load())
    language = config.language if isinstance(config, QaldConfig) else "en"
    return WordRanking(language)
