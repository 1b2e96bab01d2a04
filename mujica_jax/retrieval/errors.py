"""What a retriever raises when a search cannot be answered. Agents catch RetrievalError; the episode ends as `retriever_failed`."""


class RetrievalError(Exception):
    """A search that failed. `reason` is one sentence; `retryable` says whether the same search may succeed a moment later."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


class RetrieverTimeout(RetrievalError):
    """No answer within the deadline."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=True)


class RetrieverOverloaded(RetrievalError):
    """More searches wait than are let in."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=True)


class RetrieverUnavailable(RetrievalError):
    """The retriever broke while it searched, or cannot be reached."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=True)


class RetrieverRefused(RetrievalError):
    """This search is never answered: it asks for what the retriever does not have."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=False)
