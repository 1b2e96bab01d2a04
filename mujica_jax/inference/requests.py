"""What agents and generators say to each other: token ids and sampling parameters in, token ids and log-probabilities out.

Two generators speak it: `generator.BatchedGenerator` on our own engine, `remote.RemoteGenerator` over an OpenAI-compatible endpoint.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from mujica_jax.errors import UserError


class RequestError(UserError):
    """A request that cannot be served. It concerns that request alone; the generator goes on."""


class DeadlineError(RequestError):
    """The request's deadline passed before it was complete."""


class OverloadError(RequestError):
    """The queue is full: come back later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The filters apply after the temperature, in this order: top_k, top_p, min_p."""

    max_new_tokens: int
    temperature: float  # 0 means greedy
    seed: int  # the same request with the same seed gives the same tokens whatever else is in the batch
    top_k: int = 0  # draw from the k most likely tokens; 0 means from all
    top_p: float = 1.0  # draw from the smallest set of likely tokens that holds this share of the probability (0 to 1]
    min_p: float = 0.0  # draw from tokens at least this likely, as a share of the most likely one's probability [0, 1]
    stop_token_ids: tuple[int, ...] = ()  # end the completion, besides those of the model
    stop_strings: tuple[str, ...] = ()  # end the completion before any of these; never part of it
    deadline_seconds: float | None = None  # from submission; None means no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]  # includes the stop token where finish_reason is "stop"
    logprobs: tuple[float, ...] | None  # one a token, float32, under the unmodified policy; None where an endpoint gives none
    sampling_logprobs: tuple[float, ...] | None  # the same under the distribution drawn from, after temperature and filters
    finish_reason: Literal["stop", "length", "stop_string"]
    policy_version: int


class Generator(Protocol):
    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        """Complete one prompt. `continues` says that the conversation will come back with this prompt as its beginning:
        such requests overtake others. Raises RequestError."""
        ...
