"""Send a request again after transient errors, with pauses that double and one deadline for all.

What the server refuses is not sent again. Callers turn the errors of `client.py` into their own.
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
    timeout_seconds: float = 30.0  # of one attempt
    # of a request with all of its attempts and the pauses between them
    deadline_seconds: float = 120.0
    max_attempts: int = 6
    first_wait_seconds: float = 0.25
    max_wait_seconds: float = 10.0  # between two attempts, unless the server asks for more


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryTarget:
    """The server that is asked, as errors name it."""

    url: str
    advice: str  # what the user can check if all attempts fail


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

    An attempt that raises TransientError or takes too long is followed by another one. The deadline
    counts from `start_time` (default: now), on the monotonic clock. The time that `before_attempt`
    waits counts against the deadline only, not against the time of an attempt. `pause_random`
    varies the pauses.
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
                    error = TransientError(f"no whole answer within {policy.timeout_seconds:g} s")
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
    """Return the pause after this many attempts. It doubles, up to a limit, and varies by half."""
    doubled_seconds = policy.first_wait_seconds * 2 ** (attempts - 1)
    return min(doubled_seconds, policy.max_wait_seconds) * pause_random.uniform(0.5, 1.5)


def deadline_exceeded(url: str, policy: RetryPolicy, so_far: str) -> DeadlineExceededError:
    """Return the error of a request that was not answered in time."""
    return DeadlineExceededError(
        f"{url} gave no answer within the deadline of {policy.deadline_seconds:g} s ({so_far}): "
        "allow more time or send less at once"
    )
