"""Asking a teacher for one step until its reply is as it must be, and counting what it took."""

import collections
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.inference.requests import Completion, ReplyError, SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason

REFUSED = "refused_"  # before a reason: replies that were not accepted
RETRIES, TEACHER_TOKENS, TEACHER_PROMPT_TOKENS = (
    "retries",
    "teacher_tokens",
    "teacher_prompt_tokens",
)

Read = TypeVar("Read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Who writes. Any `Generator` is one, as the policy `EnginePolicy(generator)`."""

    policy: Policy | None  # None: the policy that plays the run's episodes
    tokenizer: Tokenizer  # its own, which may differ from that of the policy that learns
    plans: bool = True  # False: it is asked for no plan, since it never saw one
    max_tokens: int | None = None  # of a prompt and its turn, where more cannot be asked


class Refused(Exception):
    """A reply is not as it must be, for a reason of one word."""


class Lesson:
    """One episode's questions to a teacher."""

    def __init__(self, teacher: Teacher, policy: Policy, attempt: Attempt, max_tries: int) -> None:
        self._teacher, self._policy, self._attempt, self._max_tries = (
            teacher,
            policy,
            attempt,
            max_tries,
        )
        self.counts: dict[str, float] = collections.defaultdict(float)
        self.dialogues: list[Dialogue] = []

    def open(self, role: str, prompt: Opening, message: str) -> Dialogue:
        """Open a conversation with the teacher. `message` is untrusted, `prompt` is ours."""
        dialogue = Dialogue(self._teacher.tokenizer, role, prompt.system, prompt.examples)
        dialogue.add_user(message)
        self.dialogues.append(dialogue)
        return dialogue

    def accept(self, dialogue: Dialogue, text: str) -> None:
        """Append the accepted text of a reply to the conversation, as if the teacher had written
        just that."""
        dialogue.add_model(as_completion(self._teacher.tokenizer, text))

    async def ask(
        self,
        step: str,
        dialogue: Dialogue,
        params: SamplingParams,
        state: object,
        read: Callable[[str], Read],
    ) -> Read:
        """What `read` makes of the reply, once it accepts one; each try has a seed of its own.
        Raises Refused with the last reason."""
        limit, reason = self._teacher.max_tokens, ""
        params = dataclasses.replace(params, thought_open=dialogue.thought_open)
        if limit is not None and len(dialogue.token_ids) + params.max_new_tokens > limit:
            raise Refused("teacher_prompt_length")
        for number in range(self._max_tries):
            asked = dataclasses.replace(
                params, seed=self._attempt.turn_seed(f"{params.seed}/{step}/{number}")
            )
            self.counts[RETRIES] += number > 0
            self.counts[TEACHER_PROMPT_TOKENS] += len(dialogue.token_ids)
            try:
                completion = await self._policy.generate(
                    dialogue.token_ids, asked, state=state, continues=False
                )
                self.counts[TEACHER_TOKENS] += len(completion.token_ids)
                if completion.finish_reason == "length":
                    raise Refused(StopReason.TURN_LENGTH.value)
                ids = (
                    completion.token_ids[:-1]
                    if completion.finish_reason == "stop"
                    else completion.token_ids
                )
                return read(
                    self._teacher.tokenizer.opened_thought + self._teacher.tokenizer.decode(ids)
                )
            except ReplyError:
                reason = "no_reply"
            except Refused as refused:
                reason = str(refused)
            self.counts[f"{REFUSED}{reason}"] += 1
        raise Refused(reason)


def as_completion(tokenizer: Tokenizer, text: str) -> Completion:
    """A text as a model would have generated it, to its stop token."""
    ids = (*tokenizer.encode_turn(text), tokenizer.stop_token_ids[0])
    return Completion(token_ids=ids, logprobs=None, finish_reason="stop")
