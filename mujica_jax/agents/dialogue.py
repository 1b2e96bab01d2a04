"""The class `Dialogue`: a conversation under construction, in the tokens that the engine sees.

Token ids are only appended, never changed. The model's tokens therefore stay exactly as they were
sampled. Each turn is marked here as trained or not, at the moment when its tokens are added.
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
    """The beginning that all conversations of a role share."""

    # The system prompt.
    system: str
    # Worked examples as pairs (user message, model's reply). An example with several turns takes
    # several consecutive pairs. Its first pair asks the question.
    examples: tuple[tuple[str, str], ...] = ()


class Dialogue:
    """A conversation that grows by user messages and by turns of the model."""

    def __init__(
        self, tokenizer: Tokenizer, role: str, system: str, examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Begin an empty conversation.

        `examples` come before the first user message (see `Opening`). They are context and are not
        trained.
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
        """Whether the model's next token is inside of a thought.

        Either the chat template or an earlier part of the same turn has opened the thought.
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
        """Append a user message and the beginning of the model's turn.

        `text` may contain anything: special tokens and tags in it are neutralised. With `tag`,
        every message after the first one is enclosed in <tag> and </tag>.
        """
        if self._turns:
            ids = self._tokenizer.continue_conversation(text, stopped=self._stopped, tag=tag)
            if tag is not None:
                text = f"<{tag}>\n{text}\n</{tag}>"
        else:
            ids = self._tokenizer.open_conversation(self._system, text, self._examples)
        self._append(Turn(role="context", token_ids=tuple(ids), text=text))

    def add_model(self, completion: Completion, *, cut_at: str | None = None) -> str:
        """Append the model's completion and return its text, without the stop token.

        If the chat template opened a thought, the returned text begins with the tag of the thought.

        If a length limit ended the turn, it is marked as cut and not as trained. Otherwise maximum
        likelihood would teach the policy to be cut off. A policy gradient learns such a turn with
        the reward of its episode.

        If the stop string `cut_at` ended the turn, its tokens are left out. They begin a message
        that the model must not write itself.
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
        """Return how many tokens end before the last occurrence of the stop string.

        Thoughts may contain the string too, but only the last occurrence ended the turn.
        """
        pieces = [self._tokenizer.token_bytes(token) for token in ids]
        begin = b"".join(pieces).rfind(stop_string.encode())
        if begin < 0:
            return len(ids)
        token_ends = itertools.accumulate(map(len, pieces))
        return sum(end <= begin for end in token_ends)

    def fork(self) -> "Dialogue":
        """Return an independent copy. Turns that are appended to one do not change the other."""
        other = Dialogue(self._tokenizer, self._role, self._system, self._examples)
        other._turns = list(self._turns)
        other._stopped = self._stopped
        other.token_ids = list(self.token_ids)
        return other

    def record(self) -> Conversation:
        """Return the conversation so far."""
        return Conversation(role=self._role, turns=tuple(self._turns))

    def _append(self, turn: Turn) -> None:
        self._turns.append(turn)
        self.token_ids.extend(turn.token_ids)


def with_opening(
    conversation: Conversation, tokenizer: Tokenizer, opening: Opening
) -> Conversation:
    """Return the same conversation with another opening.

    The first turn holds the system prompt, the worked examples and the first user message. It is
    tokenised again with the new opening. All later turns keep their tokens. They lose their
    log-probabilities, which are only valid with the old opening.

    Trajectories that were sampled with worked examples are trained without them in this way
    (appendix D.3 of the Mujica-MyGO paper).
    """
    message = conversation.turns[0].text
    ids = tokenizer.open_conversation(opening.system, message, opening.examples)
    first_turn = Turn(role="context", token_ids=tuple(ids), text=message)
    later_turns = [dataclasses.replace(turn, logprobs=None) for turn in conversation.turns[1:]]
    return Conversation(role=conversation.role, turns=(first_turn, *later_turns))
