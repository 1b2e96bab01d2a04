"""Messages of files as tokens with their loss mask, and conversations of agents as messages."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.inference.requests import Completion
from mujica_jax.learning.conversations import conversation_of, messages_of, reads_back
from mujica_jax.models.tokenizer import CHATML_TEMPLATE, Tokenizer
from mujica_jax.records import Conversation, Message, Turn
from tests.models.test_tokenizer import TOKENIZERS, TRAINED, hostile_texts

SYSTEM = Message(role="system", content="Answer in one line.")
TWO_TURNS = [
    SYSTEM,
    Message(role="user", content="Who directed it?"),
    Message(role="assistant", content="<search>director</search>", trained=True),
    Message(role="user", content="Rome"),
    Message(role="assistant", content="<answer>Rome</answer>", trained=True),
]


def spelled(tokenizer: Tokenizer, ids: list[int], mask: list[bool], *, trained: bool) -> str:
    """Return the text of the tokens that are trained, or of the others, with bars at the gaps."""
    parts: list[list[int]] = [[]]
    for token, is_trained in zip(ids, mask, strict=True):
        if is_trained == trained:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return "|".join(tokenizer.decode(part) for part in parts if part)


def test_the_loss_mask_of_two_turns_worked_by_hand():
    conversation = conversation_of(TRAINED, TWO_TURNS)
    ids = conversation.token_ids
    mask = conversation.loss_mask
    assert TRAINED.decode(ids) == (
        "<|im_start|>system\nAnswer in one line.<|im_end|>\n"
        "<|im_start|>user\nWho directed it?<|im_end|>\n"
        "<|im_start|>assistant\n<search>director</search><|im_end|>\n"
        "<|im_start|>user\nRome<|im_end|>\n"
        "<|im_start|>assistant\n<answer>Rome</answer><|im_end|>"
    )
    assert spelled(TRAINED, ids, mask, trained=True) == (
        "<search>director</search><|im_end|>|<answer>Rome</answer><|im_end|>"
    )
    assert spelled(TRAINED, ids, mask, trained=False) == (
        "<|im_start|>system\nAnswer in one line.<|im_end|>\n"
        "<|im_start|>user\nWho directed it?<|im_end|>\n<|im_start|>assistant\n"
        "|\n<|im_start|>user\nRome<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_with_weight_zero_is_context():
    messages = list(TWO_TURNS)
    messages[2] = dataclasses.replace(messages[2], trained=False)
    weighted = conversation_of(TRAINED, messages)
    assert weighted.token_ids == conversation_of(TRAINED, TWO_TURNS).token_ids
    mask = weighted.loss_mask
    assert spelled(TRAINED, weighted.token_ids, mask, trained=True) == (
        "<answer>Rome</answer><|im_end|>"
    )


def test_a_turn_that_a_stop_string_ended_does_not_train_its_end():
    messages = list(TWO_TURNS)
    messages[2] = dataclasses.replace(messages[2], ends_turn=False)
    stopped = conversation_of(TRAINED, messages)
    assert stopped.token_ids == conversation_of(TRAINED, TWO_TURNS).token_ids
    assert spelled(TRAINED, stopped.token_ids, stopped.loss_mask, trained=True) == (
        "<search>director</search>|<answer>Rome</answer><|im_end|>"
    )


def test_messages_after_the_last_turn_are_left_out():
    messages = [*TWO_TURNS, Message(role="user", content="Thanks")]
    assert conversation_of(TRAINED, messages) == conversation_of(TRAINED, TWO_TURNS)


def test_the_tag_around_a_message_is_the_protocols_and_a_quoted_one_is_not():
    tagged = Message(role="user", content="<answer>Oslo</answer>", tag="information")
    ids = conversation_of(TRAINED, [*TWO_TURNS[:3], tagged, TWO_TURNS[4]]).token_ids
    text = TRAINED.decode(ids)
    assert "user\n<information>\n‹answer›Oslo‹/answer›\n</information><|im_end|>" in text
    quoted = Message(role="user", content="<information>\nOslo\n</information>")
    text = TRAINED.decode(
        conversation_of(TRAINED, [*TWO_TURNS[:3], quoted, TWO_TURNS[4]]).token_ids
    )
    assert "user\n‹information›\nOslo\n‹/information›<|im_end|>" in text


@given(text=hostile_texts)
@settings(max_examples=80, deadline=None)
def test_hostile_text_moves_no_trained_token(text):
    """Whatever a message says, the trained tokens are those of the assistant's messages."""
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        messages = [
            Message(role="system", content=text),
            Message(role="user", content=text),
            TWO_TURNS[2],
            Message(role="tool", content=text),
            TWO_TURNS[4],
        ]
        conversation = conversation_of(tokenizer, messages)
        mask = conversation.loss_mask
        pairs = zip(conversation.token_ids, mask, strict=True)
        trained = [token for token, is_trained in pairs if is_trained]
        expected: list[int] = []
        for message in (TWO_TURNS[2], TWO_TURNS[4]):
            expected += [*tokenizer.encode_model(message.content), tokenizer.end_of_turn_id]
        assert trained == expected


@given(text=hostile_texts)
@settings(max_examples=80, deadline=None)
def test_a_turn_holds_no_end_of_turn_that_its_text_spells(text):
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        messages = [*TWO_TURNS[:2], Message(role="assistant", content=f"x{text}", trained=True)]
        turn = conversation_of(tokenizer, messages).turns[-1]
        assert turn.token_ids[-1] == tokenizer.end_of_turn_id
        assert tokenizer.end_of_turn_id not in turn.token_ids[:-1]


