"""The interface between agents and generators: token ids in, token ids and log-probabilities out.

Three generators implement it: `scheduler.BatchedGenerator` on our own engine,
`jetstream.generator.JetStreamGenerator` on any engine with JetStream's interface,
`remote.RemoteGenerator` over an OpenAI-compatible endpoint.

**Stop strings** are found in the bytes of tokens as they are sampled, wherever token borders fall.
The rules for `SamplingParams.stop_strings`, for every generator:

- The completion ends with the token that completes a stop string. `finish_reason` is then
  "stop_string", and `stop_string` names it. ("stop" is a stop token, "length" neither.)
- `token_ids` hold all sampled tokens with that last one, and so do the log-probabilities: all of
  them may be learnt. So the text of a completion ends with its stop string, or with the rest of the
  last token: the stop `"</a>"` may be completed by a token `">\\n"`. Then
  `text.partition(stop_string)[0]` is the text before it.
- A stop token in the same place counts first. Of two stop strings that one token completes, the one
  that ends first counts, and the longer of two that end together.
- A stop string never begins in the prompt.

Stop strings do not count while a thought is open (`models/thoughts.py`): inside of a thought they
end nothing. `SamplingParams.thought_open` says that the prompt ends inside of a thought, because
the chat template opens one.

A turn that a stop string ends has no end-of-turn token. The conversation continues with
`Tokenizer.continue_conversation(text, stopped=False)`, and its prompt is found in the prefix cache
up to and including that last token. The engine may decode a few tokens further in the same call;
these are discarded. Which stop string is found depends on the sampled tokens alone, not on
`decode_steps_per_call` or on other requests in the batch.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Protocol

from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import LONGEST_TAG_BYTES, THOUGHT_TAG_BYTES, end_of_unopened_thought

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
    """How one request is sampled.

    The filters apply after the temperature, in this order: top_k, top_p, min_p.
    """

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
    # The token that completes one of these ends the completion (see above).
    stop_strings: tuple[str, ...] = ()
    # The prompt ends inside of a thought: stop strings do not count until it is closed.
    thought_open: bool = False
    deadline_seconds: float | None = None  # from submission; None means no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens that were generated for one request, and why they end."""

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


class StopMatcher:
    """Watches one completion for its stop strings."""

    def __init__(self, stops: Sequence[str], *, thought_open: bool = False) -> None:
        self._stops = [stop.encode() for stop in stops]
        # The end of the text may be the beginning of a stop string or of a thought's tag.
        self._tail_bytes = max([LONGEST_TAG_BYTES, *map(len, self._stops)]) - 1
        self._tail = b""
        self._thought_open = thought_open

    @property
    def thought_open(self) -> bool:
        """Whether the text so far ends inside of a thought."""
        return self._thought_open

    def push(self, piece: bytes) -> str | None:
        """Add a token's bytes. Returns the stop string that is complete now, if one is."""
        text = self._tail + piece
        seen_bytes = len(self._tail)
        ending, self._thought_open = _scan(text, self._stops, seen_bytes, self._thought_open)
        self._tail = text[max(0, len(text) - self._tail_bytes) :]
        return None if ending is None else ending[1].decode()


def first_stop(
    text: bytes, stops: Sequence[bytes], *, thought_open: bool = False
) -> tuple[int, bytes] | None:
    """Return (where it ends, the stop string) for the first stop string outside of thoughts.

    A `StopMatcher` finds the same while the text grows.
    """
    ending, _ = _scan(text, stops, 0, thought_open)
    return ending


def first_stop_of_turn(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """Return a whole turn up to the end of its first stop string, and that stop string.

    A turn that closes a thought before it opens one began inside of that thought.
    """
    start = end_of_unopened_thought(text)
    encoded = text[start:].encode()
    ending = first_stop(encoded, [stop.encode() for stop in stops])
    if ending is None:
        return None
    end, stop = ending
    return text[:start] + encoded[:end].decode(), stop.decode()


def before_stop(text: str, stop: str) -> str:
    """Return a whole turn up to where this string begins outside of thoughts.

    If the string is not in it, the result is the whole turn.
    """
    ending = first_stop_of_turn(text, [stop])
    return text if ending is None else ending[0].removesuffix(stop)


def check_params(params: SamplingParams) -> None:
    """Check that generators can honour all parameters.

    Raises RequestError for the first that is wrong.
    """
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


def check_prompt(prompt: Sequence[int], vocabulary: int) -> None:
    """Check that a prompt has ids, all in a vocabulary of this size. Raises RequestError."""
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: send at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise RequestError(
            f"the prompt's token ids {min(prompt)}..{max(prompt)} leave the vocabulary of "
            f"{vocabulary}: encode it with the tokenizer of this model"
        )


def _check_stops(params: SamplingParams) -> None:
    """Check the stop tokens and the stop strings. Raises RequestError."""
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


def _scan(
    text: bytes, stops: Sequence[bytes], seen_bytes: int, thought_open: bool
) -> tuple[tuple[int, bytes] | None, bool]:
    """Find the first ending after the bytes that were seen before.

    Returns it as `first_stop` does, and whether a thought is open at the end of the text.
    """
    earliest = seen_bytes + 1  # where a stop string may end
    for tag in THOUGHT_TAG_BYTES.finditer(text):
        if tag.end() <= seen_bytes:
            continue
        is_closing = tag[1] is not None
        if is_closing and thought_open:
            earliest = tag.end()
        elif not is_closing and not thought_open:
            ending = _first_ending(text, stops, earliest, tag.end() - 1)
            if ending is not None:
                return ending, False
        thought_open = not is_closing
    if thought_open:
        return None, True
    return _first_ending(text, stops, earliest, len(text)), False


def _first_ending(
    text: bytes, stops: Sequence[bytes], earliest: int, latest: int
) -> tuple[int, bytes] | None:
    """Return the first stop string that ends between these two positions, with where it ends.

    Of two that end together, the result is the longer one.
    """
    endings = []
    for stop in stops:
        start = text.find(stop, max(0, earliest - len(stop)), latest)
        if start >= 0:
            endings.append((start + len(stop), -len(stop), stop))
    if not endings:
        return None
    end, _, stop = min(endings)
    return end, stop
