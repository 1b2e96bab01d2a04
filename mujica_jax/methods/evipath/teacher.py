"""Ask a teacher for one step until its reply is accepted, and count tries and tokens."""

import collections
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue, Opening
from mujica_jax.inference.requests import Completion, ReplyError, SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import StopReason

# The name of a count: replies that were refused for the reason behind it.
REFUSED = "refused_"
RETRIES = "retries"
TEACHER_TOKENS = "teacher_tokens"
TEACHER_PROMPT_TOKENS = "teacher_prompt_tokens"

Parsed = TypeVar("Parsed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """The model that writes. Any `Generator` is one, as the policy `EnginePolicy(generator)`."""

    # None says that the policy of the run's episodes is the teacher.
    policy: Policy | None
    # The teacher's own tokenizer. It may differ from that of the policy that learns.
    tokenizer: Tokenizer
    # Whether it is asked for a plan. A teacher that never saw one is not.
    plans: bool = True
    # The most tokens of a prompt and its turn, where the teacher has such a limit.
    max_tokens: int | None = None


class RefusedReplyError(Exception):
    """A reply is not accepted. The argument is the reason, in one word."""


class Lesson:
    """One episode's questions to a teacher."""

    def __init__(self, teacher: Teacher, policy: Policy, attempt: Attempt, max_tries: int) -> None:
        self._teacher = teacher
        self._policy = policy
        self._attempt = attempt
        self._max_tries = max_tries
        self.counts: dict[str, float] = collections.defaultdict(float)
        self.dialogues: list[Dialogue] = []

    def open(self, role: str, prompt: Opening, message: str) -> Dialogue:
        """Open a conversation with the teacher. `message` is untrusted, `prompt` is ours."""
        dialogue = Dialogue(self._teacher.tokenizer, role, prompt.system, prompt.examples)
        dialogue.add_user(message)
        self.dialogues.append(dialogue)
        return dialogue

    def accept(self, dialogue: Dialogue, text: str) -> None:
        """Append an accepted reply to the conversation.

        It is recorded as if the teacher had written just this text.
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
        """Ask until `parse` accepts a reply, and return what it made of the reply.

        `parse` refuses a reply by raising RefusedReplyError. Each try has a seed of its own. After
        the last try, RefusedReplyError is raised with the last reason.
        """
        limit = self._teacher.max_tokens
        params = dataclasses.replace(params, thought_open=dialogue.thought_open)
        if limit is not None and len(dialogue.token_ids) + params.max_new_tokens > limit:
            raise RefusedReplyError("teacher_prompt_length")

        reason = ""
        for try_number in range(self._max_tries):
            # The first try adds zero, so that the count is in every record.
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
        """Return one reply as text. Raises ReplyError where none came."""
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
    """Return a text as a model would have generated it, to its stop token."""
    ids = (*tokenizer.encode_turn(text), tokenizer.stop_token_ids[0])
    return Completion(token_ids=ids, logprobs=None, finish_reason="stop")
