"""Read the requests of OpenAI's interface.

Three kinds of fields are refused with a sentence: those with a wrong type, those outside their
bounds, and those that would change the answer but are not supported, such as `tools`. Other unknown
fields are ignored, because clients send many that change nothing here (`user`, `metadata`).

`top_k`, `min_p`, `stop_token_ids`, `return_token_ids` and `return_tokens_as_token_ids` are fields
that vLLM added. They have vLLM's meaning.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from mujica_jax.inference.requests import SamplingParams
from mujica_jax.records import Message
from mujica_jax.web.openai.errors import ApiError

MAX_STOP_STRINGS = 16
MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that would change the answer and are not supported, with the values that change nothing.
# An absent field, None, and an empty list or object are always accepted.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": (),
    "functions": (),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The sampling settings of a request. None: the server's default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    def params(self, defaults: SamplingParams, *, room: int, seed: int) -> SamplingParams:
        """Return the settings with the server's defaults in place of those that are not given.

        `room` is the number of tokens that fit behind the prompt, the limit of the default
        `max_tokens`. `seed` is used if the request names none.
        """
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(defaults.max_new_tokens, room))
        return dataclasses.replace(
            defaults,
            max_new_tokens=max_tokens,
            temperature=_or_default(self.temperature, defaults.temperature),
            top_p=_or_default(self.top_p, defaults.top_p),
            top_k=_or_default(self.top_k, defaults.top_k),
            min_p=_or_default(self.min_p, defaults.min_p),
            seed=_or_default(self.seed, seed),
            stop_strings=self.stop_strings,
            stop_token_ids=self.stop_token_ids,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFields:
    """What the answer to a request holds."""

    stream: bool
    # With `stream`: whether the last piece counts the tokens.
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    # Whether the tokens beside log-probabilities are written as "token_id:17".
    tokens_as_ids: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request to /v1/completions. The prompt is text or token ids."""

    model: str
    prompt: str | tuple[int, ...]
    sampling: SamplingFields
    answer: AnswerFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request to /v1/chat/completions."""

    model: str
    messages: tuple[Message, ...]
    sampling: SamplingFields
    answer: AnswerFields


def read_completion_request(body: bytes) -> CompletionRequest:
    """Return the request. Raises ApiError."""
    fields = _object(body)
    _refuse_unsupported(fields)
    # The older interface has a number of alternatives here. 0 asks for the sampled tokens alone.
    logprobs = _int(fields, "logprobs", smallest=0)
    if logprobs is not None and logprobs > 1:
        raise _wrong("logprobs", logprobs, "0 or 1, for the sampled tokens; there are no others")
    return CompletionRequest(
        model=_model(fields),
        prompt=_prompt(fields.get("prompt")),
        sampling=_sampling(fields, _int(fields, "max_tokens", smallest=1)),
        answer=_answer(fields, logprobs=logprobs is not None),
    )


def read_chat_request(body: bytes) -> ChatRequest:
    """Return the request. Raises ApiError."""
    fields = _object(body)
    _refuse_unsupported(fields)
    max_tokens = _int(fields, "max_completion_tokens", smallest=1)
    if max_tokens is None:
        max_tokens = _int(fields, "max_tokens", smallest=1)
    return ChatRequest(
        model=_model(fields),
        messages=_messages(fields.get("messages")),
        sampling=_sampling(fields, max_tokens),
        answer=_answer(fields, logprobs=_bool(fields, "logprobs")),
    )


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is not JSON ({error}): send a JSON object") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the request is a JSON {type(fields).__name__}: send a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Check that no field asks for something that this server cannot do. Raises ApiError."""
    for name, neutral_values in UNSUPPORTED.items():
        value = fields.get(name)
        if value is None or value == [] or value == {} or value in neutral_values:
            continue
        raise ApiError(
            f"{name} is {_brief(value)}, which this server does not support: leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", model, "the id of a model of /v1/models")
    return model


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """Return the prompt: a text or token ids, also as the only item of a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise _wrong("prompt", prompt, "one text, or one list of token ids")


def _messages(messages: Any) -> tuple[Message, ...]:
    """Return the messages of a chat.

    The first and the last one must not be the assistant's, and no two of its messages may follow
    each other.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of messages with role and content")
    read_messages = []
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if not isinstance(message, dict):
            raise _wrong(place, message, "an object with role and content")
        role = message.get("role")
        if role not in MESSAGE_ROLES:
            raise _wrong(f"{place}.role", role, f"one of {', '.join(MESSAGE_ROLES)}")
        if message.get("tool_calls"):
            raise _wrong(f"{place}.tool_calls", message["tool_calls"], "no calls of tools")
        content = _content(message.get("content"), f"{place}.content")
        # Newer clients write the system prompt as the developer's message.
        read_messages.append(
            Message(role="system" if role == "developer" else role, content=content)
        )
    if read_messages[0].role == "assistant":
        raise ApiError(
            "the first message is the assistant's: begin with a system or user message",
            param="messages",
        )
    if read_messages[-1].role == "assistant":
        raise ApiError(
            "the last message is the assistant's: end with the message that it answers",
            param="messages",
        )
    for message, next_message in itertools.pairwise(read_messages):
        if message.role == next_message.role == "assistant":
            raise ApiError(
                "two messages of the assistant follow each other: join them", param="messages"
            )
    return tuple(read_messages)


