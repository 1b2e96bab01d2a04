"""Write the messages of a conversation as tokens, together with the mask of the trained ones.

    conversation_of(tokenizer, messages)      messages, as files hold them    -> tokens
    messages_of(tokenizer, conversation)      tokens, as an engine saw them   -> messages

The chat template of the tokenizer writes the conversation. The model's turns are the messages of the
assistant. A turn has the tokens of its text and the end-of-turn token, and both are trained if the
message is. All other tokens are context: messages of the system, of users and of tools, and the
scaffold of the template. The same call that writes tokens also marks them, so the loss mask cannot
shift against the tokens.

Text of a file becomes no special token, whatever it says. In messages of the assistant, the tags of
our protocol become tokens (`Tokenizer.encode_model`), as in turns that a model wrote. In messages of
users and tools they are neutralised.

The tokens of a stored conversation are those that the model sampled. The tokenizer may choose others
for the same text. A message then also holds the sampled tokens, so that `conversation_of` learns
what the model wrote. `reads_back` compares the two conversations.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import cast

from mujica_jax.errors import UserError
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Message, MessageRole, Turn
from mujica_jax.trajectories.messages import MESSAGE_TAGS

# The role of a conversation that comes from a file.
FROM_FILE = "file"


def conversation_of(
    tokenizer: Tokenizer, messages: Sequence[Message], *, role: str = FROM_FILE
) -> Conversation:
    """Return the conversation of these messages, in the tokens of the tokenizer's chat template.

    Messages after the last one of the assistant are left out, because nothing in them is learnt.
    Raises UserError if the template cannot write the conversation.
    """
    turns: list[Turn] = []
    context: list[Message] = []
    ends_turn = False
    for message in messages:
        if message.role != "assistant":
            context.append(message)
            continue

        # Everything between two turns of the model is one context turn.
        if turns:
            context_ids = tokenizer.continue_messages(context, stopped=ends_turn)
        else:
            context_ids = tokenizer.open_messages(context)
        text = "\n\n".join(message.content for message in context)
        turns.append(Turn(role="context", token_ids=tuple(context_ids), text=text))
        turns.append(_model_turn(tokenizer, message))
        context = []
        ends_turn = message.ends_turn
    return Conversation(role=role, turns=tuple(turns))


def _model_turn(tokenizer: Tokenizer, message: Message) -> Turn:
    """Return the turn of the model that a message of the assistant holds.

    The message may name the tokens that a model sampled. They are used if they spell its text in
    this tokenizer.
    """
    ids = _own_tokens(tokenizer, message.content)
    written_text = message.content.removeprefix(tokenizer.opened_thought)
    if message.token_ids and tokenizer.is_spelling(message.token_ids, written_text):
        ids = list(message.token_ids)
    if message.ends_turn:
        ids = [*ids, tokenizer.end_of_turn_id]
    return Turn(role="model", token_ids=tuple(ids), text=message.content, trained=message.trained)


def _own_tokens(tokenizer: Tokenizer, content: str) -> list[int]:
    """Return the tokens that the tokenizer itself chooses for a turn of the model."""
    # If the template opens the thought, the text continues behind the tag that opens it.
    opened_thought = tokenizer.opened_thought
    if opened_thought and content.startswith(opened_thought):
        return tokenizer.encode_model(content.removeprefix(opened_thought))
    return tokenizer.encode_turn(content)


def messages_of(tokenizer: Tokenizer, conversation: Conversation) -> list[Message]:
    """Return the messages of a conversation that an agent had with the model.

    The texts are exactly those that the model read and wrote. Turns that are not trained, such as
    those that a length limit cut, give messages that are not trained. Raises UserError if the
    tokens are no conversation of the tokenizer's chat template.
    """
    parts = [
        (role, list(turns))
        for role, turns in itertools.groupby(conversation.turns, key=lambda turn: turn.role)
    ]
    # Contexts with worked examples hold messages of the assistant too.
    context_ids: list[int] = []
    messages: list[Message] = []
    for role, turns in parts:
        ids = [token for turn in turns for token in turn.token_ids]
        if role == "model":
            messages.append(_assistant_message(tokenizer, turns, ids))
            context_ids += ids
            continue
        context_ids += ids
        read_messages = tokenizer.messages(context_ids)
        for fields in read_messages[len(messages) :]:
            messages.append(_context_message(cast(MessageRole, fields["role"]), fields["content"]))
    return messages


def _assistant_message(tokenizer: Tokenizer, turns: Sequence[Turn], ids: Sequence[int]) -> Message:
    """Return the message that consecutive turns of the model wrote."""
    ends_turn = bool(ids) and ids[-1] in tokenizer.stop_token_ids
    written_ids = tuple(ids[:-1] if ends_turn else ids)
    content = tokenizer.opened_thought + tokenizer.decode(written_ids)
    is_own = _own_tokens(tokenizer, content) == list(written_ids)
    return Message(
        role="assistant",
        content=content,
        trained=all(turn.trained for turn in turns),
        ends_turn=ends_turn,
        token_ids=() if is_own else written_ids,
    )


def _context_message(role: MessageRole, content: str) -> Message:
    """Return a message that the model read. A tag around the whole content becomes its tag."""
    for tag in MESSAGE_TAGS:
        opening = f"<{tag}>\n"
        closing = f"\n</{tag}>"
        if role == "user" and content.startswith(opening) and content.endswith(closing):
            inner = content.removeprefix(opening).removesuffix(closing)
            return Message(role=role, content=inner, tag=tag)
    return Message(role=role, content=content)


def reads_back(
    tokenizer: Tokenizer, conversation: Conversation, messages: Sequence[Message]
) -> bool:
    """Return whether these messages have the tokens and the loss mask of the conversation.

    Context after the last turn of the model does not count.
    """
    try:
        written = conversation_of(tokenizer, messages)
    except UserError:
        return False
    num_tokens = len(written.token_ids)
    last_turns = itertools.dropwhile(
        lambda turn: turn.role == "context", reversed(conversation.turns)
    )
    original = dataclasses.replace(conversation, turns=tuple(reversed(list(last_turns))))
    return (
        len(original.token_ids) == num_tokens
        and written.token_ids == original.token_ids
        and written.loss_mask == original.loss_mask
    )
