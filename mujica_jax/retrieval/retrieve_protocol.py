"""The protocol of POST /retrieve, which Search-R1, verl and torchtitan use for their retrievers.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true} ->
                    {"result": [[{"document": {"id", "contents"}, "score": 0.5}, ...], ...]}

`contents` is the title in quotes, a newline, and the text. Without `return_scores` the documents
stand in the list without a score. Our service answers this route beside its own one, and
`ProtocolRetriever` searches any server that answers it.

Such a server does not say which index it searches. So a run cannot notice that the index has changed
while it was interrupted.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.http.retry import RetryPolicy
from mujica_jax.retrieval.client import POLICY, RemoteRetriever
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.reranker import Reranker
from mujica_jax.retrieval.text.corpus import Passage, split_contents

# Number of results if a request does not set `topk`, as in Search-R1's server.
DEFAULT_TOPK = 3
# A query that every server can search, to check the form of its answers.
PROBE = "Who is the author of the book?"


def contents_of(passage: Passage) -> str:
    """Return the text of a passage as the protocol has it: title in quotes, newline, text."""
    return f'"{passage.title}"\n{passage.text}'


def hit_of(passage: Passage, score: float, *, return_scores: bool) -> dict[str, Any]:
    """Return one hit of an answer."""
    document = {"id": passage.id, "contents": contents_of(passage)}
    return {"document": document, "score": round(score, 6)} if return_scores else document


class ProtocolRetriever(RemoteRetriever):
    """A retriever that asks any server with POST /retrieve."""

    route = "retrieve"
    advice = "check that a server with POST /retrieve runs there"

    def __init__(self, url: str, *, concurrency: int = 8, policy: RetryPolicy = POLICY) -> None:
        super().__init__(url, concurrency=concurrency, policy=policy)
        # The protocol has no version of the index. The address stands in for it.
        self.version = self.url

    def _request(self, queries: list[str], k: int) -> dict[str, Any]:
        return {"queries": queries, "topk": k, "return_scores": True}

    def _results(self, answer: dict[str, Any]) -> tuple[Any, list[list[Passage]]]:
        return self.url, [_passages(hits) for hits in answer["result"]]


def _passages(hits: Sequence[Any]) -> list[Passage]:
    """Return the passages of one query. Raises KeyError or TypeError for other forms."""
    return [_passage(hit) for hit in hits]


def _passage(hit: Any) -> Passage:
    """Return the passage of a hit. Its title and text may have fields of their own."""
    if not isinstance(hit, dict):
        raise TypeError(f"a hit is a {type(hit).__name__} and must be an object")
    document = hit.get("document", hit)
    if not isinstance(document, dict):
        raise TypeError(f"a document is a {type(document).__name__} and must be an object")
    if isinstance(document.get("text"), str):
        title = document.get("title") or ""
        text = document["text"]
    else:
        title, text = split_contents(document["contents"])
    # Some servers give no id. Equal passages have equal ids.
    identifier = document.get("id")
    if identifier is None:
        identifier = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Passage(id=str(identifier), title=title, text=text)


def open_protocol(url: str, top_k: int, reranker: Reranker | None = None) -> ProtocolRetriever:
    """Connect to a server with POST /retrieve, and return its retriever, with the `reranker`.

    One query checks that it answers in the form of the protocol. Raises UserError if it does not.
    """
    retriever = ProtocolRetriever(url)
    probed_results = top_k if reranker is None else reranker.candidates_for(top_k)
    try:
        asyncio.run(retriever.search(PROBE, probed_results))
    except RetrievalError as error:
        raise UserError(
            f"task.retriever is http, but {url} does not answer POST /retrieve as Search-R1's "
            f"servers do ({error}): check --task.index, or set --task.retriever to bm25 or dense for "
            "the address of `python -m mujica_jax.index serve`"
        ) from error
    opened = ProtocolRetriever(url)
    opened.reranker = reranker
    return opened
