"""A chat template taken apart into the scaffold around the contents of messages, and a conversation
read back by it.

A conversation is scaffold and contents in turn. It is read from left to right, each content up to
the first place where the piece that must follow it stands. Every such piece holds a special token,
and no content can hold the special tokens of the scaffold, unless a model wrote them itself. Called
by `tokenizer`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from mujica_jax.errors import UserError
from mujica_jax.models.thoughts import opened_thought

# Stand-ins for message contents while the template is taken apart: letters only, so that no
# template filter changes them.
SYSTEM, USER, MODEL, NEXT_USER = "SystemStandIn", "UserStandIn", "ModelStandIn", "FollowUpStandIn"
# Added tokens are written as surrogates from here on, which no text holds.
FIRST_SURROGATE = 0xD800
# A thought that the template itself begins, or writes empty, before the model's words.
_TEMPLATE_THOUGHT = re.compile(r"\s*<think>\s*(</think>\s*)?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPieces:
    """The scaffold text around the contents of the messages."""

    before_system: (
        str | None
    )  # None where the template has no system role: the system text then opens the user message
    before_user: str
    # closes the user message and opens the model's, and its thought where the template does that
    before_model: str
    after_model: str  # closes the model's message and opens the next user's
    strips_contents: bool  # the template removes white space around contents
    opened_thought: str = (
        ""  # the end of `before_model` that opens a thought; empty where the template opens none
    )


def take_apart(render: Callable[[list[dict[str, str]]], str]) -> ChatPieces:
    """Render the template with stand-ins for the contents, and cut the text at them.

    Templates of thinking models may open a thought in the generation prompt and leave it out of
    earlier turns. A conversation here only grows, so every turn keeps the prompt that it was
    generated after, and its thought.
    """
    import jinja2

    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}
    model, next_user = (
        {"role": "assistant", "content": MODEL},
        {"role": "user", "content": NEXT_USER},
    )
    try:
        opening = [system, user]
        text = render(opening)
    except jinja2.TemplateError:
        text = ""
    if SYSTEM not in text:
        opening = [user]
        text = render(opening)
    before_system = text.partition(SYSTEM)[0] if SYSTEM in text else None
    before_user, _, before_model = text.partition(SYSTEM)[2 if SYSTEM in text else 0].partition(
        USER
    )
    after_opening = render([*opening, model, next_user])
    after_model, _, generation_prompt = after_opening.partition(MODEL)[2].partition(NEXT_USER)
    earlier_turn = after_opening.partition(MODEL)[0]
    if not _differ_by_thought_alone(earlier_turn, text) or generation_prompt != before_model:
        raise UserError(
            "the chat template writes earlier turns differently once later ones follow, so a "
            f"conversation cannot grow by appending tokens: {after_opening!r} does not begin with "
            f"{text + MODEL!r}; use another template"
        )
    padded = render([*opening[:-1], {"role": "user", "content": f" {USER} "}])
    return ChatPieces(
        before_system=before_system,
        before_user=before_user,
        before_model=before_model,
        after_model=after_model,
        strips_contents=f" {USER} " not in padded,
        opened_thought=opened_thought(before_model),
    )


def _differ_by_thought_alone(earlier_turn: str, generation_prompt: str) -> bool:
    """Return whether two prompts are one, but for a thought that the template begins or writes
    empty at their end."""
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
    """[{"role": "system" | "user" | "assistant", "content": text}, ...] of a conversation that ends
    where the model writes next.

    Added tokens stand in all of it as surrogates, which `spell` replaces by their text; with
    `turn_ends` a model may have ended its turn, as with the first token of `after_model`. Raises
    UserError where it is no such conversation."""
    for piece in (pieces.before_user, pieces.before_model):
        if pieces.before_system is not None and not any(
            0 <= ord(one) - FIRST_SURROGATE < 2048 for one in piece
        ):
            raise UserError(
                f"the chat template puts {piece!r} between two messages, where text could say the "
                "same: use a template that parts messages by special tokens"
            )
    opening = pieces.before_user if pieces.before_system is None else pieces.before_system
    if not conversation.startswith(opening):
        raise UserError(
            f"the conversation begins with {spell(conversation[:40])!r} and the chat template with "
            f"{spell(opening)!r}: use the tokenizer that rendered it"
        )
    rest, messages = conversation.removeprefix(opening), []

    def read(role: str, endings: Sequence[str]) -> None:
        """Takes the content before the first of these."""
        nonlocal rest
        found = re.search("|".join(map(re.escape, endings)), rest)
        if found is None:
            raise UserError(
                f"the conversation ends after {spell(rest)[-40:]!r} where the chat template goes "
                f"on with {spell(endings[0])!r}: send it up to the place where the model writes"
            )
        messages.append({"role": role, "content": spell(rest[: found.start()])})
        rest = rest[found.end() :]

    if pieces.before_system is not None:
        read("system", [pieces.before_user])
    read("user", [pieces.before_model])
    while rest:
        read(
            "assistant", [pieces.after_model, *(end + pieces.after_model[1:] for end in turn_ends)]
        )
        # The template opened the model's thought: the message has to hold its beginning.
        messages[-1]["content"] = spell(pieces.opened_thought) + messages[-1]["content"]
        read("user", [pieces.before_model])
    return messages
