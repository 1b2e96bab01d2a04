"""Requests and completions: the interface between agents and generators.

A request is a prompt (token ids) with `SamplingParams`. Its result is a `Completion`: token ids and
their log-probabilities. Three classes implement the interface `Generator`:

- `scheduler.BatchedGenerator` runs the project's own engine.
- `jetstream.generator.JetStreamGenerator` runs any engine that has JetStream's interface.
- `remote.RemoteGenerator` calls an OpenAI-compatible endpoint.

**Stop strings.** Generators search for stop strings in the bytes of the sampled tokens. A stop
string may therefore start or end in the middle of a token. All generators follow the same rules for
`SamplingParams.stop_strings`:

- The token that completes a stop string is the last token of the completion. `finish_reason` is
  then "stop_string", and `Completion.stop_string` is the string. (`finish_reason` is "stop" after
  a stop token, and "length" when `max_new_tokens` is reached.)
- `token_ids` and the log-probabilities include this last token, so training can use every sampled
  token. The last token may contain more text than the stop string needs: the token `">\\n"` can
  complete the stop string `"</a>"`. `text.partition(stop_string)[0]` is the text before the stop
  string.
- A stop token wins over a stop string that ends at the same token. If one token completes two stop
  strings, the one that ends first wins. If both end at the same byte, the longer one wins.
- A stop string must lie in the completion as a whole. It cannot start in the prompt.

Stop strings are ignored inside a thought (`models/thoughts.py`). Set `SamplingParams.thought_open`
if the prompt ends inside a thought, which happens when the chat template opens one.

A turn that ends with a stop string has no end-of-turn token. To continue the conversation, call
`Tokenizer.continue_conversation(text, stopped=False)`. The prefix cache then holds the whole turn,
including its last token. A decode call may generate a few tokens after the stop string, and these
tokens are discarded. The result depends only on the sampled tokens. It does not depend on
`decode_steps_per_call` or on other requests in the batch.
"""

import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol, runtime_checkable

from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import LONGEST_TAG_BYTES, THOUGHT_TAG_BYTES, end_of_unopened_thought

FinishReason = Literal["stop", "length", "stop_string"]
TokenIds = Sequence[int]


class RequestError(UserError):
    """One request cannot be served. The generator continues with its other requests."""


class DeadlineError(RequestError):
    """The deadline of the request passed before its completion was finished."""


class OverloadError(RequestError):
    """The queue is full. The client should send the request again later."""


class StoppedError(RequestError):
    """The server stopped before the request was complete."""


class PolicyError(RequestError):
    """The policy computed a log-probability that is NaN or infinite for a valid request."""


class EngineError(RequestError):
    """The engine failed while it computed this request."""


class ReplyError(RequestError):
    """An endpoint sent a reply that breaks the protocol or does not match the request."""


class UnusableReplyError(ReplyError):
    """An endpoint sent no usable reply to this request.

    The episode of this request ends, and `reason` is its stop reason. Other episodes continue.
    """

    def __init__(
        self, sentence: str, reason: Literal["filtered", "bad_reply"] = "bad_reply"
    ) -> None:
        super().__init__(sentence)
        self.reason: Literal["filtered", "bad_reply"] = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling settings of one request.

    The temperature is applied first, then the filters top_k, top_p and min_p, in this order.
    """

    # Largest number of tokens to generate, including the stop token.
    max_new_tokens: int
    # Sampling temperature. 0 means greedy decoding.
    temperature: float
    # Seed of the random draws. The same request with the same seed gives the same tokens in every
    # batch.
    seed: int
    # Draw only from the k most likely tokens. 0 means from all tokens.
    top_k: int = 0
    # Draw only from the most likely tokens: the fewest whose probabilities sum to at least this
    # value, in (0, 1]. 1 means from all tokens.
    top_p: float = 1.0
    # Draw only from tokens whose probability is at least min_p times the largest probability, in
    # [0, 1]. 0 means from all tokens.
    min_p: float = 0.0
    # Token ids that end the completion, in addition to the model's own stop tokens.
    stop_token_ids: tuple[int, ...] = ()
    # Strings that end the completion. The module docstring has the rules.
    stop_strings: tuple[str, ...] = ()
    # Whether the prompt ends inside a thought. Stop strings are ignored until the thought closes.
    thought_open: bool = False
    # Time limit from submission to completion, in seconds. None means no limit.
    deadline_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens that were generated for one request, and the reason why generation ended."""

    # All sampled tokens. The last one may be the stop token, or the token that completed a stop
    # string.
    token_ids: tuple[int, ...]
    # Log-probability of each token under the policy itself, at temperature 1 and without filters
    # (float32 values). None if the endpoint or the engine returns no log-probabilities.
    logprobs: tuple[float, ...] | None
    # "stop" after a stop token, "stop_string" after a stop string, "length" at max_new_tokens.
    finish_reason: FinishReason
    # Log-probability of each token under the distribution it was drawn from, that is after
    # temperature and filters. None if it is not known.
    sampling_logprobs: tuple[float, ...] | None = None
    # Version of the policy that generated the tokens. Scripted completions leave it at 0.
    policy_version: int = 0
    # The stop string that ended the completion. None for any other finish reason.
    stop_string: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedTokens:
    """Some tokens of a completion, at least one, while the rest is still being decoded."""

    token_ids: tuple[int, ...]
    # Log-probability of each token, as in `Completion.logprobs`.
    logprobs: tuple[float, ...] | None