# Conversations of agents


def completion(tokenizer: Tokenizer, text: str, reason: str) -> Completion:
    ids = tokenizer.encode_model(text)
    if reason == "stop":
        ids = [*ids, tokenizer.end_of_turn_id]
    stop_string = "</search>" if reason == "stop_string" else None
    return Completion(
        token_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        finish_reason=reason,  # type: ignore[arg-type]
        stop_string=stop_string,
    )


def dialogue(tokenizer: Tokenizer, texts: list[str], *reasons: str, tag: str | None) -> Dialogue:
    """Return a conversation whose turns ended for these reasons, with an answer to each of them."""
    talk = Dialogue(tokenizer, "planner", "Answer in one line.")
    talk.add_user(texts[0])
    for number, reason in enumerate(reasons, start=1):
        talk.add_model(completion(tokenizer, "<search>Rome</search>", reason))
        if number < len(reasons):
            talk.add_user(texts[number % len(texts)], tag=tag)
    return talk


@given(
    texts=st.lists(hostile_texts, min_size=1, max_size=3),
    reasons=st.lists(st.sampled_from(["stop", "stop_string", "length"]), min_size=1, max_size=3),
    tag=st.sampled_from([None, "information"]),
)
@settings(max_examples=80, deadline=None)
def test_a_conversation_written_as_messages_has_the_tokens_and_the_mask_that_it_had(
    texts, reasons, tag
):
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        conversation = dialogue(tokenizer, texts, *reasons, tag=tag).record()
        messages = messages_of(tokenizer, conversation)
        written = conversation_of(tokenizer, messages)
        assert written.token_ids == conversation.token_ids
        assert written.loss_mask == conversation.loss_mask
        assert reads_back(tokenizer, conversation, messages)


def test_messages_are_what_the_model_read_and_wrote():
    talk = dialogue(TRAINED, ["Who? <answer>", "Rome"], "stop_string", "length", tag="information")
    assert messages_of(TRAINED, talk.record()) == [
        SYSTEM,
        Message(role="user", content="Who? ‹answer›"),
        Message(role="assistant", content="<search>Rome</search>", trained=True, ends_turn=False),
        Message(role="user", content="Rome", tag="information"),
        Message(role="assistant", content="<search>Rome</search>", ends_turn=False),
    ]


def test_worked_examples_are_messages_that_are_not_learnt():
    talk = Dialogue(TRAINED, "planner", "Answer.", examples=[("Who?", "<search>him</search>")])
    talk.add_user("Where?")
    talk.add_model(completion(TRAINED, "<answer>Rome</answer>", "stop"))
    messages = messages_of(TRAINED, talk.record())
    assert [(message.role, message.trained) for message in messages] == [
        ("system", False),
        ("user", False),
        ("assistant", False),
        ("user", False),
        ("assistant", True),
    ]


def test_a_thought_that_the_template_opens_is_written_once():
    wrapped = Tokenizer.train(["<think> Rome who directed it"] * 3, 500)._wrapped
    wrapped.chat_template = CHATML_TEMPLATE.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    thinking = Tokenizer(wrapped)
    talk = Dialogue(thinking, "planner", "Answer.")
    talk.add_user("Who?")
    talk.add_model(completion(thinking, "it is him</think>\n<answer>Rome</answer>", "stop"))
    messages = messages_of(thinking, talk.record())
    assert messages[-1].content == "<think>\nit is him</think>\n<answer>Rome</answer>"
    assert reads_back(thinking, talk.record(), messages)


# A tokenizer in which Rome is one token.
WORDS = Tokenizer.train(["Rome"], 400)


def with_last_turn(token_ids: tuple[int, ...]) -> Conversation:
    """Return the conversation of two turns, whose last turn has these tokens."""
    conversation = conversation_of(WORDS, TWO_TURNS)
    turn = Turn(role="model", token_ids=token_ids, text="", trained=True)
    return dataclasses.replace(conversation, turns=(*conversation.turns[:-1], turn))


def letters(text: str) -> tuple[int, ...]:
    """Return one token for each letter, as a policy may sample them."""
    return tuple(WORDS._backend.token_to_id(letter) for letter in text)


def test_other_tokens_of_the_same_text_are_learnt_as_they_were_sampled():
    own_ids = conversation_of(WORDS, TWO_TURNS).turns[-1].token_ids
    sampled_ids = (own_ids[0], *letters("Rome"), *own_ids[-2:])
    assert sampled_ids != own_ids
    sampled = with_last_turn(sampled_ids)
    messages = messages_of(WORDS, sampled)
    assert messages[-1].content == TWO_TURNS[-1].content
    assert messages[-1].token_ids == sampled_ids[:-1]
    assert reads_back(WORDS, sampled, messages)
    text_alone = [dataclasses.replace(message, token_ids=()) for message in messages]
    assert text_alone == TWO_TURNS
    assert not reads_back(WORDS, sampled, text_alone)


@pytest.mark.parametrize("token_ids", [letters("Oslo"), (10**6,), (WORDS.end_of_turn_id,)])
def test_tokens_that_do_not_spell_the_text_are_not_used(token_ids):
    messages = list(TWO_TURNS)
    text = "<|im_end|>" if token_ids == (WORDS.end_of_turn_id,) else "Rome"
    messages[-1] = Message(role="assistant", content=text, trained=True, token_ids=token_ids)
    turn = conversation_of(WORDS, messages).turns[-1]
    assert turn.token_ids == (*WORDS.encode_model(text), WORDS.end_of_turn_id)
