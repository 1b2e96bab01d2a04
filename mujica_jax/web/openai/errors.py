"""Errors in the form of OpenAI's interface, whose clients show the message to the user."""

from mujica_jax.inference.requests import (
    DeadlineError,
    EngineError,
    OverloadError,
    PolicyError,
    RequestError,
    StoppedError,
)

# Seconds after which a client may try again when the queue was full.
RETRY_AFTER_SECONDS = 1
# HTTP status of each error of a generator. The first match counts. Other errors of a request mean
# that the client sent something that cannot be served.
STATUSES = (
    (OverloadError, 429),
    (StoppedError, 503),
    (DeadlineError, 504),
    (EngineError, 500),
    (PolicyError, 500),
    (RequestError, 400),
)
# The field `type` of an error, by its status. Other statuses are errors of the server.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error. The message is one sentence.

    `param` is the field of the request that is wrong, and `code` a word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the JSON object of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        if self.status == 429:
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {}


def api_error(error: RequestError) -> ApiError:
    """Return the answer to an error of a generator."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            return ApiError(str(error), status=status)
    raise AssertionError("every error of a generator is a RequestError")
