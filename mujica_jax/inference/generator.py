"""The interface of generators that run a policy on this machine.

Agents need only `requests.Generator`: one prompt in, one completion out. Training runs, evaluations
and servers need more: they replace the policy, empty the cache and read counters.
`PolicyGenerator` is this larger interface. Two classes implement it:

- `scheduler.BatchedGenerator` runs the project's own engine (`engine.kind native`).
- `jetstream.generator.JetStreamGenerator` runs any engine with JetStream's interface
  (`engine.kind jetstream`).
"""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.requests import (
    Completion,
    RequestError,
    SamplingParams,
    StreamedTokens,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features of an engine. A request for more raises an error that names the setting."""

    # Whether each request may have its own temperature, seed, top_k, top_p and min_p.
    sampling_per_request: bool
    # Whether completions include the log-probability of each token. GRPO and DAPO need them.
    log_probabilities: bool
    # The temperature of all requests, if `sampling_per_request` is False. 0 means greedy decoding.
    # Such an engine samples without filters.
    temperature: float = 0.0
    # Largest number of tokens in a slot, prompt and completion together. None if not known.
    positions: int | None = None


def check_sampling(capabilities: Capabilities, params: SamplingParams, engine: str) -> None:
    """Check that an engine supports the sampling parameters of a request.

    `engine` is the engine's name in error messages. Raises RequestError for the first parameter
    that the engine does not support.
    """
    if capabilities.sampling_per_request:
        return
    if params.temperature != capabilities.temperature:
        wish = f"this request has temperature {params.temperature}"
        raise RequestError(_temperature_error(capabilities, engine, wish))
    # Greedy decoding ignores filters: they never exclude the most likely token.
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
                f"{engine} samples all requests alike and without filters, but this request has "
                f"{name} {value}: use {name} {off}, or an engine with sampling per request"
            )


def check_temperatures(
    capabilities: Capabilities, temperatures: Mapping[str, float], engine: str
) -> None:
    """Check that an engine supports the temperatures of a configuration.

    `temperatures` maps the name of each setting to its value, as in {"temperature": 1.0}. `engine`
    is the engine's name in error messages. Raises UserError for the first temperature that the
    engine does not support.
    """
    if capabilities.sampling_per_request:
        return
    for setting, temperature in temperatures.items():
        if temperature != capabilities.temperature:
            wish = f"{setting} is {temperature}"
            raise UserError(_temperature_error(capabilities, engine, wish))


def _temperature_error(capabilities: Capabilities, engine: str, wish: str) -> str:
    """Return the error message for a temperature that the engine does not support."""
    return (
        f"{engine} samples all requests at temperature {capabilities.temperature}, but {wish}: use "
        f"{capabilities.temperature}, or an engine with sampling per request"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorStatistics:
    """Counters of a generator.

    `running`, `waiting` and `free_pages` are current values. All others count since the generator
    was made. None means that the engine does not report the number.
    """

    # Requests that were started, that is, given a slot.
    requests: int
    # Prompt tokens of all started requests.
    prompt_tokens: int
    # Prompt tokens that were computed. The others were found in the prefix cache.
    prefilled_tokens: int
    # Tokens that were generated for completions.
    generated_tokens: int
    # Requests that ended with an error.
    refused: int
    # Seconds inside prefill and decode calls.
    seconds: float
    # Requests in a slot.
    running: int
    # Requests in the queue.
    waiting: int
    # Empty pages of the KV cache.
    free_pages: int | None
    # Pages that were evicted from the prefix cache.
    evicted_pages: int | None
    # Programs that the engine compiled.
    compiled_programs: int | None

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache, from 0 to 1."""
        if not self.prompt_tokens:
            return 0.0
        return 1.0 - self.prefilled_tokens / self.prompt_tokens


# `runtime_checkable` lets beartype check signatures in tests.
@runtime_checkable
class PolicyGenerator(Protocol):
    """A generator whose policy can be replaced. Use it from one event loop at a time."""

    # Version of the current policy. Completions carry it.
    policy_version: int

    @property
    def capabilities(self) -> Capabilities:
        """The features of the engine."""
        ...

    @property
    def slots(self) -> int:
        """The number of requests that can run at the same time.

        Further requests wait, and none is refused. A server bounds their number with
        `background.BackgroundGenerator`.
        """
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that end every completion."""
        ...

    @property
    def statistics(self) -> GeneratorStatistics:
        """The counters of this generator."""
        ...

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. See `requests.Generator`."""
        ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncGenerator[StreamedTokens | Completion, None]:
        """Complete one prompt token by token. See `requests.StreamingGenerator`."""
        ...

    def reset_cache(self) -> None:
        """Empty the prefix cache. Call it only while no request runs.

        Callers do this before each unit of work, so that its results do not depend on earlier
        requests.
        """
        ...

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy's weights and empty the cache. Call it only while no request runs."""
        ...

    def release_weights(self) -> None:
        """Free the memory of the weights. Call it only while no request runs.

        The generator cannot run again before `set_weights`.
        """
        ...
