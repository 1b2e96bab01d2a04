"""Requests for the tests of generators, and checks of their outcomes."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from mujica_jax.inference.engine.base import Engine
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.inference.paging import BlockAllocator, RadixNode
from mujica_jax.inference.requests import Completion, Generator, SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from tests.helpers.countable_engine import CountableEngine
from tests.helpers.patience import HANG_SECONDS

# seconds: a request with a deadline is waited for, so prompts are read in chunks beside it
FAR = 1000.0


def params(
    max_new_tokens: int = 8, temperature: float = 1.0, seed: int = 0, **others: Any
) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, **others
    )


def letter(token: int) -> bytes:
    return bytes([ord("a") + token % 26])


def make_generator(
    engine: Engine,
    *,
    prefix_reuse: bool = True,
    policy_version: int = 0,
    token_bytes: Callable[[int], bytes] = letter,
) -> BatchedGenerator:
    """Return a generator whose tokens are letters: 0 is "a", 1 is "b"."""
    return BatchedGenerator(
        engine,
        prefix_reuse=prefix_reuse,
        token_bytes=token_bytes,
        policy_version=policy_version,
    )


async def streamed(
    generator: PolicyGenerator,
    prompt: Sequence[int],
    wanted: SamplingParams,
    *,
    continues: bool = False,
    shown: list[int] | None = None,
) -> list[int]:
    """Return the tokens of a stream. They are those of the completion at its end.

    `shown` receives the tokens as they arrive.
    """
    shown = [] if shown is None else shown
    logprobs: list[float] = []
    items = generator.stream(prompt, wanted, continues=continues)
    async for item in items:
        if isinstance(item, Completion):
            assert shown == list(item.token_ids)
            assert logprobs == list(item.logprobs or ())
            continue
        assert len(item.token_ids) > 0
        shown += item.token_ids
        logprobs += item.logprobs or ()
    return shown


def nodes_of(pages: BlockAllocator) -> list[RadixNode]:
    """Return the nodes of the tree of prefixes, without its root."""
    nodes = []
    waiting = [pages._root]
    while waiting:
        children = waiting.pop().children.values()
        nodes += children
        waiting += children
    return nodes


def cached(pages: BlockAllocator) -> list[int]:
    """Return the pages of the tree."""
    return [node.page for node in nodes_of(pages)]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, and end it if a request was forgotten, which would wait for ever."""
    return asyncio.run(asyncio.wait_for(main, HANG_SECONDS))


async def settle(task: asyncio.Future) -> Completion | BaseException:
    """Wait for a request. Return its completion or its error."""
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


def assert_nothing_is_held(generator: BatchedGenerator) -> None:
    """Check that no request, slot or page is left behind."""
    counted = generator.statistics
    pages = generator._blocks
    assert (counted.running, counted.waiting) == (0, 0)
    assert not generator._state.remaining.any()
    assert pages.free + len(cached(pages)) == pages.count
    assert all(node.users == 0 for node in nodes_of(pages))


def complete_all(
    generator: Generator, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Completion]:
    """Send all requests at once. Return their completions in the same order."""

    async def main() -> list[Completion]:
        return await asyncio.gather(
            *(generator.generate(prompt, wanted) for prompt, wanted in requests)
        )

    return run(main())


def assert_by_hand(
    engine: CountableEngine, completion: Completion, prompt: Sequence[int], wanted: SamplingParams
) -> None:
    tokens, logprobs = engine.by_hand(prompt, wanted)
    assert (list(completion.token_ids), list(completion.logprobs)) == (tokens, logprobs)
    assert completion.finish_reason == ("stop" if tokens[-1] in engine.stop_token_ids else "length")
