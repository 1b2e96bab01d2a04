"""A conversation under construction, token by token as the engine sees it.

Token ids are only ever appended: what the model generated stays exactly as it was sampled, and the
mask is made here, where the tokens are made.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from mujica_jax.inference.requests import Completion
from mujica_jax.models.thoughts import is_open_after
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """The beginning of all conversations of a role."""

    # The system prompt.
    system: str
    # Worked examples as chat turns, (user message, model's reply) in their order. An example of
    # several turns is several pairs; the first of them asks its question.
    examples: tuple[tuple[str, str], ...] = ()


class Dialogue:
    """A conversation that grows by user messages and turns of the model."""

    def __init__(
        self, tokenizer: Tokenizer, role: str, system: str, examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Begin an empty conversation.

        `examples` stand before the first user message (`Opening`). They are context, and carry no
        loss.
        """
        self._tokenizer = tokenizer
        self._role = role
        self._system = system
        self._examples = tuple(examples)
        self._turns: list[Turn] = []
        self._stopped = False
        self.token_ids: list[int] = []

    @property
    def thought_open(self) -> bool:
        """Whether the model writes on inside of a thought.

        It does so where the chat template opened the thought, or an earlier part of the same turn
        did.
        """
        texts_of_this_turn: list[str] = []
        for turn in reversed(self._turns):
            if turn.role == "context":
                break
            texts_of_this_turn.insert(0, turn.text)
        return is_open_after(
            "".join(texts_of_this_turn), was_open=bool(self._tokenizer.opened_thought)
        )

    def add_user(self, text: str, *, tag: str | None = None) -> None:
        """Append a user message and the beginning of the model's turn. `text` is untrusted.

        With `tag` a later message stands between that tag and its end.
        """
        if self._turns:
            ids = self._tokenizer.continue_conversation(text, stopped=self._stopped, tag=tag)
            if tag is not None:
                text = f"<{tag}>\n{text}\n</{tag}>"
        else:
            ids = self._tokenizer.open_conversation(self._system, text, self._examples)
        self._append(Turn(role="context", token_ids=tuple(ids), text=text))

    def add_model(self, completion: Completion, *, cut_at: str | None = None) -> str:
        """Append what the model generated and return its text, without the stop token.

        Where the chat template opened a thought, the text begins with its tag.

        A turn that a length limit cut off is marked as cut and not as trained. Maximum likelihood
        would teach the policy to be cut off. A policy gradient learns the turn with the reward of
        its episode.

        If the stop string `cut_at` ended the turn, its tokens are left out: what it begins is not
        the model's to write.
        """
        begins_turn = not self._turns or self._turns[-1].role == "context"
        self._stopped = completion.finish_reason == "stop"

        ids = completion.token_ids
        logprobs = completion.logprobs or None
        if cut_at is not None and completion.stop_string == cut_at:
            ids = ids[: self._tokens_before(ids, cut_at)]
            if logprobs is not None:
                logprobs = logprobs[: len(ids)]

        text = self._tokenizer.decode(ids[:-1] if self._stopped else ids)
        is_cut = completion.finish_reason == "length"
        turn = Turn(
            role="model",
            token_ids=ids,
            text=text,
            logprobs=logprobs,
            trained=bool(ids) and not is_cut,
            cut=bool(ids) and is_cut,
        )
        self._append(turn)
        return self._tokenizer.opened_thought + text if begins_turn else text

    def _tokens_before(self, ids: Sequence[int], stop_string: str) -> int:
        """Return how many tokens end before the last mention of the stop string.

        The last mention ended the turn: thoughts may mention the string too.
        """
        pieces = [self._tokenizer.token_bytes(token) for token in ids]
        begin = b"".join(pieces).rfind(stop_string.encode())
        if begin < 0:
            return len(ids)
        token_ends = itertools.accumulate(map(len, pieces))
        return sum(end <= begin for end in token_ends)

    def fork(self) -> "Dialogue":
        """Return a copy. What is appended to either does not reach the other."""
        other = Dialogue(self._tokenizer, self._role, self._system, self._examples)
        other._turns = list(self._turns)
        other._stopped = self._stopped
        other.token_ids = list(self.token_ids)
        return other

    def record(self) -> Conversation:
        return Conversation(role=self._role, turns=tuple(self._turns))

    def _append(self, turn: Turn) -> None:
        self._turns.append(turn)
        self.token_ids.extend(turn.token_ids)


def with_opening(
    conversation: Conversation, tokenizer: Tokenizer, opening: Opening
) -> Conversation:
    """Return the same conversation after another opening.

    The first turn holds the system prompt, the worked examples and the first user message. It is
    rendered again from the text of that message. All later turns keep their tokens. Trajectories
    that were sampled with worked examples are learnt without them this way (appendix D.3 of the
    paper). Their log-probabilities belonged to the old opening and are dropped.
    """
    message = conversation.turns[0].text
    ids = tokenizer.open_conversation(opening.system, message, opening.examples)
    first_turn = Turn(role="context", token_ids=tuple(ids), text=message)
    later_turns = [dataclasses.replace(turn, logprobs=None) for turn in conversation.turns[1:]]
    return Conversation(role=conversation.role, turns=(first_turn, *later_turns))
