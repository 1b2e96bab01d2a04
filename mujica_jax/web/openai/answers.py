"""Write the answers of OpenAI's interface: whole ones, and the pieces of streams."""

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mujica_jax.inference.requests import Completion, StreamedTokens
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.web.openai.requests import AnswerFields

Kind = Literal["chat", "completion"]
# The beginning of an answer's id, by the kind of request.
ID_PREFIXES: Mapping[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
OBJECTS: Mapping[Kind, str] = {"chat": "chat.completion", "completion": "text_completion"}
# The objects of pieces of a stream. The older interface has one name for both.
PIECE_OBJECTS: Mapping[Kind, str] = {
    "chat": "chat.completion.chunk",
    "completion": "text_completion",
}
# With return_tokens_as_token_ids, a token is written as this prefix and its id.
TOKEN_PREFIX = "token_id:"
END_OF_STREAM = "data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The fields that an answer and all pieces of a stream begin with."""

    kind: Kind
    model: str
    id: str
    # Seconds since 1970.
    created: int

    @classmethod
    def new(cls, kind: Kind, model: str) -> "Head":
        """Return the head of a new answer, with an id of its own."""
        id = f"{ID_PREFIXES[kind]}{uuid.uuid4().hex}"
        return cls(kind=kind, model=model, id=id, created=int(time.time()))

    def answer(
        self, choice: Mapping[str, Any], usage: Mapping[str, int], **extensions: Any
    ) -> dict[str, Any]:
        """Return a whole answer with one choice. `extensions` are fields that OpenAI has not."""
        fields = self._fields(OBJECTS[self.kind])
        return {**fields, "choices": [{"index": 0, **choice}], "usage": dict(usage), **extensions}

    def piece(self, choice: Mapping[str, Any] | None, **extensions: Any) -> str:
        """Return a piece of a stream as a server-sent event. None: a piece without a choice."""
        choices = [] if choice is None else [{"index": 0, **choice}]
        fields = self._fields(PIECE_OBJECTS[self.kind])
        return server_sent({**fields, "choices": choices, **extensions})

    def _fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


def server_sent(fields: Mapping[str, Any]) -> str:
    """Return a JSON object as a server-sent event."""
    return f"data: {json.dumps(fields)}\n\n"


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the field `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(completion: Completion) -> Literal["stop", "length"]:
    """Return why the completion ended. OpenAI has no word of its own for a stop string."""
    return "length" if completion.finish_reason == "length" else "stop"


def choice_of(
    kind: Kind, text: str, completion: Completion, fields: AnswerFields, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the choice of a whole answer.

    `text` is the answer without its stop token and its stop string. Token ids and log-probabilities
    are those of all sampled tokens, so they include the stop token.
    """
    choice: dict[str, Any] = {"finish_reason": finish_reason(completion)}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    logprobs = LogprobsWriter(kind, fields, tokenizer)
    choice["logprobs"] = logprobs.write(completion)
    if fields.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    # vLLM's field for the stop string.
    choice["stop_reason"] = completion.stop_string
    return choice


class LogprobsWriter:
    """A writer of the field `logprobs`, for a whole answer or for one piece of a stream after another."""

    def __init__(self, kind: Kind, fields: AnswerFields, tokenizer: Tokenizer) -> None:
        self._kind = kind
        self._fields = fields
        self._tokenizer = tokenizer
        # Number of characters of the tokens so far.
        self._text_offset = 0

    def write(self, tokens: Completion | StreamedTokens | None) -> dict[str, Any] | None:
        """Return the field for these tokens, which follow those of the last call.

        Returns None if the request does not ask for log-probabilities, if there are no tokens, or
        if the engine returns no log-probabilities.
        """
        if not self._fields.logprobs or tokens is None or tokens.logprobs is None:
            return None
        names = [_token_name(token, self._fields, self._tokenizer) for token in tokens.token_ids]
        pieces = [self._tokenizer.token_bytes(token) for token in tokens.token_ids]
        if self._kind == "chat":
            return _chat_logprobs(names, pieces, tokens.logprobs)

        offsets = []
        for piece in pieces:
            offsets.append(self._text_offset)
            self._text_offset += len(piece.decode(errors="replace"))
        return {
            "tokens": names,
            "token_logprobs": list(tokens.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _token_name(token: int, fields: AnswerFields, tokenizer: Tokenizer) -> str:
    if fields.tokens_as_ids:
        return f"{TOKEN_PREFIX}{token}"
    return tokenizer.token_bytes(token).decode(errors="replace")


def _chat_logprobs(
    names: Sequence[str], pieces: Sequence[bytes], logprobs: Sequence[float]
) -> dict[str, Any]:
    """Return the log-probabilities in the form of the chat interface.

    `names` are the tokens as the client wants them written, and `pieces` the bytes of their text.
    """
    content = []
    for name, piece, logprob in zip(names, pieces, logprobs, strict=True):
        content.append(
            {"token": name, "logprob": logprob, "bytes": list(piece), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}
