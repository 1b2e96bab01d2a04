"""Search an index of passages from Python."""

import asyncio
from collections.abc import Sequence

from mujica_jax.api.blocking import outside_event_loop
from mujica_jax.errors import UserError
from mujica_jax.retrieval import retriever as retrieval
from mujica_jax.retrieval.client import RemoteRetriever
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.retrieve_protocol import open_protocol
from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.text.corpus import Passage
from mujica_jax.retrieval.text.index import open_index

HTTP = ("http://", "https://")
DEFAULT_TOP_K = 5


class Retriever:
    """An index of passages, in this process or behind an address.

    `Policy.ask` takes it as `retriever`.
    """

    def __init__(self, source: retrieval.Retriever, place: str) -> None:
        """Wrap a retriever of the package. `place` is its directory or its address."""
        self.source = source
        self.place = place

    @classmethod
    def load(
        cls, directory_or_url: str, *, embedder: str | None = None, protocol: str = "search"
    ) -> "Retriever":
        """Open an index that `python -m mujica_jax.index build` made, or connect to a server.

        Args:
            directory_or_url: The directory of an index of passages, or the address of a server.
            embedder: The folder or name of the embedder of a dense index, if it has moved since the
                build.
            protocol: What a server understands. "search": it is `python -m mujica_jax.index serve`.
                "retrieve": it answers `POST /retrieve`, as the servers of Search-R1 and verl do.

        Raises:
            UserError: There is no such index, its files are damaged, or the server does not answer.

        >>> import mujica_jax as mj
        >>> retriever = mj.Retriever.load("index")
        >>> retriever.search("mayor of Venford", top_k=1)[0].title
        'Venford'
        """
        if protocol not in ("search", "retrieve"):
            raise UserError(f"protocol is {protocol!r}: give 'search' or 'retrieve'")
        if not directory_or_url.startswith(HTTP):
            index = open_index(directory_or_url, embedder)
            return cls(IndexRetriever(index), directory_or_url)
        return outside_event_loop(lambda: _connected(cls, directory_or_url, protocol))

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> Sequence[Passage]:
        """Return at most `top_k` passages for a query, best first.

        Args:
            query: The words to search for.
            top_k: The largest number of passages.

        Raises:
            UserError: The query is refused, or `top_k` is no positive number.
            RetrievalError: The server or the disk failed.

        >>> import mujica_jax as mj
        >>> mj.Retriever.load("index").search("Clara Ibsted", top_k=1)[0].text
        'Venford is a village. Its mayor is Clara Ibsted.'
        """
        if top_k < 1:
            raise UserError(f"top_k is {top_k} and must be at least 1")
        return outside_event_loop(lambda: asyncio.run(_search(self.source, query, top_k)))

    def __repr__(self) -> str:
        return f"Retriever({self.place!r})"


async def _search(source: retrieval.Retriever, query: str, top_k: int) -> Sequence[Passage]:
    return await source.search(query, top_k)


def _connected(retriever_class: type[Retriever], url: str, protocol: str) -> Retriever:
    """Connect to a server, check that it answers, and return its retriever. Raises UserError."""
    if protocol == "retrieve":
        return retriever_class(open_protocol(url, DEFAULT_TOP_K), url)
    remote = RemoteRetriever(url)
    try:
        remote.check()
    except RetrievalError as error:
        raise UserError(str(error)) from error
    return retriever_class(remote, url)
