"""Files of conversations and of preference pairs, read and written as text.

A file is JSON Lines (`.jsonl`), a JSON array (`.json`) or `.parquet`. Each record is one
conversation:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    {"prompt": [messages], "completion": [messages]}
    {"prompt": "text", "completion": "text"}

or one preference pair:

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    {"prompt": "text", "chosen": "text", "rejected": "text"}
    {"chosen": [messages], "rejected": [messages]}        with a common beginning

The first form is that of OpenAI and TRL, the second that of ShareGPT, and the others are those of
TRL. A prompt that is a text is one message of the user, and a completion that is a text is one
message of the assistant.

Messages of the assistant are learnt, except those with `"weight": 0` (OpenAI) or `"train": false`
(Axolotl), and those in a prompt. Three more fields of a message are ours. `"ends_turn": false` says
that a stop string ended the message, so that the model wrote no end-of-turn token. `"tag"` says
that the tags around the content are the protocol's own, and not text that somebody quotes.
`"token_ids"` are the tokens that a model sampled for the content, if its tokenizer would choose
others.

Other fields of a record are ignored, except `tools`: a record with tools or with tool calls is
refused, because its prompt would lack them. Nothing is normalised: texts stay as they are.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mujica_jax.errors import UserError, nearest
from mujica_jax.records import Message, MessageRole
from mujica_jax.storage.run_directory import RunPath, run_path

ENDINGS = (".jsonl", ".json", ".parquet")
# The names of roles in files of other programs.
ROLES: Mapping[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
ROLE_FIELDS = ("role", "from")
CONTENT_FIELDS = ("content", "value")
# Fields of a message that call a tool.
CALL_FIELDS = ("tool_calls", "function_call")
# Tags that enclose whole messages. Agents put passages between them.
MESSAGE_TAGS = ("information",)
CONVERSATION_FORMS = (
    'give {"messages": [{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "completion": ...}'
)
PAIR_FORMS = 'give {"prompt": ..., "chosen": ..., "rejected": ...}'
# Error messages quote this much of a text.
SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessagesRecord:
    """A conversation of a file, and its place there, such as "data.jsonl, line 3"."""

    place: str
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceRecord:
    """A preference pair of a file, and its place there.

    Both conversations begin with the same prompt, in which nothing is learnt.
    """

    place: str
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]


def read_conversations(names: Sequence[str]) -> list[MessagesRecord]:
    """Return the conversations of these files, and of the files of these folders.

    Raises UserError with file and line for a record that cannot be learnt.
    """
    records = []
    for place, value in _records(names):
        fields = _object(value, place)
        messages = _conversation(fields, place)
        _check_learnable(messages, place)
        records.append(MessagesRecord(place=place, messages=messages))
    return records


def read_preferences(names: Sequence[str]) -> list[PreferenceRecord]:
    """Return the preference pairs of these files, and of the files of these folders.

    Raises UserError with file and line for a record that cannot be learnt.
    """
    records = []
    for place, value in _records(names):
        fields = _object(value, place)
        record = _preference(fields, place)
        _check_learnable(record.chosen, f"{place}, chosen")
        _check_learnable(record.rejected, f"{place}, rejected")
        records.append(record)
    return records


def data_files(names: Sequence[str]) -> list[RunPath]:
    """Return the files that `method.data` names. A folder stands for its files, sorted by name.

    Raises UserError if there is no such file, or if a folder has none.
    """
    endings = ", ".join(ENDINGS)
    files: list[RunPath] = []
    for name in names:
        path = run_path(name)
        if path.is_dir():
            entries = sorted(path.iterdir(), key=str)
            in_folder = [
                entry
                for entry in entries
                if entry.name.endswith(ENDINGS) and not entry.name.startswith(".")
            ]
            if not in_folder:
                raise UserError(
                    f"method.data {name} is a folder without a file {endings}: name a file"
                )
            files += in_folder
        elif not path.exists():
            raise UserError(
                f"method.data {name} does not exist: give a file {endings}, or a folder of such files"
            )
        elif not path.name.endswith(ENDINGS):
            raise UserError(f"method.data {name} must end in {endings}: rename or convert the file")
        else:
            files.append(path)
    return files


def fingerprint_of_files(names: Sequence[str]) -> str:
    """Return the number of files and the digest of their content, in the order of `data_files`."""
    files = data_files(names)
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{len(files)}, {digest.hexdigest()[:16]}"


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object that `read_conversations` reads back as the same message.

    Programs that only know `role` and `content` read the same text.
    """
    content = message.content
    if message.tag:
        content = f"<{message.tag}>\n{content}\n</{message.tag}>"
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.tag:
        fields["tag"] = message.tag
    if message.role == "assistant" and not message.trained:
        fields["weight"] = 0
    if message.role == "assistant" and not message.ends_turn:
        fields["ends_turn"] = False
    if message.token_ids:
        fields["token_ids"] = list(message.token_ids)
    return fields


