"""The base class `Episode`, with the steps that all agents share.

It lets the policy write a turn within the length limits. It searches, and shortens the results to
the limit of an observation. At the end it makes the record of the episode.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from mujica_jax.agents import protocol
from mujica_jax.agents.agent import Attempt, Policy
from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.config.agents import AgentLimits
from mujica_jax.inference.requests import Completion, SamplingParams, UnusableReplyError
from mujica_jax.models.tokenizer import Tokenizer, neutralise
from mujica_jax.records import Conversation, Search, StopReason, Trajectory
from mujica_jax.tasks.task import Environment, Material

# A tokenizer decodes to this character if a cut leaves only some bytes of a character.
HALF_CHARACTER = "\ufffd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """The outcome of one turn of the model."""

    text: str
    # None for a complete turn. Otherwise the limit that ended it, or the fault of the endpoint's
    # reply.
    cut: StopReason | None = None
    # None if the conversation had no room for another token, or the endpoint gave no usable reply.
    completion: Completion | None = None


class Episode:
    """The state of one episode, and the steps from which an agent builds it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: AgentLimits,
        attempt: Attempt,
        environment: Environment,
        policy: Policy,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.attempt = attempt
        self.environment = environment
        self.policy = policy
        self.searches: list[Search] = []
        self._start_time = time.monotonic()

    async def write(
        self,
        dialogue: Dialogue,
        place: str,
        *,
        state: object,
        stop_strings: tuple[str, ...],
        continues: bool = False,
        cut_at: str | None = None,
        policy: Policy | None = None,
    ) -> Written:
        """Let a policy write one turn of the dialogue, within the length limits.

        - `place` is a name of the turn that is unique in the episode. The turn's seed depends on
          it.
        - `state` holds the facts that the agent knows. Only scripted policies read it.
        - `stop_strings` end the turn.
        - `continues` is True if more turns of the dialogue may follow.
        - `cut_at` is a stop string to remove from the end of the turn, with everything after it.
        - `policy` replaces the policy of the episode for this turn.
        """
        room = self.limits.max_trajectory_tokens - len(dialogue.token_ids)
        if room < 1:
            return Written(text="", cut=StopReason.TRAJECTORY_LENGTH)
        params = SamplingParams(
            max_new_tokens=min(room, self.limits.max_turn_tokens),
            temperature=self.attempt.temperature,
            seed=self.attempt.turn_seed(place),
            stop_strings=stop_strings,
            thought_open=dialogue.thought_open,
        )
        writer = self.policy if policy is None else policy
        try:
            completion = await writer.generate(
                dialogue.token_ids, params, state=state, continues=continues
            )
        except UnusableReplyError as error:
            return Written(text="", cut=StopReason(error.reason))

        text = dialogue.add_model(completion, cut_at=cut_at)
        if completion.finish_reason != "length":
            return Written(text=text, completion=completion)
        if room < self.limits.max_turn_tokens:
            limit = StopReason.TRAJECTORY_LENGTH
        else:
            limit = StopReason.TURN_LENGTH
        return Written(text=text, cut=limit, completion=completion)

    def fit(self, materials: Sequence[Material]) -> tuple[Material, ...]:
        """Return the first materials that fit into an observation's limit in tokens."""
        return fit(self.tokenizer, materials, max_tokens=self.limits.max_observation_tokens)

    async def search_passages(self, query: str, iteration: int) -> tuple[Material, ...]:
        """Search for passages that the model reads itself, without a worker, and record the search.

        Raises RetrievalError.
        """
        materials = self.fit(await self.environment.search(query, None))
        texts = tuple(protocol.one_line(material.text) for material in materials)
        self.searches.append(
            Search(iteration=iteration, query=query, materials=texts, found=bool(texts))
        )
        return materials

    def trajectory(
        self,
        conversations: Sequence[Conversation],
        answer: str,
        reason: StopReason,
        counts: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """End the episode and return its record."""
        return Trajectory(
            question_id=self.attempt.question.id,
            attempt=self.attempt.number,
            policy_version=self.policy.version,
            seed=self.attempt.seed,
            conversations=tuple(conversations),
            answer=answer,
            counts=dict(counts or {}),
            stop_reason=reason,
            searches=tuple(self.searches),
            seconds=time.monotonic() - self._start_time,
        )


def fit(
    tokenizer: Tokenizer, materials: Sequence[Material], max_tokens: int
) -> tuple[Material, ...]:
    """Return the first materials whose tokens number at most `max_tokens` together.

    If already the first material is too long, it is shortened.
    """
    sizes_bytes = [len(neutralise(material.text).encode()) for material in materials]
    fitting: list[Material] = []
    used_tokens = 0
    for place, material in enumerate(materials):
        # A byte-level token covers at least one byte. If the bytes fit, the tokens fit too, and the
        # materials need not be tokenised.
        if used_tokens + sum(sizes_bytes[place:]) <= max_tokens:
            return (*fitting, *materials[place:])

        ids = tokenizer.encode_plain(material.text)
        used_tokens += len(ids)
        if used_tokens > max_tokens:
            if not fitting:
                cut_text = tokenizer.decode(ids[:max_tokens]).rstrip(HALF_CHARACTER)
                fitting.append(dataclasses.replace(material, text=cut_text))
            break
        fitting.append(material)
    return tuple(fitting)
