"""The requests and answers of an OpenAI-compatible endpoint, in two formats.

- `completions` is for servers that accept token ids, such as vLLM. Token ids are sent, and token
  ids with their log-probabilities come back.
- `chat` is for all other servers, such as GPT-4.1. The conversation is sent as messages, and the
  text of the reply is converted to token ids here.

Stop strings must be ignored inside a thought (`inference/requests.py`), but servers do not know
about thoughts. If a completions server stops at a stop string inside a thought, the request is sent
again with the tokens so far. A chat server gets no stop strings, and its reply is cut here. If a
chat server returns reasoning in a separate field, the reasoning is not part of the conversation.

The fields that vLLM adds to the OpenAI interface (`top_k`, `min_p`, `stop_token_ids`,
`return_token_ids`, ...) are only sent in the completions format.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mujica_jax.errors import UserError
from mujica_jax.inference.requests import (
    FinishReason,
    ReplyError,
    RequestError,
    SamplingParams,
    StopMatcher,
    UnusableReplyError,
    first_stop_of_turn,
)
from mujica_jax.models.thoughts import within_opened_thought
from mujica_jax.models.tokenizer import Tokenizer

# With return_tokens_as_token_ids, vLLM writes each token as this prefix and the token id.
TOKEN_PREFIX = "token_id:"
# Smallest log-probability that is accepted. vLLM writes -9999 for minus infinity.
MIN_LOGPROB = -1e5
# The reasons that servers give when the model has ended its reply ("stop") or the reply was cut
# ("length").
FINISH_REASONS: dict[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
}
# The reasons that servers give when a content filter withheld the reply.
FILTERED = (
    "content_filter",
    "safety",
    "refusal",
    "recitation",
    "prohibited_content",
    "blocklist",
    "spii",
)
# Words in an error message that mean that a content filter refused the request.
FILTER_WORDS = (
    "content filter",
    "content management policy",
    "content policy",
    "safety",
    "moderation",
)
# Largest log-probability that is accepted. Rounding may give values slightly above 0.
ROUNDING = 1e-3


class NoChoiceError(UnusableReplyError):
    """The endpoint's answer contains no reply.

    If this happens for every request, the endpoint does not implement the OpenAI interface.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """An endpoint's reply to one prompt."""

    token_ids: tuple[int, ...]
    # The log-probability of each token. None if the endpoint returns none.
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    # The stop string that ended the reply. None for any other finish reason.
    stop_string: str | None
    # Whether the reply was longer than max_new_tokens in local tokens, so its end was cut off.
    cut: bool
    # (prompt tokens, generated tokens) as the endpoint counts them. None if it does not report
    # them.
    usage: tuple[int, int] | None
    # Whether the server stopped at a stop string inside a thought, so the reply must be continued.
    is_unfinished: bool = False


