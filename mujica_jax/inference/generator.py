"""What every generator on this machine offers, whichever engine it drives.

`requests.Generator` is what agents see: one prompt in, one completion out. A run, an evaluation and a server need more:
they replace the policy, empty the cache and read counters. `PolicyGenerator` names all of it. Two classes implement it:

- `scheduler.BatchedGenerator` drives our own engine (`engine.kind native`);
- `jetstream.generator.JetStreamGenerator` drives any engine with JetStream's interface (`engine.kind jetstream`).
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from flax import nnx

from mujica_jax.inference.requests import Completion, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do for a single request, so that what it cannot do is refused by name."""

    # Each request has its own temperature, seed, top-k, top-p and min-p.
    sampling_per_request: bool
    # A completion carries the log-probability of each of its tokens. GRPO and DAPO learn from them.
    log_probabilities: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorStatistics:
    """Counted since the generator was made; `running` and `waiting` are now."""

    requests: int
    prompt_tokens: int
    prefilled_tokens: int  # prompt tokens computed; the rest was found in memory
    generated_tokens: int
    refused: int  # requests that were answered with an error
    seconds: float  # inside prefill and decode calls
    running: int
    waiting: int
    free_pages: int
    evicted_pages: int
    compiled_programs: int

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that was not computed."""
        return 1.0 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@runtime_checkable  # so that beartype can check signatures in tests
class PolicyGenerator(Protocol):
    """A generator whose policy can be replaced. Use it from one event loop at a time."""

    policy_version: int

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def capacity(self) -> int:
        """Requests that can run and wait at a time before a stream is refused."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    @property
    def statistics(self) -> GeneratorStatistics: ...

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Yield tokens as they are decoded, at least one at a time. Raises OverloadError where the queue is full."""
        ...

    def reset_cache(self) -> None:
        """Drop what was computed of earlier prompts, while nothing runs.

        Each unit of work begins with it, so that its results depend on its own requests alone."""
        ...

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy while nothing runs."""
        ...

    def release_weights(self) -> None:
        """Give the policy's memory back while nothing runs; `set_weights` brings the next one."""
        ...
