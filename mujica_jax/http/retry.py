"""A request that is sent again after transient errors, with pauses that double; one deadline covers
all of it.

What the server refuses is not sent again. Callers turn the errors of `client.py` into their own.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mujica_jax.http.client import DeadlineExceeded, RetriesExhausted, TransientError

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    timeout_seconds: float = 30.0  # of one attempt
    # of a request with all of its attempts and the pauses between them
    deadline_seconds: float = 120.0
    max_attempts: int = 6
    first_wait_seconds: float = 0.25
    max_wait_seconds: float = 10.0  # between two attempts, unless the server asks for more


async def retry(
    attempt: Callable[[], Awaitable[Answer]],
    policy: RetryPolicy,
    *,
    url: str,
    advice: str,
    draw: random.Random,
    began: float | None = None,
    before_attempt: Callable[[], Awaitable[None]] | None = None,
    on_retry: Callable[[TransientError], None] = lambda error: None,
) -> Answer:
    """What `attempt` returns; a TransientError of it, or its lateness, is worth another attempt.

    The deadline counts from `began` (now; on the monotonic clock). What `before_attempt` waits
    counts against the deadline alone. `advice` tells the user what to check where all attempts
    fail. Raises HttpError.
    """
    deadline, made = (time.monotonic() if began is None else began) + policy.deadline_seconds, 0
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
                except TransientError as found:
                    error = found
        except TimeoutError as late:
            so_far = (
                "no attempt ended"
                if error is None
                else f"{made} attempts; the last one ended with {error}"
            )
            raise deadline_exceeded(url, policy, so_far) from late
        made += 1
        if made >= policy.max_attempts:
            sentence = f"{url} failed {made} times, the last time with {error}: {advice}"
            raise RetriesExhausted(sentence, was_answered=error.was_answered)
        doubled = min(policy.first_wait_seconds * 2 ** (made - 1), policy.max_wait_seconds)
        wait = max(error.after_seconds, doubled * draw.uniform(0.5, 1.5))
        if time.monotonic() + wait >= deadline:
            so_far = (
                f"{made} attempts; the last one ended with {error}; the next one was due in "
                f"{wait:.1f} s"
            )
            raise deadline_exceeded(url, policy, so_far)
        on_retry(error)
        await asyncio.sleep(wait)


def deadline_exceeded(url: str, policy: RetryPolicy, so_far: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{url} gave no answer within the deadline of {policy.deadline_seconds:g} s ({so_far}): "
        "allow more time or send less at once"
    )