class CompletionsFormat:
    """The completions format: sends and receives token ids."""

    path = "completions"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def body(
        self, prompt: Sequence[int], params: SamplingParams, sampled: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the JSON body of a request.

        To continue an unfinished reply, pass its token ids as `sampled`.
        """
        return {
            "prompt": [int(id) for id in (*prompt, *sampled)],
            "max_tokens": params.max_new_tokens - len(sampled),
            # A different seed for the rest of a reply, so that it does not repeat the random draws
            # of its beginning.
            "seed": params.seed + len(sampled),
            # Send every setting that changes the distribution. vLLM takes missing settings from
            # the model's generation_config.json.
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(params.stop_strings),
            "stop_token_ids": sorted(self._stop_token_ids(params)),
            # The server must search for stop strings in the same text as the local tokenizer.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            # 0 returns the log-probabilities of the sampled tokens, and no alternatives.
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(
        self,
        answer: Mapping[str, Any],
        prompt: Sequence[int],
        params: SamplingParams,
        before: Reply | None = None,
    ) -> Reply:
        """Read the JSON of an answer.

        If the answer continues the unfinished reply `before`, return both parts as one reply.
        Raises ReplyError if the answer does not match the request.
        """
        choice = _choice(answer)
        finish = _finish_reason(choice)
        ids = _token_ids(choice)
        logprobs = _logprobs(choice)
        ids_before = () if before is None else before.token_ids
        room = params.max_new_tokens - len(ids_before)
        _check_prompt_ids(choice, sent=[*prompt, *ids_before])
        self._check_ids(ids, logprobs, finish=finish, params=params, room=room)

        # Join the two parts of the reply.
        if before is not None:
            ids = [*before.token_ids, *ids]
            if before.logprobs is None or logprobs is None:
                logprobs = None
            else:
                logprobs = [*before.logprobs, *logprobs]

        # Find the end of the reply by the same rules as the project's own engine.
        ending, thought_open = self._ending(ids, params)
        length = len(ids)
        stop_string = None
        if ending is not None:
            length, finish, stop_string = ending
        is_unfinished = ending is None and finish == "stop" and thought_open
        if is_unfinished and len(ids) == params.max_new_tokens:
            is_unfinished = False
            finish = "length"
        if ending is None and finish == "stop" and not is_unfinished:
            raise ReplyError(
                f"the endpoint ended a completion by {_brief(choice.get('stop_reason') or 'stop')} "
                f"and its last token {ids[-1]} is none of the stop tokens "
                f"{sorted(self._stop_token_ids(params))}: serve the model of this tokenizer, and "
                "return the stop token with the other token ids"
            )
        return Reply(
            token_ids=tuple(ids[:length]),
            logprobs=None if logprobs is None else tuple(logprobs[:length]),
            finish_reason=finish,
            stop_string=stop_string,
            cut=False,
            usage=_sum_usage(None if before is None else before.usage, _usage(answer)),
            is_unfinished=is_unfinished,
        )

    def _check_ids(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        finish: FinishReason,
        params: SamplingParams,
        room: int,
    ) -> None:
        """Check the token ids of a reply.

        There must be at least 1 and at most `room` token ids. All must be in the vocabulary, and
        there must be one log-probability for each, if there are any. Raises ReplyError otherwise.
        """
        if not ids:
            raise UnusableReplyError(
                f"the endpoint generated 0 tokens of {params.max_new_tokens}, with finish_reason "
                f"{finish!r}"
            )
        if len(ids) > room:
            raise ReplyError(
                f"the endpoint generated {len(ids)} tokens, but max_new_tokens is {room}"
            )
        if logprobs is not None and len(logprobs) != len(ids):
            raise ReplyError(
                f"the endpoint gave {len(logprobs)} log-probabilities for {len(ids)} tokens"
            )
        if not 0 <= min(ids) <= max(ids) < self._tokenizer.vocab_size:
            raise ReplyError(
                f"the endpoint's token ids {min(ids)}..{max(ids)} are outside the vocabulary of "
                f"{self._tokenizer.vocab_size} tokens: use the tokenizer of the served model"
            )

    def _stop_token_ids(self, params: SamplingParams) -> set[int]:
        """Return the stop tokens of the request and of the tokenizer."""
        return {*params.stop_token_ids, *self._tokenizer.stop_token_ids}

    def _ending(
        self, ids: Sequence[int], params: SamplingParams
    ) -> tuple[tuple[int, FinishReason, str | None] | None, bool]:
        """Find the first stop token or stop string, by the same rules as the project's own engine.

        Returns (ending, thought open). The ending is (number of tokens, finish reason, stop
        string), or None if nothing in the ids ends the completion. The second value says whether
        the ids end inside a thought.
        """
        matcher = StopMatcher(params.stop_strings, thought_open=params.thought_open)
        stop_token_ids = self._stop_token_ids(params)
        for count, id in enumerate(ids, start=1):
            if id in stop_token_ids:
                return (count, "stop", None), matcher.thought_open
            stop_string = matcher.push(self._tokenizer.token_bytes(id))
            if stop_string:
                return (count, "stop_string", stop_string), False
        return None, matcher.thought_open


class ChatFormat:
    """The chat format: sends messages and receives text.

    The local tokenizer makes the token ids of the reply, so there are no log-probabilities.
    """

    path = "chat/completions"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def body(
        self, prompt: Sequence[int], params: SamplingParams, sampled: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the JSON body of a request.

        Raises RequestError for parameters that a chat endpoint does not support, and for a prompt
        that is not a conversation.
        """
        assert not sampled, "a chat reply is never unfinished"
        for name in ("top_k", "min_p", "stop_token_ids"):
            value = getattr(params, name)
            if value:
                raise RequestError(
                    f"{name} is {value}, but a chat endpoint does not accept it: remove this "
                    "setting, or use the mode completions"
                )
        try:
            messages = self._tokenizer.messages(prompt)
        except UserError as error:
            raise RequestError(str(error)) from error
        # Do not send stop strings. The server would also stop inside thoughts, and its reply would
        # not say whether a stop string or the model itself ended it.
        return {
            "messages": messages,
            "max_completion_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
        }

    def read(
        self,
        answer: Mapping[str, Any],
        prompt: Sequence[int],
        params: SamplingParams,
        before: Reply | None = None,
    ) -> Reply:
        """Read the JSON of an answer, and convert its text to token ids.

        The reply is cut at its first stop string and at max_new_tokens. A reply may close a thought
        that it did not open, because the server's chat template opened the thought. Raises
        ReplyError if the answer contains no usable reply.
        """
        assert before is None, "a chat reply is never unfinished"
        choice = _choice(answer)
        finish: FinishReason = _finish_reason(choice)
        text = _text(choice.get("message"), finish)
        # Replace unpaired surrogates, which JSON allows.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

        # Cut the reply at its first stop string.
        stop_string = None
        ending = first_stop_of_turn(text, params.stop_strings)
        if ending is not None:
            text, stop_string = ending
            finish = "stop_string"
        if params.thought_open:
            text = within_opened_thought(text)

        # Encode the text, and cut it to max_new_tokens.
        ids = self._tokenizer.encode_model(text)
        if finish == "stop":
            ids.append(self._tokenizer.end_of_turn_id)
        is_cut = len(ids) > params.max_new_tokens
        return Reply(
            token_ids=tuple(ids[: params.max_new_tokens]),
            logprobs=None,
            finish_reason="length" if is_cut else finish,
            stop_string=None if is_cut else stop_string,
            cut=is_cut,
            usage=_usage(answer),
        )


def _check_prompt_ids(choice: Mapping[str, Any], *, sent: Sequence[int]) -> None:
    """Check that the endpoint read exactly the token ids that were sent.

    Raises ReplyError otherwise. Servers that do not report the prompt's token ids are not checked.
    """
    read_prompt = choice.get("prompt_token_ids")
    if read_prompt is not None and read_prompt != sent:
        count = len(read_prompt) if isinstance(read_prompt, list) else "no list of"
        raise ReplyError(
            f"the endpoint read {count} prompt tokens that are not the {len(sent)} sent: use a "
            "server that accepts token ids unchanged"
        )


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only choice of an answer. Raises NoChoiceError if there is not exactly one."""
    choices = answer.get("choices")
    # Some gateways send errors with status 200.
    error = answer.get("error")
    if error:
        raise NoChoiceError(
            f"the endpoint answered with an error: {_brief(error)}", reason_of_refusal(str(error))
        )
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        count = len(choices) if isinstance(choices, list) else 0
        raise NoChoiceError(
            f"the endpoint gave {count} choices where 1 was asked for: check that it speaks the "
            "OpenAI interface"
        )
    return choices[0]


def _finish_reason(choice: Mapping[str, Any]) -> Literal["stop", "length"]:
    """Return the finish reason of a reply: "stop" or "length".

    Raises UnusableReplyError if a content filter withheld the reply, or if the reason is unknown.
    """
    reason = choice.get("finish_reason")
    word = reason.lower() if isinstance(reason, str) else ""
    if word in FILTERED:
        raise UnusableReplyError(
            f"the endpoint ended a completion by {reason!r}: its filter withheld the reply",
            "filtered",
        )
    finish = FINISH_REASONS.get(word)
    if finish is None:
        raise UnusableReplyError(
            f"the endpoint ended a completion by {_brief(reason)} where 'stop' or 'length' is "
            "expected"
        )
    return finish


def _text(message: Any, finish: Literal["stop", "length"]) -> str:
    """Return the text of a chat message, whose content is a string or a list of parts.

    Returns "" if the model spent all of its tokens on a thought. Raises UnusableReplyError if the
    model refused to reply or there is no text.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        texts = [part.get("text") for part in parts if part.get("type") in ("text", "output_text")]
        content = "".join(text for text in texts if isinstance(text, str))
        is_refused = any(part.get("type") == "refusal" for part in parts)
    else:
        is_refused = isinstance(message, Mapping) and bool(message.get("refusal"))
    if isinstance(content, str) and (content or not is_refused):
        return content
    if is_refused:
        raise UnusableReplyError("the endpoint's model refused to reply", "filtered")
    if content is None and finish == "length":
        return ""
    raise UnusableReplyError(
        f"the endpoint gave no text and ended by {finish!r}: its content is {_brief(content)}"
    )


def reason_of_refusal(message: str) -> Literal["filtered", "bad_reply"]:
    """Return the stop reason of an episode whose request was refused with this message."""
    lower_case = message.lower().replace("_", " ")
    return "filtered" if any(words in lower_case for words in FILTER_WORDS) else "bad_reply"


def _token_ids(choice: Mapping[str, Any]) -> list[int]:
    """Return the ids of the generated tokens. Raises ReplyError if there are none.

    They are in the field `token_ids`. Servers without this field write the ids into the tokens of
    the field `logprobs`.
    """
    ids = choice.get("token_ids")
    if ids is None:
        tokens = _logprobs_field(choice).get("tokens") or []
        ids = []
        for token in tokens:
            digits = str(token).removeprefix(TOKEN_PREFIX)
            has_prefix = digits != str(token)
            if has_prefix and digits.isascii() and digits.isdigit():
                ids.append(int(digits))
        if not ids or len(ids) != len(tokens):
            raise ReplyError(
                f"the endpoint gave {len(ids)} token ids for {len(tokens)} tokens: it must know "
                "return_token_ids or return_tokens_as_token_ids, as vLLM does. For other servers "
                "use the mode chat"
            )
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise ReplyError(
            "the endpoint gave token_ids that are not a list of whole numbers: use the mode chat "
            "for this server"
        )
    return ids


def _logprobs(choice: Mapping[str, Any]) -> list[float] | None:
    """Return the log-probabilities of the generated tokens, or None if there are none.

    Raises ReplyError if one of them is not a number between MIN_LOGPROB and ROUNDING.
    """
    values = _logprobs_field(choice).get("token_logprobs")
    if values is None:
        return None
    if not isinstance(values, list):
        raise ReplyError(
            f"the endpoint gave token_logprobs of type {type(values).__name__} where a list is "
            "expected"
        )
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not MIN_LOGPROB < value < ROUNDING:
            raise ReplyError(
                f"the endpoint gave {_brief(value)} as log-probability of token {index} of "
                f"{len(values)}"
            )
    return [float(value) for value in values]


def _logprobs_field(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the field `logprobs` with the tokens and their log-probabilities, or {}."""
    field = choice.get("logprobs")
    return field if isinstance(field, Mapping) else {}


def _brief(value: Any) -> str:
    """Return the first 40 characters of a value, for an error message."""
    return repr(value)[:40]


def _usage(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (prompt tokens, generated tokens) as the endpoint counts them, or None."""
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt_tokens = usage.get("prompt_tokens")
    generated_tokens = usage.get("completion_tokens")
    for count in (prompt_tokens, generated_tokens):
        if type(count) is not int or count < 0:
            return None
    return prompt_tokens, generated_tokens  # pyright: ignore[reportReturnType]


def _sum_usage(
    before: tuple[int, int] | None, usage: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Add the usage of two parts of a reply. None if the second part reports none."""
    if before is None or usage is None:
        return usage
    return before[0] + usage[0], before[1] + usage[1]
