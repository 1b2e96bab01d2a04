"""Take a chat template apart, and read the messages of a conversation with its pieces.

A conversation alternates between pieces of scaffold, which are the template's own text, and the
contents of messages:

    before_system SYSTEM before_user USER before_model MODEL after_model USER before_model ...

`take_apart` finds the pieces of scaffold. `read_messages` reads a conversation from left to right:
each content ends where the next piece of scaffold begins. This is unambiguous, because every piece
has a special token, and contents have no special tokens of the scaffold unless a model generated
them. `tokenizer` calls this module.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import opened_thought

# Placeholders for the contents of messages while the template is taken apart. They have only
# letters, so that no filter of a template changes them.
SYSTEM = "SystemStandIn"
USER = "UserStandIn"
MODEL = "ModelStandIn"
NEXT_USER = "FollowUpStandIn"
# A conversation is read as text in which each added token is one surrogate character, from this
# code point on. No valid text has surrogates.
FIRST_SURROGATE = 0xD800
NUM_SURROGATES = 2048
# A thought that the template itself opens, or an empty thought that it writes, before the words of
# the model.
_TEMPLATE_THOUGHT = re.compile(r"\s*<think>\s*(</think>\s*)?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPieces:
    """The scaffold text around the contents of the messages."""

    # Opens the system message. None if the template has no system role. The system text then comes
    # at the beginning of the first user message.
    before_system: str | None
    # Closes the system message and opens the first user message.
    before_user: str
    # Closes a user message and opens the model's message. Some templates also open a thought here.
    before_model: str
    # Closes the model's message and opens the next user message.
    after_model: str
    # Whether the template removes white space around contents.
    strips_contents: bool
    # The end of `before_model` that opens a thought. Empty if the template opens no thought.
    opened_thought: str = ""


def take_apart(render: Callable[[list[dict[str, str]]], str]) -> ChatPieces:
    """Return the pieces of a chat template.

    `render` renders messages with the template, up to the generation prompt. The function renders
    placeholders as contents and cuts the text at the placeholders.

    Templates of thinking models may open a thought in the generation prompt, and render earlier
    turns without their thoughts. Here a conversation only grows by tokens at its end. So each turn
    keeps its thought, and the generation prompt before it. Raises UserError for a template that
    changes earlier turns in any other way.
    """
    import jinja2

    system = {"role": "system", "content": SYSTEM}
    user = {"role": "user", "content": USER}
    model = {"role": "assistant", "content": MODEL}
    next_user = {"role": "user", "content": NEXT_USER}

    # Render the first generation prompt. Leave the system message out if the template has no system
    # role.
    try:
        opening = [system, user]
        text = render(opening)
    except jinja2.TemplateError:
        text = ""
    if SYSTEM not in text:
        opening = [user]
        text = render(opening)
    before_system = None
    after_system = text
    if SYSTEM in text:
        before_system, _, after_system = text.partition(SYSTEM)
    before_user, _, before_model = after_system.partition(USER)

    # Render the second generation prompt, after a turn of the model.
    after_opening = render([*opening, model, next_user])
    earlier_turn, _, after_turn = after_opening.partition(MODEL)
    after_model, _, generation_prompt = after_turn.partition(NEXT_USER)
    if not _differ_by_thought_alone(earlier_turn, text) or generation_prompt != before_model:
        raise UserError(
            "the chat template renders a turn differently when later turns follow, so a "
            f"conversation cannot grow by appending tokens: {after_opening!r} does not begin with "
            f"{text + MODEL!r}; use another template"
        )
    padded_user = {"role": "user", "content": f" {USER} "}
    padded_text = render([*opening[:-1], padded_user])
    return ChatPieces(
        before_system=before_system,
        before_user=before_user,
        before_model=before_model,
        after_model=after_model,
        strips_contents=f" {USER} " not in padded_text,
        opened_thought=opened_thought(before_model),
    )


def scaffold_between(
    render: Callable[[list[dict[str, str]]], str], roles: Sequence[str], *, opens: bool
) -> list[str] | None:
    """Return the scaffold before each of these messages, and the scaffold behind the last one.

    `roles` are the roles of consecutive messages that the model does not write. The last piece ends
    with the generation prompt. With `opens` the messages begin the conversation. Otherwise they
    follow a turn of the model, and the first piece closes that turn.

    Returns None if the template does not write messages with these roles in this order.
    """
    import jinja2

    contents = [f"Message{_in_letters(number)}StandIn" for number in range(len(roles))]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    if not opens:
        opening = [{"role": "user", "content": USER}, {"role": "assistant", "content": MODEL}]
        messages = [*opening, *messages]
    try:
        rest = render(messages)
    except jinja2.TemplateError:
        return None
    if not opens:
        _, _, rest = rest.partition(MODEL)

    pieces: list[str] = []
    for content in contents:
        piece, placeholder, rest = rest.partition(content)
        if not placeholder:
            return None
        pieces.append(piece)
    return [*pieces, rest]


def _in_letters(number: int) -> str:
    """Return a number as a word of capital letters, with A for the digit 0 and J for 9.

    Placeholders have only letters, so that no filter of a template changes them.
    """
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


def _differ_by_thought_alone(earlier_turn: str, generation_prompt: str) -> bool:
    """Return whether two prompts are the same, except for a thought at their end.

    This thought may be one that the template opens, or an empty one.
    """
    if earlier_turn == generation_prompt:
        return True
    ends = [_TEMPLATE_THOUGHT.search(prompt) for prompt in (earlier_turn, generation_prompt)]
    if not any(ends):
        return False
    return (
        _TEMPLATE_THOUGHT.sub("", earlier_turn).rstrip()
        == _TEMPLATE_THOUGHT.sub("", generation_prompt).rstrip()
    )


def read_messages(
    conversation: str, pieces: ChatPieces, turn_ends: Sequence[str], spell: Callable[[str], str]
) -> list[dict[str, str]]:
    """Return the messages of a conversation that ends with a generation prompt.

    A message is {"role": role, "content": text}, and the role is "system", "user" or "assistant".
    In `conversation`, `pieces` and `turn_ends`, every added token is one surrogate character.
    `spell` replaces surrogates by the texts of their tokens. `turn_ends` are the tokens with which
    a model may have ended its turn, besides the first token of `after_model`.

    Raises UserError if the text is no such conversation.
    """
    _check_separators(pieces)
    opening = pieces.before_user if pieces.before_system is None else pieces.before_system
    if not conversation.startswith(opening):
        raise UserError(
            f"the conversation begins with {spell(conversation[:40])!r} and the chat template with "
            f"{spell(opening)!r}: use the tokenizer that rendered the conversation"
        )
    reader = _ConversationReader(conversation.removeprefix(opening), spell)
    messages: list[dict[str, str]] = []

    if pieces.before_system is not None:
        system_text = reader.read_until([pieces.before_user])
        messages.append({"role": "system", "content": system_text})
    user_text = reader.read_until([pieces.before_model])
    messages.append({"role": "user", "content": user_text})

    model_endings = [pieces.after_model]
    for turn_end in turn_ends:
        model_endings.append(turn_end + pieces.after_model[1:])
    while reader.rest:
        # If the template opens the model's thought, the message gets the tag that opens it.
        model_text = spell(pieces.opened_thought) + reader.read_until(model_endings)
        messages.append({"role": "assistant", "content": model_text})
        user_text = reader.read_until([pieces.before_model])
        messages.append({"role": "user", "content": user_text})
    return messages


def _check_separators(pieces: ChatPieces) -> None:
    """Check that a special token, written as a surrogate, separates the messages.

    Raises UserError if only ordinary text separates them.
    """
    if pieces.before_system is None:
        return
    for piece in (pieces.before_user, pieces.before_model):
        places = [ord(character) - FIRST_SURROGATE for character in piece]
        if not any(0 <= place < NUM_SURROGATES for place in places):
            raise UserError(
                f"the chat template puts {piece!r} between two messages, and a message could hold "
                "the same text: use a template that separates messages by special tokens"
            )


class _ConversationReader:
    """A reader that goes through a conversation from left to right."""

    def __init__(self, conversation: str, spell: Callable[[str], str]) -> None:
        self.rest = conversation
        self._spell = spell

    def read_until(self, endings: Sequence[str]) -> str:
        """Return the content before the first of these endings, and move behind the ending.

        Raises UserError if none of the endings follows.
        """
        ending = re.search("|".join(map(re.escape, endings)), self.rest)
        if ending is None:
            raise UserError(
                f"the conversation ends after {self._spell(self.rest)[-40:]!r}, and the chat "
                f"template continues with {self._spell(endings[0])!r}: send the conversation up to "
                "the end of the generation prompt"
            )
        content = self._spell(self.rest[: ending.start()])
        self.rest = self.rest[ending.end() :]
        return content
