"""An HTTP client with deadlines, bounded retries and typed errors."""

from mujica_jax.http.client import (
    DeadlineExceededError,
    HttpClient,
    HttpError,
    PayloadTooLargeError,
    RequestRefusedError,
    RetriesExhaustedError,
)
from mujica_jax.http.retry import RetryPolicy

__all__ = [
    "DeadlineExceededError",
    "HttpClient",
    "HttpError",
    "PayloadTooLargeError",
    "RequestRefusedError",
    "RetriesExhaustedError",
    "RetryPolicy",
]
