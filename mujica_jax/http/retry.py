"""A request that is sent again after faults that pass, with pauses that double; one deadline covers all of it.

What the server refuses is not sent again. `client.py` and `sparql_endpoint.py` send their requests so.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from mujica_jax.http.client import PassingFault
from mujica_jax.inference.requests import RequestError
from mujica_jax.retrieval.errors import RetrieverRefused, RetrieverTimeout, RetrieverUnavailable

LONGEST_WAIT_SECONDS = 10.0  # between two tries, unless the server asks for more

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tries:
    timeout_seconds: float = 30.0  # of one try
    deadline_seconds: float = 120.0  # of a request with all of its tries and the pauses between them
    tries: int = 6
    first_wait_seconds: float = 0.25


async def until_answered(
    attempt: Callable[[], Awaitable[Answer]],
    limits: Tries,
    *,
    url: str,
    advice: str,
    draw: random.Random,
    place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    before_another: Callable[[PassingFault], None],
) -> Answer:
    """What `attempt` returns. It raises PassingFault for what is worth another try and RequestError for what is not.

    Every try takes a `place`, and waiting for one counts against the deadline alone. `advice` tells the user what to check where all tries
    fail; `before_another` hears of the fault. Raises RetrievalError.
    """
    deadline, made = time.monotonic() + limits.deadline_seconds, 0
    fault: PassingFault | None = None
    while True:
        made += 1
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())), place():
                try:
                    async with asyncio.timeout(limits.timeout_seconds):
                        return await attempt()
                except TimeoutError:
                    fault = PassingFault(f"no whole answer within {limits.timeout_seconds:g} s")
                except PassingFault as found:
                    fault = found
                except RequestError as error:
                    raise RetrieverRefused(str(error)) from error
        except TimeoutError as error:
            raise too_late(url, limits, made - 1, fault) from error
        if made >= limits.tries:
            raise RetrieverUnavailable(f"{url} failed {made} times, the last time with {fault}: {advice}")
        doubled = min(limits.first_wait_seconds * 2 ** (made - 1), LONGEST_WAIT_SECONDS)
        wait = max(fault.after_seconds, doubled * draw.uniform(0.5, 1.5))
        if time.monotonic() + wait >= deadline:
            raise too_late(url, limits, made, fault)
        before_another(fault)
        await asyncio.sleep(wait)


def too_late(url: str, limits: Tries, made: int = 0, fault: Exception | None = None) -> RetrieverTimeout:
    so_far = f" ({made} tries, the last one ended with {fault})" if fault is not None else ""
    return RetrieverTimeout(
        f"{url} gave no answer within the deadline of {limits.deadline_seconds:g} s{so_far}: allow more time or search less at once"
    )
