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
    """What the conversations of a role begin with."""

    system: str  # the system prompt
    # Worked examples as chat turns, (user message, model's reply) in their order. An example of
    # several turns is several pairs; the first of them asks its question.
    examples: tuple[tuple[str, str], ...] = ()


class Dialogue:
    def __init__(
        self, tokenizer: Tokenizer, role: str, system: str, examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        """`examples` stand before the first user message (`Opening`). They are context, and carry
        no loss."""
        self._tokenizer, self._role, self._system = tokenizer, role, system
        self._examples = tuple(examples)
        self._turns: list[Turn] = []
        self._stopped = False
        self.token_ids: list[int] = []

    @property
    def thought_open(self) -> bool:
        """Whether the model writes on inside of a thought.

        It does so where the chat template opened the thought, or an earlier part of the same turn
        did."""
        context_turns = [place for place, turn in enumerate(self._turns) if turn.role == "context"]
        written = (
            "".join(turn.text for turn in self._turns[context_turns[-1] + 1 :])
            if context_turns
            else ""
        )
        return is_open_after(written, was_open=bool(self._tokenizer.opened_thought))

    def add_user(self, text: str, *, tag: str | None = None) -> None:
        """Append a user message and the beginning of the model's turn. `text` is untrusted.

        With `tag` a later message stands between that tag and its end.
        """
        if self._turns:
            ids = self._tokenizer.continue_conversation(text, stopped=self._stopped, tag=tag)
            text = text if tag is None else f"<{tag}>\n{text}\n</{tag}>"
        else:
            ids = self._tokenizer.open_conversation(self._system, text, self._examples)
        self._append(Turn(role="context", token_ids=tuple(ids), text=text))

    def add_model(self, completion: Completion, *, cut_at: str | None = None) -> str:
        """Append what the model generated and return its text, without the stop token.

        Where the chat template opened a thought, the text begins with its tag.

        A turn that a length limit cut off is marked as cut and not as trained: maximum likelihood
        would teach the policy to be cut off, and a policy gradient learns the turn with the reward
        of its episode. Where the stop string `cut_at` ended the turn, its tokens are left out: what
        it begins is not the model's to write."""
        begins_turn = not self._turns or self._turns[-1].role == "context"
        self._stopped = completion.finish_reason == "stop"
        ids, logprobs = completion.token_ids, completion.logprobs or None
        if cut_at is not None and completion.stop_string == cut_at:
            ids = ids[: self._tokens_before(ids, cut_at)]
            logprobs = logprobs and logprobs[: len(ids)]
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
        """Return how many tokens end before the stop string begins that ended the turn.

        That is its last mention: thoughts may mention it too."""
        pieces = [self._tokenizer.token_bytes(token) for token in ids]
        begins = b"".join(pieces).rfind(stop_string.encode())
        return (
            len(ids)
            if begins < 0
            else sum(end <= begins for end in itertools.accumulate(map(len, pieces)))
        )

    def fork(self) -> "Dialogue":
        """The same so far; what is appended to either does not reach the other."""
        other = Dialogue(self._tokenizer, self._role, self._system, self._examples)
        other._turns, other.token_ids, other._stopped = (
            list(self._turns),
            list(self.token_ids),
            self._stopped,
        )
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
    paper). Their log-probabilities belonged to the old opening and are dropped."""
    first, *later_turns = conversation.turns
    ids = tokenizer.open_conversation(opening.system, first.text, opening.examples)
    first = Turn(role="context", token_ids=tuple(ids), text=first.text)
    later_turns = [dataclasses.replace(turn, logprobs=None) for turn in later_turns]
    return Conversation(role=conversation.role, turns=(first, *later_turns))