# --- files ---


def _records(names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each record of all files.

    Raises UserError if a file cannot be read or has no record.
    """
    for file in data_files(names):
        is_empty = True
        for place, value in _records_of(file):
            is_empty = False
            yield place, value
        if is_empty:
            raise UserError(f"{file} has no records: give a file with one conversation a line")


def _records_of(file: RunPath) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each record of a file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): check the file") from error
    if file.name.endswith(".parquet"):
        yield from _parquet_records(file, data)
        return

    # The encoding utf-8-sig drops a byte order mark.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if text.lstrip().startswith("["):
        yield from _array_records(file, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file}, line {number}", _decoded(line, f"{file}, line {number}")


def _array_records(file: RunPath, text: str) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each record of a JSON array."""
    values = _decoded(text, str(file))
    assert isinstance(values, list), "the text begins with a bracket"
    for number, value in enumerate(values, start=1):
        yield f"{file}, record {number}", value


def _decoded(text: str, place: str) -> object:
    """Return the value of a JSON text. Raises UserError if it is not JSON, or is cut off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = (
            f"line {error.lineno}, column {error.colno}"
            if error.lineno > 1
            else f"column {error.colno}"
        )
        is_cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        reason = "it seems to be cut off" if is_cut_off else "it is damaged"
        raise UserError(
            f"{place}: not valid JSON ({error.msg} at {where}); {reason}: write it again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON ({error}): write it again") from error


def _parquet_records(file: RunPath, data: bytes) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each row of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{file} cannot be read ({reason}): write the file again") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file}, row {number}", row


# --- records ---


def _object(value: object, place: str) -> dict[str, Any]:
    """Return a record as an object without empty fields. Raises UserError if it is none.

    Parquet fills a field that a row does not have with None.
    """
    if not isinstance(value, Mapping):
        raise UserError(
            f"{place}: the record is {_shown(value)} and must be an object: {CONVERSATION_FORMS}"
        )
    fields = {str(name): field for name, field in value.items() if field is not None}
    if fields.get("tools"):
        raise UserError(
            f"{place}: the record has tools, which the prompt would lack: describe them in the "
            "system message, and leave out the field"
        )
    return fields


def _conversation(fields: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    """Return the messages of a record with one conversation."""
    for name in ("messages", "conversations"):
        if name in fields:
            return _messages(fields[name], place, learnt=True)
    if "prompt" in fields and "completion" in fields:
        prompt = _messages(fields["prompt"], f"{place}, prompt", text_role="user")
        completion = _messages(
            fields["completion"], f"{place}, completion", text_role="assistant", learnt=True
        )
        return (*prompt, *completion)
    if "chosen" in fields:
        raise UserError(
            f"{place}: the record is a preference pair, not a conversation: give --method.kind dpo"
        )
    _refuse(fields, place, "neither messages nor a prompt with its completion", CONVERSATION_FORMS)


def _preference(fields: Mapping[str, Any], place: str) -> PreferenceRecord:
    """Return the preference pair of a record."""
    if "chosen" not in fields or "rejected" not in fields:
        if "messages" in fields or "conversations" in fields or "completion" in fields:
            raise UserError(
                f"{place}: the record is a conversation, not a preference pair: give --method.kind "
                f"sft, or {PAIR_FORMS}"
            )
        _refuse(fields, place, "not both chosen and rejected", PAIR_FORMS)
    has_prompt = "prompt" in fields
    text_role: MessageRole | None = "assistant" if has_prompt else None
    chosen = _messages(fields["chosen"], f"{place}, chosen", text_role=text_role, learnt=True)
    rejected = _messages(fields["rejected"], f"{place}, rejected", text_role=text_role, learnt=True)
    if chosen == rejected:
        raise UserError(
            f"{place}: chosen and rejected are the same, so there is nothing to prefer: leave out "
            "the record"
        )

    # Without a prompt, the common beginning of both conversations is the prompt. Some files give the
    # prompt and repeat it in both conversations.
    prompt: tuple[Message, ...] = ()
    if has_prompt:
        prompt = _messages(fields["prompt"], f"{place}, prompt", text_role="user")
    repeats_prompt = all(
        side and side[0].role != "assistant" and side[: len(prompt)][-1:] == prompt[-1:]
        for side in (chosen, rejected)
    )
    if not has_prompt or repeats_prompt:
        length = _common_length(chosen, rejected)
        prompt = tuple(dataclasses.replace(message, trained=False) for message in chosen[:length])
        chosen = chosen[length:]
        rejected = rejected[length:]
    if not chosen or not rejected:
        raise UserError(
            f"{place}: one of chosen and rejected is the beginning of the other: end both with "
            "different turns of the assistant"
        )
    for side in (chosen, rejected):
        if side[0].role != "assistant":
            raise UserError(
                f"{place}: chosen and rejected differ first in a message of the {side[0].role}, "
                f"{_shown(side[0].content)}: give both the same prompt"
            )
    return PreferenceRecord(place=place, chosen=(*prompt, *chosen), rejected=(*prompt, *rejected))


def _common_length(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return how many messages two conversations share at their beginning."""
    length = 0
    for one_message, other_message in zip(first, second, strict=False):
        if one_message != other_message:
            break
        length += 1
    return length


def _refuse(fields: Mapping[str, Any], place: str, lacks: str, forms: str) -> NoReturn:
    """Raise UserError for a record in another form. Questions get a hint of their own."""
    names = ", ".join(fields) or "no fields"
    if "question" in fields or "golden_answers" in fields:
        raise UserError(
            f"{place}: the record is a question ({names}), not a conversation: --task.kind "
            f"questions --task.data-dir reads questions; for --method.data {forms}"
        )
    raise UserError(f"{place}: the record has {lacks} ({names}): {forms}")


# --- messages ---


def _messages(
    value: object, place: str, *, text_role: MessageRole | None = None, learnt: bool = False
) -> tuple[Message, ...]:
    """Return the messages of a list.

    With `text_role`, a text is allowed too. It is one message of this role. With `learnt` the
    messages of the assistant are learnt, unless they say otherwise.
    """
    if isinstance(value, str) and text_role is not None:
        message = {"role": text_role, "content": value}
        return (_message(message, place, learnt=learnt),)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{place}: {_shown(value)} must be a list of messages")
    return tuple(
        _message(message, f"{place}, message {number}", learnt=learnt)
        for number, message in enumerate(value, start=1)
    )


def _message(value: object, place: str, *, learnt: bool) -> Message:
    """Return one message."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {_shown(value)} must be an object with role and content")
    fields = {name: field for name, field in value.items() if field is not None}
    role = _role(fields, place)
    if any(fields.get(name) for name in CALL_FIELDS):
        raise UserError(
            f"{place}: the message calls a tool, and calls are only read as text: write the call "
            "into content, as the model should write it"
        )
    content = _content(fields, place)
    tag = fields.get("tag", "")
    if tag:
        content = _without_tag(content, tag, place)
    is_learnt = _is_learnt(fields, place)
    if role != "assistant":
        return Message(role=role, content=content, tag=tag)
    if not content.strip():
        raise UserError(f"{place}: the turn of the assistant is empty: fill it or leave it out")
    return Message(
        role=role,
        content=content,
        trained=learnt and is_learnt,
        ends_turn=_flag(fields, "ends_turn", place),
        tag=tag,
        token_ids=_token_ids(fields, place),
    )


def _role(fields: Mapping[str, Any], place: str) -> MessageRole:
    """Return the role of a message."""
    for name in ROLE_FIELDS:
        if name in fields:
            role = str(fields[name])
            if role in ROLES:
                return ROLES[role]
            raise UserError(f"{place}: unknown role {role!r}; {nearest(role, list(ROLES))}")
    raise UserError(f"{place}: the message has no role: add role and content")


def _content(fields: Mapping[str, Any], place: str) -> str:
    """Return the text of a message. A list of content parts is joined."""
    name = next((name for name in CONTENT_FIELDS if name in fields), None)
    if name is None:
        raise UserError(f"{place}: the message has no content: add the text of the message")
    content = fields[name]
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(part, place) for part in content)
    if not isinstance(content, str):
        raise UserError(f"{place}: {name} is {_shown(content)} and must be a text")
    # A lone surrogate comes from an escape for half a character.
    if not content.isascii() and content.encode("utf-8", "replace").decode() != content:
        raise UserError(f"{place}: {name} holds half of a character: write whole characters")
    return content


def _part(part: object, place: str) -> str:
    """Return the text of a content part."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise UserError(
            f"{place}: a content part is {_shown(part)}, and only parts of the type text can be "
            "learnt: leave out images and other media"
        )
    return text


