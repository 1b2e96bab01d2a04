"""Take a chat template apart, and read a conversation back with its pieces.

A conversation alternates between scaffold (the template's own text) and contents (of messages). It
is read from left to right: each content ends where the next piece of scaffold begins. Every such
piece holds a special token. Contents cannot hold the scaffold's special tokens, unless a model
generated them. `tokenizer` calls this module.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import opened_thought

# Stand-ins for message contents while the template is taken apart: letters only, so that no
# template filter changes them.
SYSTEM = "SystemStandIn"
USER = "UserStandIn"
MODEL = "ModelStandIn"
NEXT_USER = "FollowUpStandIn"
# Added tokens are written as surrogates from here on, which no text holds.
FIRST_SURROGATE = 0xD800
NUM_SURROGATES = 2048
# A thought that the template itself begins, or writes empty, before the model's words.
_TEMPLATE_THOUGHT = re.compile(r"\s*<think>\s*(</think>\s*)?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPieces:
    """The scaffold text around the contents of the messages."""

    # None where the template has no system role: the system text then opens the user message.
    before_system: str | None
    before_user: str
    # Closes the user message and opens the model's, and its thought where the template does that.
    before_model: str
    # Closes the model's message and opens the next user's.
    after_model: str
    # Whether the template removes white space around contents.
    strips_contents: bool
    # The end of `before_model` that opens a thought; empty where the template opens none.
    opened_thought: str = ""


def take_apart(render: Callable[[list[dict[str, str]]], str]) -> ChatPieces:
    """Render the template with stand-ins for the contents, and cut the text at them.

    Templates of thinking models may open a thought in the generation prompt and leave it out of
    earlier turns. Here a conversation only grows. So every turn keeps the prompt that it was
    generated after, and its thought. Raises UserError for a template that changes earlier turns in
    another way.
    """
    import jinja2

    system = {"role": "system", "content": SYSTEM}
    user = {"role": "user", "content": USER}
    model = {"role": "assistant", "content": MODEL}
    next_user = {"role": "user", "content": NEXT_USER}

    # The first generation prompt, without the system message where the template has no such role.
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

    # The second generation prompt, after a turn of the model.
    after_opening = render([*opening, model, next_user])
    earlier_turn, _, after_turn = after_opening.partition(MODEL)
    after_model, _, generation_prompt = after_turn.partition(NEXT_USER)
    if not _differ_by_thought_alone(earlier_turn, text) or generation_prompt != before_model:
        raise UserError(
            "the chat template writes earlier turns differently once later ones follow, so a "
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


def _differ_by_thought_alone(earlier_turn: str, generation_prompt: str) -> bool:
    """Return whether two prompts are the same, apart from a thought at their end.

    Only a thought that the template itself begins or writes empty counts.
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
    """Return the messages of a conversation that ends where the model writes next.

    A message is {"role": "system", "user" or "assistant", "content": text}. In `conversation`, in
    `pieces` and in `turn_ends`, every added token is one surrogate. `spell` replaces the surrogates
    by the tokens' text. A model may have ended its turn with any of `turn_ends`, or with the first
    token of `after_model`. Raises UserError if the text is no such conversation.
    """
    _check_separators(pieces)
    opening = pieces.before_user if pieces.before_system is None else pieces.before_system
    if not conversation.startswith(opening):
        raise UserError(
            f"the conversation begins with {spell(conversation[:40])!r} and the chat template with "
            f"{spell(opening)!r}: use the tokenizer that rendered it"
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
        # If the template opened the model's thought, the message has to hold its beginning.
        model_text = spell(pieces.opened_thought) + reader.read_until(model_endings)
        messages.append({"role": "assistant", "content": model_text})
        user_text = reader.read_until([pieces.before_model])
        messages.append({"role": "user", "content": user_text})
    return messages


def _check_separators(pieces: ChatPieces) -> None:
    """Check that special tokens, written as surrogates, separate the messages.

    Raises UserError.
    """
    if pieces.before_system is None:
        return
    for piece in (pieces.before_user, pieces.before_model):
        places = [ord(character) - FIRST_SURROGATE for character in piece]
        if not any(0 <= place < NUM_SURROGATES for place in places):
            raise UserError(
                f"the chat template puts {piece!r} between two messages, where text could say the "
                "same: use a template that parts messages by special tokens"
            )


class _ConversationReader:
    """Reads a conversation from left to right."""

    def __init__(self, conversation: str, spell: Callable[[str], str]) -> None:
        self.rest = conversation
        self._spell = spell

    def read_until(self, endings: Sequence[str]) -> str:
        """Return the content before the first of these endings, and go on behind that."""
        ending = re.search("|".join(map(re.escape, endings)), self.rest)
        if ending is None:
            raise UserError(
                f"the conversation ends after {self._spell(self.rest)[-40:]!r} where the chat "
                f"template goes on with {self._spell(endings[0])!r}: send it up to the place where "
                "the model writes"
            )
        content = self._spell(self.rest[: ending.start()])
        self.rest = self.rest[ending.end() :]
        return content
