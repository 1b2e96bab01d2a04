"""A conversation under construction, token by token as the engine sees it.

Token ids are only ever appended: what the model generated stays exactly as it was sampled, and the mask is made here,
where the tokens are made.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from mujica_jax.inference.requests import Completion
from mujica_jax.models.thoughts import is_open_after
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, Turn


class Dialogue:
    def __init__(self, tokenizer: Tokenizer, role: str, system: str) -> None:
        self._tokenizer, self._role, self._system = tokenizer, role, system
        self._turns: list[Turn] = []
        self._stopped = False
        self.token_ids: list[int] = []

    @property
    def thought_open(self) -> bool:
        """Whether the model writes on inside of a thought. It does so in a turn whose thought the chat template opens,
        and in the rest of a turn that was written in parts."""
        context_turns = [place for place, turn in enumerate(self._turns) if turn.role == "context"]
        written = "".join(turn.text for turn in self._turns[context_turns[-1] + 1 :]) if context_turns else ""
        return is_open_after(written, was_open=bool(self._tokenizer.opened_thought))

    def add_user(self, text: str, *, tag: str | None = None) -> None:
        """Append a user message and the beginning of the model's turn. `text` is untrusted.

        With `tag` a later message stands between that tag and its end.
        """
        if self._turns:
            ids = self._tokenizer.continue_conversation(text, stopped=self._stopped, tag=tag)
            text = text if tag is None else f"<{tag}>\n{text}\n</{tag}>"
        else:
            ids = self._tokenizer.open_conversation(self._system, text)
        self._append(Turn(role="context", token_ids=tuple(ids), text=text))

    def add_model(self, completion: Completion, *, cut_at: str | None = None) -> str:
        """Append what the model generated and return its text, without the stop token. The text begins with the thought
        that the chat template opened, if it did.

        A turn that was cut off by a length limit carries no loss: it would teach the policy to be cut off. Where the
        stop string `cut_at` ended the turn, its tokens are left out: what it begins is not the model's to write."""
        begins_turn = not self._turns or self._turns[-1].role == "context"
        self._stopped = completion.finish_reason == "stop"
        ids, logprobs = completion.token_ids, completion.logprobs or None
        if cut_at is not None and completion.stop_string == cut_at:
            ids = ids[: self._tokens_before(ids, cut_at)]
            logprobs = logprobs and logprobs[: len(ids)]
        text = self._tokenizer.decode(ids[:-1] if self._stopped else ids)
        trained = completion.finish_reason != "length" and bool(ids)
        self._append(Turn(role="model", token_ids=ids, text=text, logprobs=logprobs, trained=trained))
        return self._tokenizer.opened_thought + text if begins_turn else text

    def _tokens_before(self, ids: Sequence[int], stop_string: str) -> int:
        """How many tokens end before the stop string begins that ended the turn: its last mention, for thoughts may
        mention it too."""
        pieces = [self._tokenizer.token_bytes(token) for token in ids]
        begins = b"".join(pieces).rfind(stop_string.encode())
        return len(ids) if begins < 0 else sum(end <= begins for end in itertools.accumulate(map(len, pieces)))

    def fork(self) -> "Dialogue":
        """The same so far; what is appended to either does not reach the other."""
        other = Dialogue(self._tokenizer, self._role, self._system)
        other._turns, other.token_ids, other._stopped = list(self._turns), list(self.token_ids), self._stopped
        return other

    def record(self) -> Conversation:
        return Conversation(role=self._role, turns=tuple(self._turns))

    def _append(self, turn: Turn) -> None:
        self._turns.append(turn)
        self.token_ids.extend(turn.token_ids)


def with_system(conversation: Conversation, tokenizer: Tokenizer, system: str) -> Conversation:
    """The same conversation under another system prompt: only the opening is rendered again, from the first message's
    text.

    Used for trajectories sampled with worked examples in the prompt, which are learnt without them (appendix D.3 of the
    paper). Their log-probabilities belonged to the old prompt and are dropped."""
    first, *rest = conversation.turns
    opening = Turn(role="context", token_ids=tuple(tokenizer.open_conversation(system, first.text)), text=first.text)
    turns = (dataclasses.replace(turn, logprobs=None) for turn in rest)
    return Conversation(role=conversation.role, turns=(opening, *turns))