def _without_tag(content: str, tag: object, place: str) -> str:
    """Return the content between <tag> and </tag>."""
    if tag not in MESSAGE_TAGS:
        raise UserError(
            f"{place}: unknown tag {tag!r}; choose from {', '.join(MESSAGE_TAGS)}, or leave it out"
        )
    opening = f"<{tag}>\n"
    closing = f"\n</{tag}>"
    if not (content.startswith(opening) and content.endswith(closing)):
        raise UserError(
            f"{place}: tag is {tag}, but the content is not between {opening.strip()} and "
            f"{closing.strip()} on lines of their own: add them, or leave out tag"
        )
    return content.removeprefix(opening).removesuffix(closing)


def _is_learnt(fields: Mapping[str, Any], place: str) -> bool:
    """Return whether `weight` and `train` let the message be learnt."""
    weight = fields.get("weight", 1)
    if weight not in (0, 1):
        raise UserError(f"{place}: weight is {_shown(weight)} and must be 0 or 1")
    return bool(weight) and _flag(fields, "train", place)


def _token_ids(fields: Mapping[str, Any], place: str) -> tuple[int, ...]:
    """Return the sampled tokens of a message, or none."""
    ids = fields.get("token_ids", [])
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str)
    if not is_list or not all(isinstance(id, int) and id >= 0 for id in ids):
        raise UserError(f"{place}: token_ids is {_shown(ids)} and must be a list of token ids")
    return tuple(ids)


def _flag(fields: Mapping[str, Any], name: str, place: str) -> bool:
    """Return a field that is true or false. A missing field is true."""
    value = fields.get(name, True)
    if not isinstance(value, bool):
        raise UserError(f"{place}: {name} is {_shown(value)} and must be true or false")
    return value


def _check_learnable(messages: Sequence[Message], place: str) -> None:
    """Check that a conversation begins with context and has a turn to learn. Raises UserError."""
    if not any(message.role == "assistant" for message in messages):
        raise UserError(f"{place}: there is no turn of the assistant to learn: add one")
    if messages[0].role == "assistant":
        raise UserError(
            f"{place}: the conversation begins with the assistant: add the message that it answers"
        )
    if not any(message.trained for message in messages):
        raise UserError(
            f"{place}: no turn of the assistant is learnt, because weight, train or the prompt "
            "exclude them: leave out the record"
        )


def _shown(value: object) -> str:
    """Return a value for an error message, cut to a short text."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
