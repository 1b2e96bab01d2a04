"""The interface between agents and generators: token ids and sampling parameters in, token ids and
log-probabilities out.

Three generators implement it: `scheduler.BatchedGenerator` on our own engine,
`jetstream.generator.JetStreamGenerator` on any engine with JetStream's interface,
`remote.RemoteGenerator` over an OpenAI-compatible endpoint.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Protocol

from mujica_jax.errors import UserError

FinishReason = Literal["stop", "length", "stop_string"]
TokenIds = Sequence[int]


class RequestError(UserError):
    """A request that cannot be served. It concerns that request alone; the generator goes on."""


class DeadlineError(RequestError):
    """The request's deadline passed before it was complete."""


class OverloadError(RequestError):
    """The queue is full: come back later."""


class PolicyError(RequestError):
    """The request is fine and the policy's numbers are not."""


class EngineError(RequestError):
    """The engine failed while it computed this request."""


class ReplyError(RequestError):
    """An endpoint answered with something that was not asked for."""


class UnusableReplyError(ReplyError):
    """An endpoint gave this request no reply that an agent can use.

    The request's episode ends with the stop reason `reason`. Others go on.
    """

    def __init__(
        self, sentence: str, reason: Literal["filtered", "bad_reply"] = "bad_reply"
    ) -> None:
        super().__init__(sentence)
        self.reason: Literal["filtered", "bad_reply"] = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The filters apply after the temperature, in this order: top_k,
    top_p, min_p."""

    max_new_tokens: int
    temperature: float  # 0 means greedy
    # The same request with the same seed gives the same tokens whatever else is in the batch.
    seed: int
    # Draw from the k most likely tokens; 0 means from all.
    top_k: int = 0
    # Draw from the smallest set of likely tokens that holds this share of the probability (0 to 1].
    top_p: float = 1.0
    # Draw from tokens at least this likely, as a share of the most likely one's probability [0, 1].
    min_p: float = 0.0
    # Token ids that end the completion, besides those of the model.
    stop_token_ids: tuple[int, ...] = ()
    # The token that completes one of these ends the completion (`stops.py`).
    stop_strings: tuple[str, ...] = ()
    # The prompt ends inside of a thought: stop strings do not count until it is closed.
    thought_open: bool = False
    deadline_seconds: float | None = None  # from submission; None means no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What was generated for one request."""

    # What was sampled, with the stop token or the token that completed a stop string.
    token_ids: tuple[int, ...]
    # One for each token, float32, under the unmodified policy. None if an endpoint gives none.
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    # The log-probabilities under the distribution drawn from, after temperature and filters.
    sampling_logprobs: tuple[float, ...] | None = None
    policy_version: int = 0  # a script has none
    stop_string: str | None = None  # the one that ended it, where finish_reason is "stop_string"


class Generator(Protocol):
    """Completes prompts."""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt. Raises RequestError.

        `continues` means that the conversation will come back with this prompt as its beginning.
        Our engine lets such requests overtake others.
        """
        ...


def check_params(params: SamplingParams) -> None:
    """Raise RequestError for the first parameter that no generator can honour."""
    if params.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {params.max_new_tokens}: ask for at least 1")
    if not 0 <= params.temperature < math.inf:  # NaN is refused too
        raise RequestError(
            f"temperature is {params.temperature}: use 0 for greedy or a positive number"
        )
    if params.top_k < 0:
        raise RequestError(f"top_k is {params.top_k}: use 0 for all tokens or a positive number")
    if not 0 < params.top_p <= 1:
        raise RequestError(f"top_p is {params.top_p}: use a share above 0 and at most 1")
    if not 0 <= params.min_p <= 1:
        raise RequestError(f"min_p is {params.min_p}: use a share from 0 to 1")
    _check_stops(params)
    if params.deadline_seconds is not None and not params.deadline_seconds > 0:
        raise RequestError(
            f"deadline_seconds is {params.deadline_seconds}: give a positive time, or None for no "
            "limit"
        )


def _check_stops(params: SamplingParams) -> None:
    """Raise RequestError for stop tokens and stop strings that no generator can honour."""
    if min(params.stop_token_ids, default=0) < 0:
        raise RequestError(
            f"stop_token_ids hold {min(params.stop_token_ids)}: token ids begin at 0"
        )
    if "" in params.stop_strings:
        raise RequestError(
            "a stop string is empty and would end every completion at once: leave it out"
        )
    for stop in params.stop_strings:
        try:
            stop.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the stop string {stop!r} cannot be written in UTF-8: send whole characters"
            ) from error


def check_prompt(prompt: Sequence[int], vocabulary: int) -> None:
    """Raise RequestError if a prompt is empty or has ids outside a vocabulary of this size."""
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: send at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise RequestError(
            f"the prompt's token ids {min(prompt)}..{max(prompt)} leave the vocabulary of "
            f"{vocabulary}: encode it with the tokenizer of this model"
        )
