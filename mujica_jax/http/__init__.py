"""An HTTP client with deadlines, bounded retries and typed errors."""

from mujica_jax.http.client import (
    DeadlineExceeded,
    HttpClient,
    HttpError,
    PayloadTooLarge,
    RequestRefused,
    RetriesExhausted,
)
from mujica_jax.http.retry import RetryPolicy

__all__ = [
    "DeadlineExceeded",
    "HttpClient",
    "HttpError",
    "PayloadTooLarge",
    "RequestRefused",
    "RetriesExhausted",
    "RetryPolicy",
]