class Generator(Protocol):
    """The interface of everything that completes prompts."""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> Completion:
        """Complete one prompt, given as token ids.

        `continues=True` announces that a later request of the same conversation will begin with
        this prompt. The project's own engine starts such requests before all others. Raises
        RequestError if the request cannot be served.
        """
        ...


@runtime_checkable
class StreamingGenerator(Generator, Protocol):
    """A generator that can also yield the tokens of a completion while they are decoded."""

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncGenerator[StreamedTokens | Completion, None]:
        """Complete one prompt, and yield its tokens while they are decoded.

        The last item is the whole completion. If the caller closes the stream before, the request
        is cancelled. Raises RequestError if the request cannot be served.
        """
        ...


class StopMatcher:
    """A matcher that finds the first stop string of a completion while its tokens arrive."""

    def __init__(self, stops: Sequence[str], *, thought_open: bool = False) -> None:
        """Search for `stops`. `thought_open` says whether the prompt ends inside a thought."""
        self._stops = [stop.encode() for stop in stops]
        # Keep the last bytes of the text: a stop string or a thought tag may start there and end in
        # a later token.
        self._tail_bytes = max([LONGEST_TAG_BYTES, *map(len, self._stops)]) - 1
        self._tail = b""
        self._thought_open = thought_open

    @property
    def thought_open(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._thought_open

    def push(self, piece: bytes) -> str | None:
        """Add the bytes of one token. Return the stop string that it completes, or None."""
        text = self._tail + piece
        seen_bytes = len(self._tail)
        ending, self._thought_open = _scan(text, self._stops, seen_bytes, self._thought_open)
        self._tail = text[max(0, len(text) - self._tail_bytes) :]
        return None if ending is None else ending[1].decode()


def first_stop(
    text: bytes, stops: Sequence[bytes], *, thought_open: bool = False
) -> tuple[int, bytes] | None:
    """Find the first stop string in `text` that is not inside a thought.

    Returns (end position in bytes, stop string), or None if there is no stop string. A
    `StopMatcher` gives the same result for text that arrives token by token.
    """
    ending, _ = _scan(text, stops, 0, thought_open)
    return ending


def first_stop_of_turn(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """Cut a complete turn after its first stop string.

    Returns (text up to the end of the stop string, stop string), or None if there is no stop
    string. If the turn closes a thought that it did not open, everything up to the closing tag
    counts as a thought.
    """
    start = end_of_unopened_thought(text)
    encoded = text[start:].encode()
    ending = first_stop(encoded, [stop.encode() for stop in stops])
    if ending is None:
        return None
    end, stop = ending
    return text[:start] + encoded[:end].decode(), stop.decode()


def before_stop(text: str, stop: str) -> str:
    """Return the part of a complete turn before the stop string `stop`.

    A `stop` inside a thought does not count. Returns the whole turn if `stop` is not in it.
    """
    ending = first_stop_of_turn(text, [stop])
    return text if ending is None else ending[0].removesuffix(stop)


def check_params(params: SamplingParams) -> None:
    """Check that all sampling parameters have valid values.

    Raises RequestError for the first invalid one.
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
    """Check that a prompt is not empty and that its token ids are below `vocabulary`.

    Raises RequestError otherwise.
    """
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: send at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise RequestError(
            f"the prompt's token ids {min(prompt)}..{max(prompt)} are outside the vocabulary of "
            f"{vocabulary} tokens: encode the prompt with the tokenizer of this model"
        )


def _check_stops(params: SamplingParams) -> None:
    """Check the stop tokens and the stop strings. Raises RequestError if one is invalid."""
    if min(params.stop_token_ids, default=0) < 0:
        raise RequestError(
            f"stop_token_ids contain {min(params.stop_token_ids)}: token ids must be 0 or larger"
        )
    if "" in params.stop_strings:
        raise RequestError(
            "a stop string is empty and would end every completion at once: remove it"
        )
    for stop in params.stop_strings:
        try:
            stop.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the stop string {stop!r} cannot be encoded as UTF-8: send complete characters"
            ) from error


def _scan(
    text: bytes, stops: Sequence[bytes], seen_bytes: int, thought_open: bool
) -> tuple[tuple[int, bytes] | None, bool]:
    """Find the first stop string that ends after the first `seen_bytes` bytes of `text`.

    `thought_open` says whether a thought is open after the first `seen_bytes` bytes. Returns (the
    result as in `first_stop`, whether a thought is open at the end of the text).
    """
    # The first position, in bytes, at which a stop string may end.
    earliest = seen_bytes + 1
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
    """Find the first stop string whose end lies between `earliest` and `latest` (bytes).

    Returns (end position, stop string), or None. If two stop strings end at the same position,
    the longer one is returned.
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
