"""Exceptions of a retriever that cannot answer a search.

Agents catch RetrievalError; the episode ends as `retriever_failed`.
"""

import contextlib
from collections.abc import Iterator

from mujica_jax.http.client import DeadlineExceededError, HttpError, RequestRefusedError


class RetrievalError(Exception):
    """A search that failed, in one sentence."""


class RetrieverTimeoutError(RetrievalError):
    """No answer within the deadline."""


class RetrieverOverloadedError(RetrievalError):
    """More searches wait than are let in."""


class RetrieverUnavailableError(RetrievalError):
    """The retriever broke while it searched, or cannot be reached."""


class RetrieverRefusedError(RetrievalError):
    """This search is never answered: it asks for what the retriever does not have."""


@contextlib.contextmanager
def as_retrieval_errors() -> Iterator[None]:
    """Turn the errors of a request to another host into errors of a search."""
    try:
        yield
    except DeadlineExceededError as error:
        raise RetrieverTimeoutError(str(error)) from error
    except RequestRefusedError as error:
        raise RetrieverRefusedError(str(error)) from error
    except HttpError as error:
        raise RetrieverUnavailableError(str(error)) from error
