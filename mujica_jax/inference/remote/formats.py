"""The requests and answers of an OpenAI-compatible endpoint, in two formats.

`completions` is for servers that take the tokenizer's ids, such as vLLM: token ids are sent, and
token ids come back with their log-probabilities. `chat` is for all others, such as GPT-4.1: the
conversation is sent as messages, and the text of the reply is encoded here.

Stop strings count outside of thoughts only (`inference/requests.py`), and servers do not know
thoughts. A completions server that stops inside of a thought is asked to go on from there. A chat
server gets no stop strings: its reply is cut here. Reasoning that a chat server returns beside its
reply is no part of the conversation.

Fields that vLLM adds to the OpenAI interface (`top_k`, `min_p`, `stop_token_ids`,
`return_token_ids`, ...) are sent in completions only.
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

TOKEN_PREFIX = "token_id:"  # how vLLM writes a token under return_tokens_as_token_ids
MIN_LOGPROB = -1e5  # vLLM writes -9999 for what JSON has no number for
# What servers write when the model ended its reply, or when it was cut.
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
FILTERED = (
    "content_filter",
    "safety",
    "refusal",
    "recitation",
    "prohibited_content",
    "blocklist",
    "spii",
)
FILTER_WORDS = (
    "content filter",
    "content management policy",
    "content policy",
    "safety",
    "moderation",
)
ROUNDING = 1e-3  # a logarithm of a probability may come out above 0 by this


class NoChoiceError(UnusableReplyError):
    """The endpoint's answer holds no reply.

    An endpoint that always answers so does not implement this interface.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """An endpoint's reply to one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    stop_string: str | None
    cut: bool  # longer than max_new_tokens in our tokens, so its end was left out
    usage: tuple[int, int] | None  # prompt tokens and generated tokens as the endpoint counts them
    is_unfinished: bool = False  # the server stopped at a stop string inside of a thought


class CompletionsFormat:
    """Sends and reads token ids. `body` is the JSON of a request; `read` raises ReplyError."""

    path = "completions"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def body(
        self, prompt: Sequence[int], params: SamplingParams, sampled: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the body of a request. `sampled` holds the tokens of an unfinished reply."""
        return {
            "prompt": [int(id) for id in (*prompt, *sampled)],
            "max_tokens": params.max_new_tokens - len(sampled),
            # The rest of a reply does not repeat the draws of its beginning.
            "seed": params.seed + len(sampled),
            # All that shapes the distribution is sent. What is left out, vLLM takes from the
            # model's generation_config.json.
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(params.stop_strings),
            "stop_token_ids": sorted(self._stop_token_ids(params)),
            # Stop strings are looked for in the text as our own decoder writes it.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logprobs": 0,  # of the chosen tokens alone
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
        """Read an answer. If it continues the unfinished reply `before`, return both as one."""
        choice = _choice(answer)
        finish = _finish_reason(choice)
        ids = _token_ids(choice)
        logprobs = _logprobs(choice)
        ids_before = () if before is None else before.token_ids
        room = params.max_new_tokens - len(ids_before)
        _check_prompt_ids(choice, sent=[*prompt, *ids_before])
        self._check_ids(ids, logprobs, finish=finish, params=params, room=room)

        # Put the parts of an unfinished reply together.
        if before is not None:
            ids = [*before.token_ids, *ids]
            if before.logprobs is None or logprobs is None:
                logprobs = None
            else:
                logprobs = [*before.logprobs, *logprobs]

        # Find where the reply ends, as our own engine does.
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
                f"{sorted(self._stop_token_ids(params))}: serve the model of this tokenizer, with "
                "the stop token among the ids"
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
        """Check the ids of a reply. Raises ReplyError.

        There must be between 1 and `room` ids, all of this vocabulary, with one log-probability
        each.
        """
        if not ids:
            raise UnusableReplyError(
                f"the endpoint generated 0 tokens of {params.max_new_tokens} and says it ended by "
                f"{finish!r}"
            )
        if len(ids) > room:
            raise ReplyError(
                f"the endpoint generated {len(ids)} tokens and max_new_tokens is {room}"
            )
        if logprobs is not None and len(logprobs) != len(ids):
            raise ReplyError(
                f"the endpoint gave {len(logprobs)} log-probabilities for {len(ids)} tokens"
            )
        if not 0 <= min(ids) <= max(ids) < self._tokenizer.vocab_size:
            raise ReplyError(
                f"the endpoint's token ids {min(ids)}..{max(ids)} are outside the vocabulary of "
                f"{self._tokenizer.vocab_size}: give the tokenizer of the model that it serves"
            )

    def _stop_token_ids(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *self._tokenizer.stop_token_ids}

    def _ending(
        self, ids: Sequence[int], params: SamplingParams
    ) -> tuple[tuple[int, FinishReason, str | None] | None, bool]:
        """Find where the completion ends, as our own engine does.

        Returns the ending and whether the ids end inside of a thought. The ending is (tokens,
        finish reason, stop string), or None if nothing in the ids ends the completion.
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
    """Sends messages and reads text.

    The token ids are ours and not the endpoint's, so there are no log-probabilities. `body` raises
    RequestError for parameters that a chat endpoint does not take; `read` raises ReplyError.
    """

    path = "chat/completions"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def body(
        self, prompt: Sequence[int], params: SamplingParams, sampled: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the body of a request."""
        assert not sampled, "no reply of a chat endpoint is unfinished"
        for name in ("top_k", "min_p", "stop_token_ids"):
            value = getattr(params, name)
            if value:
                raise RequestError(
                    f"{name} is {value} and a chat endpoint takes none: leave it out, or use "
                    "completions"
                )
        try:
            messages = self._tokenizer.messages(prompt)
        except UserError as error:
            raise RequestError(str(error)) from error
        # Stop strings are not sent: the server would stop inside of thoughts too, and its reply
        # would not say whether one of them or the model itself ended it.
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
        """Read an answer.

        If it closes a thought that it does not open, the server's template opened that thought.
        """
        assert before is None, "no reply of a chat endpoint is unfinished"
        choice = _choice(answer)
        finish: FinishReason = _finish_reason(choice)
        text = _text(choice.get("message"), finish)
        # JSON may hold halves of characters.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

        # Cut the reply at its first stop string.
        stop_string = None
        ending = first_stop_of_turn(text, params.stop_strings)
        if ending is not None:
            text, stop_string = ending
            finish = "stop_string"
        if params.thought_open:
            text = within_opened_thought(text)

        # Encode it, and cut it to max_new_tokens.
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
    """Check that the endpoint read the ids that were sent. Raises ReplyError."""
    read_prompt = choice.get("prompt_token_ids")
    if read_prompt is not None and read_prompt != sent:
        count = len(read_prompt) if isinstance(read_prompt, list) else "no list of"
        raise ReplyError(
            f"the endpoint read {count} prompt tokens that are not the {len(sent)} sent: it must "
            "take ids as they are"
        )


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one choice of an answer. Raises NoChoiceError."""
    choices = answer.get("choices")
    error = answer.get("error")  # some gateways send it with status 200
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
    """Return why the reply ended.

    Raises UnusableReplyError if the reply was withheld, or if the reason is unknown.
    """
    reason = choice.get("finish_reason")
    word = reason.lower() if isinstance(reason, str) else ""
    if word in FILTERED:
        raise UnusableReplyError(
            f"the endpoint ended a completion by {reason!r}: it withheld the reply", "filtered"
        )
    finish = FINISH_REASONS.get(word)
    if finish is None:
        raise UnusableReplyError(
            f"the endpoint ended a completion by {_brief(reason)} where 'stop' or 'length' is "
            "expected"
        )
    return finish


def _text(message: Any, finish: Literal["stop", "length"]) -> str:
    """Return the text of a chat message, which is a text or a list of parts.

    A model that spent all of its tokens on a thought has no text: that is "". Raises
    UnusableReplyError.
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
    """Return the stop reason for what a server says when it refuses a request."""
    lower_case = message.lower().replace("_", " ")
    return "filtered" if any(words in lower_case for words in FILTER_WORDS) else "bad_reply"


def _token_ids(choice: Mapping[str, Any]) -> list[int]:
    """Return the ids of the generated tokens. Raises ReplyError.

    They are in `token_ids`. A server that does not know this field writes its tokens as their ids.
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
                "return_token_ids or return_tokens_as_token_ids, as vLLM does; for others use chat"
            )
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise ReplyError(
            "the endpoint gave token_ids that are no list of whole numbers: use chat for this "
            "server"
        )
    return ids


def _logprobs(choice: Mapping[str, Any]) -> list[float] | None:
    """Return the log-probabilities of the generated tokens, if there are any. Raises ReplyError."""
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
    """Return the field `logprobs`, which holds tokens and their log-probabilities."""
    field = choice.get("logprobs")
    return field if isinstance(field, Mapping) else {}


def _brief(value: Any) -> str:
    """Return the beginning of a value, for a message."""
    return repr(value)[:40]


def _usage(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (prompt tokens, generated tokens) as the endpoint counts them."""
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
    """Return the usage of a reply in two parts."""
    if before is None or usage is None:
        return usage
    return before[0] + usage[0], before[1] + usage[1]
