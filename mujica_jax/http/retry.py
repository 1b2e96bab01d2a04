"""Send a request again after transient errors.

The pauses between attempts double, and one deadline covers all attempts. A request that the server
refuses is not sent again. Callers turn the errors of `client.py` into their own exceptions.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mujica_jax.http.client import DeadlineExceededError, RetriesExhaustedError, TransientError

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The number of attempts at a request, and their time limits."""

    # The longest time of one attempt.
    timeout_seconds: float = 30.0
    # The longest time of a request, with all attempts and the pauses between them.
    deadline_seconds: float = 120.0
    # The largest number of attempts.
    max_attempts: int = 6
    # Pause after the first attempt. It doubles after each further one.
    first_wait_seconds: float = 0.25
    # The longest pause between two attempts, unless the server asks for a longer one.
    max_wait_seconds: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryTarget:
    """The name of the server in error messages, and the advice that they give."""

    url: str
    # What the user can check if all attempts fail.
    advice: str


async def retry(
    attempt: Callable[[], Awaitable[Answer]],
    policy: RetryPolicy,
    target: RetryTarget,
    *,
    pause_random: random.Random,
    start_time: float | None = None,
    before_attempt: Callable[[], Awaitable[None]] | None = None,
    on_retry: Callable[[TransientError], None] = lambda error: None,
) -> Answer:
    """Call `attempt` until it succeeds, and return its result. Raises HttpError.

    If an attempt raises TransientError or takes too long, another attempt follows. `pause_random`
    varies the pauses between attempts.

    The deadline counts from `start_time`, on the monotonic clock; the default is now.
    `before_attempt` is awaited before each attempt. Its time counts against the deadline, but not
    against the timeout of the attempt. `on_retry` is called with the error before each further
    attempt.
    """
    if start_time is None:
        start_time = time.monotonic()
    deadline = start_time + policy.deadline_seconds
    attempts = 0
    error: TransientError | None = None
    while True:
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                if before_attempt is not None:
                    await before_attempt()
                try:
                    async with asyncio.timeout(policy.timeout_seconds):
                        return await attempt()
                except TimeoutError:
                    error = TransientError(
                        f"no complete answer within {policy.timeout_seconds:g} s"
                    )
                except TransientError as transient:
                    error = transient
        except TimeoutError as late:
            so_far = "no attempt ended"
            if error is not None:
                so_far = f"{attempts} attempts; the last one ended with {error}"
            raise deadline_exceeded(target.url, policy, so_far) from late

        attempts += 1
        if attempts >= policy.max_attempts:
            raise RetriesExhaustedError(
                f"{target.url} failed {attempts} times, the last time with {error}: "
                f"{target.advice}",
                was_answered=error.was_answered,
            )

        # The server may ask for a longer pause.
        wait_seconds = max(error.after_seconds, _pause_seconds(policy, attempts, pause_random))
        if time.monotonic() + wait_seconds >= deadline:
            so_far = (
                f"{attempts} attempts; the last one ended with {error}; the next one was due in "
                f"{wait_seconds:.1f} s"
            )
            raise deadline_exceeded(target.url, policy, so_far)
        on_retry(error)
        await asyncio.sleep(wait_seconds)


def _pause_seconds(policy: RetryPolicy, attempts: int, pause_random: random.Random) -> float:
    """Return the pause after this number of attempts.

    It doubles with each attempt up to `max_wait_seconds`, and is then multiplied by a random factor
    between 0.5 and 1.5.
    """
    doubled_seconds = policy.first_wait_seconds * 2 ** (attempts - 1)
    return min(doubled_seconds, policy.max_wait_seconds) * pause_random.uniform(0.5, 1.5)


def deadline_exceeded(url: str, policy: RetryPolicy, so_far: str) -> DeadlineExceededError:
    """Return the error of a request that missed its deadline. `so_far` says what happened."""
    return DeadlineExceededError(
        f"{url} gave no answer within the deadline of {policy.deadline_seconds:g} s ({so_far}): "
        "allow more time or send less at once"
    )
