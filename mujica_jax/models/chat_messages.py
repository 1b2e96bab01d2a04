"""The inverse of rendering a conversation: from its tokens back to the messages of a chat API.

A conversation is scaffold and contents in turn, and the scaffold is known: the pieces of the chat template
(`tokenizer.ChatPieces`). So it is read from left to right, each content up to the first place where the piece that must
follow it stands. Every such piece holds a special token, and no content can hold the special tokens of the scaffold,
unless a model wrote them itself.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from mujica_jax.errors import UserError

Part = int | str  # an added token of the tokenizer, or the text between two of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaffold:
    """The pieces of a chat template, cut at the tokenizer's added tokens."""

    before_system: Sequence[Part] | None  # None where the template has no system role
    before_user: Sequence[Part]
    before_model: Sequence[Part]
    after_model: Sequence[Part]
    turn_ends: Sequence[int]  # tokens by which a model may have ended its turn; the first part of after_model is one


def read_messages(parts: Sequence[Part], scaffold: Scaffold, spell: Callable[[int], str]) -> list[dict[str, str]]:
    """[{"role": "system" | "user" | "assistant", "content": text}, ...] of a conversation that ends where the model
    writes next.

    `spell` gives the text of an added token that stands in a content. Raises UserError where the tokens are no such
    conversation.
    """
    for name in ("before_user", "before_model"):
        piece = getattr(scaffold, name)
        if scaffold.before_system is not None and not any(isinstance(part, int) for part in piece):
            raise UserError(
                f"the chat template puts {''.join(map(str, piece))!r} between two messages, where text could say the "
                "same: use a template that parts messages by special tokens"
            )
    reader = _Reader(parts, spell)
    messages = []
    if scaffold.before_system is None:
        reader.skip(scaffold.before_user)
    else:
        reader.skip(scaffold.before_system)
        messages.append({"role": "system", "content": reader.content([scaffold.before_user])})
    messages.append({"role": "user", "content": reader.content([scaffold.before_model])})
    endings = [
        [end, *scaffold.after_model[1:]] for end in dict.fromkeys([scaffold.after_model[0], *scaffold.turn_ends])
    ]
    while reader.parts:
        messages.append({"role": "assistant", "content": reader.content(endings)})
        messages.append({"role": "user", "content": reader.content([scaffold.before_model])})
    return messages


class _Reader:
    """What is left of a conversation."""

    def __init__(self, parts: Iterable[Part], spell: Callable[[int], str]) -> None:
        self.parts = list(parts)
        self._spell = spell

    def skip(self, piece: Sequence[Part]) -> None:
        rest = _after(self.parts, piece)
        if rest is None:
            raise UserError(
                f"the conversation begins with {self.parts[:4]} and the chat template with {list(piece)}: use the "
                "tokenizer that rendered it"
            )
        self.parts = rest

    def content(self, pieces: Sequence[Sequence[Part]]) -> str:
        """Text up to the first place where one of `pieces` stands; what follows that piece is left."""
        said = ""
        for place, part in enumerate(self.parts):
            for piece in pieces if isinstance(part, int) else ():
                lead = piece[0] if isinstance(piece[0], str) else ""
                rest = _after(self.parts[place:], piece[1:] if lead else piece)
                if rest is not None and said.endswith(lead):
                    self.parts = rest
                    return said.removesuffix(lead)
            said += self._spell(part) if isinstance(part, int) else part
        raise UserError(
            f"the conversation ends after {said[-40:]!r} where the chat template goes on with {list(pieces[0])}: send "
            "it up to the place where the model writes"
        )


def _after(parts: Sequence[Part], piece: Sequence[Part]) -> list[Part] | None:
    """What follows `piece` at the beginning of `parts`; None where something else stands there. Its last text may go
    on."""
    if len(parts) < len(piece) or any(left != right for left, right in zip(parts, piece[:-1], strict=False)):
        return None
    rest = list(parts[len(piece) :])
    if not piece or parts[len(piece) - 1] == piece[-1]:
        return rest
    last, wanted = parts[len(piece) - 1], piece[-1]
    if isinstance(last, str) and isinstance(wanted, str) and last.startswith(wanted):
        return [last[len(wanted) :], *rest]
    return None
