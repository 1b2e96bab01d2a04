"""The parts that episodes of all agents share.

These are: a turn within its limits, a search whose materials fit, and the record at the end.
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

# A tokenizer decodes this where a cut left only some bytes of a character.
HALF_CHARACTER = "\ufffd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """One turn of the model."""

    text: str
    # The limit that ended the turn, or what is wrong with an endpoint's reply.
    cut: StopReason | None = None
    # None where no room was left to write, or nothing came.
    completion: Completion | None = None


class Episode:
    """State of one episode, and the ways in which an agent plays it."""

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
        """Let a policy write one turn. Without `policy` it is the policy of the episode.

        `place` is unique in the episode and seeds the turn. If the stop string `cut_at` ended the
        turn, it is left out.
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
        """Return the first materials that fit the limit of an observation."""
        return fit(self.tokenizer, materials, max_tokens=self.limits.max_observation_tokens)

    async def search_passages(self, query: str, iteration: int) -> tuple[Material, ...]:
        """Search, and record the search as one that the model reads itself.

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
        """Return the record of the episode, which ends now."""
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
    """Return the first materials that fit `max_tokens`.

    If the first material does not fit, it is cut rather than left out.
    """
    sizes_bytes = [len(neutralise(material.text).encode()) for material in materials]
    fitting: list[Material] = []
    used_tokens = 0
    for place, material in enumerate(materials):
        # A byte-level token covers at least one byte. Short materials are known to fit without
        # being tokenised.
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
