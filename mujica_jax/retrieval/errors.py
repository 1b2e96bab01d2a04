"""Exceptions of a retriever that cannot answer a search.

Agents catch RetrievalError and end the episode with the stop reason `retriever_failed`.
"""

import contextlib
from collections.abc import Iterator

from mujica_jax.http.client import DeadlineExceededError, HttpError, RequestRefusedError


class RetrievalError(Exception):
    """A search failed. The message is one sentence."""


class RetrieverTimeoutError(RetrievalError):
    """The retriever did not answer within the deadline."""


class RetrieverOverloadedError(RetrievalError):
    """The queue of waiting searches is full."""


class RetrieverUnavailableError(RetrievalError):
    """The retriever failed during the search, or cannot be reached."""


class RetrieverRefusedError(RetrievalError):
    """The retriever refuses this search, and would refuse it again."""


@contextlib.contextmanager
def as_retrieval_errors() -> Iterator[None]:
    """Raise the HTTP errors of the body as the matching RetrievalError."""
    try:
        yield
    except DeadlineExceededError as error:
        raise RetrieverTimeoutError(str(error)) from error
    except RequestRefusedError as error:
        raise RetrieverRefusedError(str(error)) from error
    except HttpError as error:
        raise RetrieverUnavailableError(str(error)) from error
