"""The one error a retriever raises when a search cannot be answered. Agents catch it; the episode ends as `retriever_failed`."""


class RetrievalError(Exception):
    """A search that failed. `reason` is one sentence; `retryable` says whether the same search may succeed a moment later."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
