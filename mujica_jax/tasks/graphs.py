"""Open the knowledge graph of a task, and choose how its triples are ranked."""

from mujica_jax.config.schema import TwoWikiConfig
from mujica_jax.config.tasks import QaldConfig
from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.graph.endpoint import SCHEME, open_endpoint
from mujica_jax.retrieval.graph.index import open_graph
from mujica_jax.retrieval.graph.knowledge_graph import KnowledgeGraph
from mujica_jax.tasks.ranking import DenseRanking, Ranking, WordRanking


def open_knowledge_graph(index: str, queries_per_second: float) -> KnowledgeGraph:
    """Open a graph on disk, or a graph behind a SPARQL endpoint.

    `index` is the directory of the graph or the address of the endpoint. Raises UserError if the
    endpoint does not answer.
    """
    if index.startswith(SCHEME):
        return open_endpoint(index, queries_per_second)
    if index.startswith(("http://", "https://")):
        raise UserError(
            f"task.environment is graph, but task.index {index} is the address of a passage "
            f"service: give {SCHEME}{index} for a SPARQL endpoint, or the directory of a graph"
        )
    return open_graph(index)


def ranking(config: TwoWikiConfig | QaldConfig) -> Ranking:
    """Return the ranking for the triples of an entity that has more than `top_k`.

    Raises UserError if the embedder cannot be found.
    """
    if config.retriever == "dense":
        return DenseRanking(find_embedder(config.embedder).load())
    language = config.language if isinstance(config, QaldConfig) else "en"
    return WordRanking(language)
