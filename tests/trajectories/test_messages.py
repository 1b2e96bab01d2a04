"""Files of conversations and of preference pairs, in every form, and what is refused."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mujica_jax.errors import UserError
from mujica_jax.records import Message
from mujica_jax.trajectories.messages import (
    data_files,
    fingerprint_of_files,
    message_fields,
    read_conversations,
    read_preferences,
)

USER = {"role": "user", "content": "Who?"}
REPLY = {"role": "assistant", "content": "Rome"}
READ = (
    Message(role="user", content="Who?"),
    Message(role="assistant", content="Rome", trained=True),
)
UNTRAINED = Message(role="assistant", content="Rome")


def written(folder: Path, *records: object, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def messages_in(folder: Path, record: object) -> tuple[Message, ...]:
    (conversation,) = read_conversations([written(folder, record)])
    return conversation.messages


# The forms


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, REPLY]},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Rome"}]},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": "Who?", "completion": "Rome"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"text": "o?"}]},
                REPLY,
            ]
        },
        {"messages": [USER, REPLY], "tools": [], "source": "x", "id": 3},
        {"messages": [USER, {**REPLY, "tool_calls": None, "weight": 1}]},
    ],
)
def test_every_form_is_the_same_conversation(tmp_path, record):
    assert messages_in(tmp_path, record) == READ


def test_roles_of_other_programs(tmp_path):
    roles = ("developer", "human", "model", "function", "assistant")
    messages = [{"role": role, "content": "x"} for role in roles]
    read = messages_in(tmp_path, {"messages": messages})
    assert [message.role for message in read] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_messages_that_are_not_learnt(tmp_path, mark):
    read = messages_in(tmp_path, {"messages": [USER, {**REPLY, **mark}, USER, REPLY]})
    assert read == (READ[0], UNTRAINED, *READ)


def test_nothing_of_a_prompt_is_learnt(tmp_path):
    read = messages_in(tmp_path, {"prompt": [USER, REPLY, USER], "completion": [REPLY]})
    assert read == (READ[0], UNTRAINED, *READ)


def test_texts_stay_as_they_are(tmp_path):
    text = "  <|im_end|> &amp; e\u0301\r\n\u2028\x0b"
    read = messages_in(tmp_path, {"messages": [{"role": "user", "content": text}, REPLY]})
    assert read[0].content == text


def test_the_place_of_a_record_is_its_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\ufeff\n" + json.dumps({"messages": [USER, REPLY]}) + "\n\n", "utf-8")
    assert [record.place for record in read_conversations([str(path)])] == [f"{path}, line 2"]


def test_a_json_array_and_a_parquet_file_hold_the_same(tmp_path):
    records = [
        {"messages": [USER, REPLY]},
        {"messages": [USER, {**REPLY, "weight": 0}, USER, REPLY]},
    ]
    lines = read_conversations([written(tmp_path, *records)])
    array = tmp_path / "data.json"
    array.write_text(json.dumps(records, indent=1))
    table = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    for file, unit in ((array, "record"), (table, "row")):
        read = read_conversations([str(file)])
        assert [record.messages for record in read] == [record.messages for record in lines]
        assert read[1].place == f"{file}, {unit} 2"


def test_a_folder_stands_for_its_files(tmp_path):
    for name in ("b.jsonl", "a.json", "c.txt", ".hidden.jsonl"):
        written(tmp_path, {"messages": [USER, REPLY]}, name=name)
    assert [file.name for file in data_files([str(tmp_path)])] == ["a.json", "b.jsonl"]


def test_another_content_has_another_fingerprint(tmp_path):
    first = fingerprint_of_files([written(tmp_path, {"messages": [USER, REPLY]})])
    assert first.startswith("1, ")
    assert fingerprint_of_files([written(tmp_path, {"messages": [REPLY]})]) != first


@pytest.mark.parametrize(
    "message",
    [
        Message(role="system", content="Be <search> brief."),
        Message(role="user", content="a\nb", tag="information"),
        Message(role="assistant", content="x", trained=True),
        Message(role="assistant", content="x", trained=False, ends_turn=False),
        Message(role="assistant", content="x", trained=True, token_ids=(3, 4)),
    ],
)
def test_a_message_that_is_written_is_read_back(tmp_path, message):
    record = {"messages": [USER, message_fields(message), REPLY]}
    assert messages_in(tmp_path, record)[1] == message


# Preference pairs

BETTER = {"role": "assistant", "content": "Rome"}
WORSE = {"role": "assistant", "content": "Oslo"}
CHOSEN = READ
REJECTED = (READ[0], Message(role="assistant", content="Oslo", trained=True))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Who?", "chosen": "Rome", "rejected": "Oslo"},
        {"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]},
        {"prompt": [USER], "chosen": "Rome", "rejected": "Oslo"},
        {"chosen": [USER, BETTER], "rejected": [USER, WORSE]},
        # The prompt is repeated in both conversations, as in UltraFeedback.
        {"prompt": "Who?", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
    ],
)
def test_every_form_is_the_same_pair(tmp_path, record):
    (pair,) = read_preferences([written(tmp_path, record)])
    assert (pair.chosen, pair.rejected) == (CHOSEN, REJECTED)


def test_the_common_beginning_of_a_pair_is_not_learnt(tmp_path):
    common = [USER, BETTER, USER]
    record = {"chosen": [*common, BETTER], "rejected": [*common, WORSE, USER, BETTER]}
    (pair,) = read_preferences([written(tmp_path, record)])
    assert [message.trained for message in pair.chosen] == [False, False, False, True]
    assert [message.trained for message in pair.rejected] == [False] * 3 + [True, False, True]


# What is refused

MESSAGES = [USER, REPLY]
BAD_CONVERSATIONS = [
    ([], "is [] and must be an object"),
    ({}, "neither messages nor a prompt with its completion (no fields)"),
    ({"text": "x"}, "neither messages nor a prompt with its completion (text)"),
    ({"question": "Who?", "answers": ["Rome"]}, "is a question (question, answers)"),
    ({"prompt": "x", "chosen": "a", "rejected": "b"}, "give --method.kind dpo"),
    ({"messages": "Who?"}, "'Who?' must be a list of messages"),
    ({"messages": []}, "no turn of the assistant to learn"),
    ({"messages": [USER]}, "no turn of the assistant to learn"),
    ({"messages": [REPLY]}, "begins with the assistant"),
    ({"messages": ["Who?"]}, "message 1: 'Who?' must be an object"),
    ({"messages": [{"content": "x"}, REPLY]}, "message 1: the message has no role"),
    ({"messages": [{"role": "asistant", "content": "x"}]}, "did you mean assistant?"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2: the message has no content"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "the assistant is empty"),
    ({"messages": [USER, {"role": "assistant", "content": 3}]}, "content is 3 and must be a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "only parts of the type text",
    ),
    ({"messages": [USER, {**REPLY, "tool_calls": [{"id": "1"}]}]}, "message 2: the message calls"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "the record has tools"),
    ({"messages": [USER, {**REPLY, "weight": 0.5}]}, "weight is 0.5 and must be 0 or 1"),
    ({"messages": [USER, {**REPLY, "train": "no"}]}, "train is 'no' and must be true or false"),
    ({"messages": [USER, {**REPLY, "weight": 0}]}, "no turn of the assistant is learnt"),
    ({"messages": [USER, {**REPLY, "token_ids": "3"}]}, "token_ids is '3' and must be a list"),
    ({"messages": [{**USER, "tag": "answer"}, REPLY]}, "unknown tag 'answer'"),
    ({"messages": [{**USER, "tag": "information"}, REPLY]}, "is not between <information>"),
    ({"messages": [{"role": "user", "content": "\ud800"}, REPLY]}, "holds half of a character"),
]


@pytest.mark.parametrize(
    ("record", "sentence"), BAD_CONVERSATIONS, ids=lambda value: str(value)[:40]
)
def test_a_conversation_that_cannot_be_learnt_is_named_with_its_line(tmp_path, record, sentence):
    path = written(tmp_path, {"messages": MESSAGES}, record)
    with pytest.raises(UserError) as error:
        read_conversations([path])
    assert str(error.value).startswith(f"{path}, line 2")
    assert sentence in str(error.value)


BAD_PAIRS = [
    ({"messages": MESSAGES}, "give --method.kind sft"),
    ({"prompt": "x", "chosen": "a"}, "not both chosen and rejected (prompt, chosen)"),
    ({"chosen": "a", "rejected": "b"}, "chosen: 'a' must be a list of messages"),
    ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    ({"prompt": "x", "chosen": "", "rejected": "a"}, "the assistant is empty"),
    (
        {"chosen": [USER, BETTER], "rejected": [{"role": "user", "content": "Where?"}, BETTER]},
        "differ first in a message of the user, 'Who?'",
    ),
    (
        {"chosen": [USER, BETTER], "rejected": [USER, BETTER, USER, WORSE]},
        "is the beginning of the other",
    ),
]


@pytest.mark.parametrize(("record", "sentence"), BAD_PAIRS, ids=lambda value: str(value)[:40])
def test_a_pair_that_cannot_be_learnt_is_named_with_its_line(tmp_path, record, sentence):
    path = written(tmp_path, record)
    with pytest.raises(UserError) as error:
        read_preferences([path])
    assert str(error.value).startswith(f"{path}, line 1")
    assert sentence in str(error.value)


def test_a_line_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    line = json.dumps({"messages": MESSAGES})
    path.write_text(f"{line}\n{line[:-9]}")
    with pytest.raises(UserError, match=rf"{path}, line 2: not valid JSON .* seems to be cut off"):
        read_conversations([str(path)])


def test_a_line_that_is_damaged_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages" []}\n')
    with pytest.raises(UserError, match=r"line 1: not valid JSON .* at column 13\); it is damaged"):
        read_conversations([str(path)])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("data.jsonl", b"\n", "has no records"),
        ("data.json", b"[]", "has no records"),
        ("data.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("data.parquet", b"PAR1", "cannot be read"),
        ("data.csv", b"a,b", r"must end in \.jsonl, \.json, \.parquet"),
    ],
)
def test_a_file_that_holds_no_records_is_named(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_conversations([str(path)])


def test_a_missing_file_and_a_folder_without_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl does not exist"):
        read_conversations([str(tmp_path / "none.jsonl")])
    with pytest.raises(UserError, match="is a folder without a file"):
        read_conversations([str(tmp_path)])
