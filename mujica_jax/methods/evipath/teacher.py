"""Ask a teacher for each step of a trajectory, until it gives a reply that is accepted.

Tries, refused replies and tokens are counted.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.inference.requests import Completion, ReplyError, SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason

# The beginning of a count's name. The reason for which replies were refused follows it.
REFUSED = "refused_"
RETRIES = "retries"
TEACHER_TOKENS = "teacher_tokens"
TEACHER_PROMPT_TOKENS = "teacher_prompt_tokens"

Parsed = TypeVar("Parsed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """The model that writes trajectories.

    Any `Generator` can be a teacher, as the policy `EnginePolicy(generator)`.

    Attributes:
        policy: The teacher. None: the policy that plays the run's episodes is the teacher.
        tokenizer: The teacher's tokenizer. It may differ from the tokenizer of the trained policy.
        plans: Whether the teacher is asked for a plan. A teacher that has never seen a plan is not.
        max_tokens: The largest number of tokens of a prompt together with its turn. None: there is
            no such limit.
    """

    policy: Policy | None
    tokenizer: Tokenizer
    plans: bool = True
    max_tokens: int | None = None


class RefusedReplyError(Exception):
    """A reply of the teacher is not accepted. The argument is the reason, in one word."""


class Lesson:
    """All conversations with the teacher during one episode."""

    def __init__(self, teacher: Teacher, policy: Policy, attempt: Attempt, max_tries: int) -> None:
        self._teacher = teacher
        self._policy = policy
        self._attempt = attempt
        self._max_tries = max_tries
        self.counts: dict[str, float] = collections.defaultdict(float)
        self.dialogues: list[Dialogue] = []

    def open(self, role: str, prompt: Opening, message: str) -> Dialogue:
        """Open a conversation with the teacher.

        `prompt` is our own text. `message` may contain text from outside, so it is not trusted.
        """
        dialogue = Dialogue(self._teacher.tokenizer, role, prompt.system, prompt.examples)
        dialogue.add_user(message)
        self.dialogues.append(dialogue)
        return dialogue

    def accept(self, dialogue: Dialogue, text: str) -> None:
        """Append an accepted reply to the conversation.

        The conversation records `text` as the teacher's turn.
        """
        dialogue.add_model(as_completion(self._teacher.tokenizer, text))

    async def ask(
        self,
        step: str,
        dialogue: Dialogue,
        params: SamplingParams,
        state: object,
        parse: Callable[[str], Parsed],
    ) -> Parsed:
        """Ask the teacher until `parse` accepts a reply, and return the result of `parse`.

        `parse` refuses a reply by raising RefusedReplyError. Each try has its own seed. If the last
        try is refused too, RefusedReplyError is raised with the reason of that try.
        """
        limit = self._teacher.max_tokens
        params = dataclasses.replace(params, thought_open=dialogue.thought_open)
        if limit is not None and len(dialogue.token_ids) + params.max_new_tokens > limit:
            raise RefusedReplyError("teacher_prompt_length")

        reason = ""
        for try_number in range(self._max_tries):
            # Add zero for the first try, so that every record contains this count.
            self.counts[RETRIES] += float(try_number > 0)
            seed = self._attempt.turn_seed(f"{params.seed}/{step}/{try_number}")
            try:
                reply = await self._reply(dialogue, dataclasses.replace(params, seed=seed), state)
                return parse(reply)
            except ReplyError:
                reason = "no_reply"
            except RefusedReplyError as refusal:
                reason = str(refusal)
            self.counts[f"{REFUSED}{reason}"] += 1
        raise RefusedReplyError(reason)

    async def _reply(self, dialogue: Dialogue, params: SamplingParams, state: object) -> str:
        """Return one reply of the teacher as text.

        Raises ReplyError if the teacher gives no reply, and RefusedReplyError if it is cut off.
        """
        self.counts[TEACHER_PROMPT_TOKENS] += len(dialogue.token_ids)
        completion = await self._policy.generate(
            dialogue.token_ids, params, state=state, continues=False
        )
        self.counts[TEACHER_TOKENS] += len(completion.token_ids)
        if completion.finish_reason == "length":
            raise RefusedReplyError(StopReason.TURN_LENGTH.value)

        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        tokenizer = self._teacher.tokenizer
        return tokenizer.opened_thought + tokenizer.decode(ids)


def as_completion(tokenizer: Tokenizer, text: str) -> Completion:
    """Return a text as if a model had generated it, with the stop token at its end."""
    ids = (*tokenizer.encode_turn(text), tokenizer.stop_token_ids[0])
    return Completion(token_ids=ids, logprobs=None, finish_reason="stop")
