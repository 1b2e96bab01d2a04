"""The interface of every generator on this machine, whichever engine it drives.

`requests.Generator` is what agents see: one prompt in, one completion out. A run, an evaluation and
a server need more: they replace the policy, empty the cache and read counters. `PolicyGenerator`
names all of it. Two classes implement it:

- `scheduler.BatchedGenerator` drives our own engine (`engine.kind native`);
- `jetstream.generator.JetStreamGenerator` drives any engine with JetStream's interface
  (`engine.kind jetstream`).
"""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.requests import Completion, RequestError, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The requests that an engine can serve.

    A request for anything else raises an error that names it.
    """

    # Each request has its own temperature, seed, top-k, top-p and min-p.
    sampling_per_request: bool
    # A completion carries the log-probability of each of its tokens. GRPO and DAPO learn from them.
    log_probabilities: bool
    # Without sampling per request: the temperature that all requests are sampled at, without
    # filters. 0 is greedy.
    temperature: float = 0.0
    # Tokens of prompt and completion that a slot holds; None where the engine does not say.
    positions: int | None = None


def check_sampling(capabilities: Capabilities, params: SamplingParams, engine: str) -> None:
    """Check that the engine can sample a request. Raises RequestError.

    `engine` is its name for the user.
    """
    if capabilities.sampling_per_request:
        return
    if params.temperature != capabilities.temperature:
        wish = f"this request has temperature {params.temperature}"
        raise RequestError(_temperature_error(capabilities, engine, wish))
    # No filter changes the most likely token.
    if params.temperature == 0:
        return
    filters = {
        "top_k": (params.top_k, 0),
        "top_p": (params.top_p, 1.0),
        "min_p": (params.min_p, 0.0),
    }
    for name, (value, off) in filters.items():
        if value != off:
            raise RequestError(
                f"{engine} samples all requests alike and without filters, and this request has "
                f"{name} {value}: use {name} {off}, or an engine that samples each request by "
                "itself"
            )


def check_temperatures(
    capabilities: Capabilities, temperatures: Mapping[str, float], engine: str
) -> None:
    """Check that the engine can sample at the temperatures of the settings. Raises UserError.

    `temperatures` maps the name of a setting to its value, as in {"temperature": 1.0}. `engine` is
    the engine's name for the user.
    """
    if capabilities.sampling_per_request:
        return
    for setting, temperature in temperatures.items():
        if temperature != capabilities.temperature:
            wish = f"{setting} is {temperature}"
            raise UserError(_temperature_error(capabilities, engine, wish))


def _temperature_error(capabilities: Capabilities, engine: str, wish: str) -> str:
    return (
        f"{engine} samples all requests at temperature {capabilities.temperature} and {wish}: use "
        f"{capabilities.temperature}, or an engine that samples each request by itself"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorStatistics:
    """Counters since the generator was made; `running`, `waiting` and `free_pages` are of now.

    None means that the engine does not know the number.
    """

    requests: int
    prompt_tokens: int
    prefilled_tokens: int  # prompt tokens computed; the rest was found in memory
    generated_tokens: int
    refused: int  # requests that were answered with an error
    seconds: float  # inside prefill and decode calls
    running: int
    waiting: int
    free_pages: int | None
    evicted_pages: int | None
    compiled_programs: int | None

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompt tokens that was not computed."""
        if not self.prompt_tokens:
            return 0.0
        return 1.0 - self.prefilled_tokens / self.prompt_tokens


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

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Yield tokens as they are decoded, at least one at a time.

        Raises OverloadError if the queue is full.
        """
        ...

    def reset_cache(self) -> None:
        """Drop the cache of earlier prompts, while nothing runs.

        Each unit of work begins with this call, so that its results depend on its own requests
        alone.
        """
        ...

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy while nothing runs."""
        ...

    def release_weights(self) -> None:
        """Give the policy's memory back while nothing runs; `set_weights` brings the next one."""
        ...