def _content(content: Any, place: str) -> str:
    """Return the text of a message, which is a string or a list of text parts."""
    if isinstance(content, str):
        text = content
    elif isinstance(content, list) and content:
        texts = []
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text")
            if not is_text or not isinstance(part.get("text"), str):
                raise _wrong(place, part, "parts of type text; images and audio are not read")
            texts.append(part["text"])
        text = "".join(texts)
    else:
        raise _wrong(place, content, "a text, or a list of parts of type text")
    # Replace unpaired surrogates, which JSON allows and UTF-8 does not.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _sampling(fields: Mapping[str, Any], max_tokens: int | None) -> SamplingFields:
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise _wrong("stop", stop, "a text or a list of texts")
    if len(stops) > MAX_STOP_STRINGS:
        raise _wrong("stop", f"{len(stops)} texts", f"at most {MAX_STOP_STRINGS}")
    stop_token_ids = fields.get("stop_token_ids") or []
    if not isinstance(stop_token_ids, list) or not all(type(id) is int for id in stop_token_ids):
        raise _wrong("stop_token_ids", stop_token_ids, "a list of token ids")
    # vLLM writes -1 for all tokens.
    top_k = _int(fields, "top_k", smallest=-1)
    return SamplingFields(
        max_tokens=max_tokens,
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
        top_k=None if top_k is None else max(0, top_k),
        min_p=_number(fields, "min_p"),
        seed=_int(fields, "seed", smallest=0),
        stop_strings=tuple(stops),
        stop_token_ids=tuple(stop_token_ids),
    )


def _answer(fields: Mapping[str, Any], *, logprobs: bool) -> AnswerFields:
    stream = _bool(fields, "stream")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    return AnswerFields(
        stream=stream,
        include_usage=_bool(options, "include_usage"),
        logprobs=logprobs,
        return_token_ids=_bool(fields, "return_token_ids"),
        tokens_as_ids=_bool(fields, "return_tokens_as_token_ids"),
    )


def _bool(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _int(fields: Mapping[str, Any], name: str, *, smallest: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not smallest <= value < 2**63:
        raise _wrong(name, value, f"a whole number of at least {smallest}")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    """Return a number. The generator checks its bounds."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    return float(value)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _wrong(name: str, value: object, wanted: str) -> ApiError:
    return ApiError(f"{name} is {_brief(value)}: give {wanted}", param=name)


def _brief(value: object) -> str:
    """Return the beginning of a value, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
