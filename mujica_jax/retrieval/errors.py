"""What a retriever raises when a search cannot be answered. Agents catch RetrievalError; the
episode ends as `retriever_failed`.
"""

import contextlib
from collections.abc import Iterator

from mujica_jax.http.client import DeadlineExceededError, HttpError, RequestRefusedError


class RetrievalError(Exception):
    """A search that failed, in one sentence."""


class RetrieverTimeout(RetrievalError):
    """No answer within the deadline."""


class RetrieverOverloaded(RetrievalError):
    """More searches wait than are let in."""


class RetrieverUnavailable(RetrievalError):
    """The retriever broke while it searched, or cannot be reached."""


class RetrieverRefused(RetrievalError):
    """This search is never answered: it asks for what the retriever does not have."""


@contextlib.contextmanager
def as_retrieval_errors() -> Iterator[None]:
    """Raise the errors of a request to another host as those of a search."""
    try:
        yield
    except DeadlineExceededError as error:
        raise RetrieverTimeout(str(error)) from error
    except RequestRefusedError as error:
        raise RetrieverRefused(str(error)) from error
    except HttpError as error:
        raise RetrieverUnavailable(str(error)) from error
