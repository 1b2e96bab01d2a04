"""The rewards that a configuration can name.

`run_episodes` computes the reward after each episode.

| name | total | best |
|---|---|---|
| `f1` | official F1 of the answer (Mujica-MyGO, section 3.1) | 1 |
| `em` | exact match of the answer | 1 |
| `f1_format` | 0.9 F1, plus 0.1 if every turn is well-formed | 1 |
| `judge` | 1 if a language model says that the answer means the same as a gold answer | 1 |
| `staged` | sum of parts for answer, searches and format (`staged.py`) | 2 |

A reward reads the trajectory that the agent recorded. The answer in it is text that the model
generated. Without an answer, F1 and exact match are 0. If a search failed, the reward is 0, and the
episode counts in no group, mean or threshold. The scores that users see come from `metrics`, never
from here.

A user's own reward is named as `module:name`. It is called with (score, trajectory), or with (score,
trajectory, question) if it takes three arguments, and its best total should be 1.

A reward may be asynchronous. If it cannot be computed, for example because a judge does not answer,
it raises `NoVerdictError`. Such an episode counts in no group, mean or threshold either.
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from mujica_jax.config.methods import JUDGE, STAGED, StagedRewardConfig, needs_judge
from mujica_jax.config.named_objects import is_place
from mujica_jax.config.plug_ins import reads_question, reward_function
from mujica_jax.errors import UserError, nearest
from mujica_jax.metrics import Rule, Score, score
from mujica_jax.records import Question, Reward, StopReason, Trajectory
from mujica_jax.rewards.staged import Similarity, best_reward, staged_reward

FORMAT_SHARE = 0.1
# The prefix of the names under which an agent counts malformed output.
MALFORMED = "malformed_"
ILL_FORMED_ENDS = (
    StopReason.NO_ACTION,
    StopReason.UNKNOWN_CANDIDATE,
    StopReason.TOO_MANY_SEARCHES,
    StopReason.TURN_LENGTH,
)


# Takes (score, trajectory). A user's own reward may also take the question as a third argument.
Parts = Callable[..., Reward | Awaitable[Reward]]
# Decides whether an answer is right. The answer is None if the episode ended without one.
Correctness = Callable[[Question, str | None], Awaitable[bool]]


class NoVerdictError(Exception):
    """A reward cannot be computed, and the message says why.

    The environment is at fault, not the policy.
    """


# The old name, for rewards in users' code. It will be removed in the next release.
NoVerdict = NoVerdictError


def f1(answer: Score, trajectory: Trajectory) -> Reward:
    """Return the F1 of the answer as the reward."""
    return Reward(total=answer.f1, parts={"f1": answer.f1})


def exact_match(answer: Score, trajectory: Trajectory) -> Reward:
    """Return the exact match of the answer as the reward."""
    return Reward(total=answer.em, parts={"em": answer.em})


def judged(answer: Score, trajectory: Trajectory) -> Reward:
    """Return the judge's verdict as the reward. `RewardFunction` has put it into `answer.em`."""
    return Reward(total=answer.em, parts={"judge": answer.em})


def is_well_formed(trajectory: Trajectory) -> bool:
    """Return whether every turn of an episode is well-formed.

    That is the case if no invalid turn ended the episode and the agent counted no malformed output.
    """
    malformed_turns = sum(
        count for name, count in trajectory.counts.items() if name.startswith(MALFORMED)
    )
    return trajectory.stop_reason not in ILL_FORMED_ENDS and not malformed_turns


def f1_and_format(answer: Score, trajectory: Trajectory) -> Reward:
    """Return 0.9 times the F1 of the answer, plus 0.1 if the episode is well-formed."""
    well_formed = float(is_well_formed(trajectory))
    total = (1 - FORMAT_SHARE) * answer.f1 + FORMAT_SHARE * well_formed
    return Reward(total=total, parts={"f1": answer.f1, "format": well_formed})


REWARDS: dict[str, Parts] = {"f1": f1, "em": exact_match, "f1_format": f1_and_format}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward together with the scoring rule of a task.

    `best` is the highest possible total (`r_sup` in the Mujica-MyGO paper). Thresholds are relative
    to it.
    """

    rule: Rule
    compute: Parts
    best: float = 1.0
    # Returns the reward for a round, if the reward changes during training.
    compute_in_round: Callable[[int], Parts] | None = None
    # Decides whether an answer is right. Without it, an answer is right if it is an exact match.
    judge: Correctness | None = None
    # Whether `compute` also takes the question.
    reads_question: bool = False

    def __call__(self, trajectory: Trajectory, question: Question) -> Reward:
        """Return the reward of an episode. The reward must not be asynchronous."""
        assert self.judge is None, "a judge is asynchronous: use `rewarded`"
        if trajectory.is_environment_fault:
            return Reward(total=0.0)
        answer = self._score(trajectory, question)
        return self._checked(self._computed(answer, trajectory, question))

    async def rewarded(self, trajectory: Trajectory, question: Question) -> Trajectory:
        """Return the episode with its reward, or with a mark that there is no verdict."""
        if trajectory.is_environment_fault:
            return trajectory
        answer = self._score(trajectory, question)
        try:
            if self.judge is not None:
                is_right = await self.judge(question, trajectory.final_answer)
                answer = dataclasses.replace(answer, em=float(is_right))
            reward = self._computed(answer, trajectory, question)
            if inspect.isawaitable(reward):
                reward = await reward
        except NoVerdictError:
            return trajectory.without_verdict()
        return trajectory.with_reward(self._checked(reward))

    def _computed(
        self, answer: Score, trajectory: Trajectory, question: Question
    ) -> Reward | Awaitable[Reward]:
        """Call the reward with the arguments that it takes."""
        if self.reads_question:
            return self.compute(answer, trajectory, question)
        return self.compute(answer, trajectory)

    def _score(self, trajectory: Trajectory, question: Question) -> Score:
        return score(trajectory.final_answer, question.answers, self.rule)

    def _checked(self, reward: Any) -> Reward:
        """Return the reward unchanged. Raises UserError if it is not a Reward of finite numbers."""
        is_reward = isinstance(reward, Reward) and isinstance(reward.parts, Mapping)
        numbers = [reward.total, *reward.parts.values()] if is_reward else [None]
        if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            name = getattr(self.compute, "__name__", self.compute)
            raise UserError(
                f"the reward {name} gave {reward!r}; it must return a Reward of finite numbers"
            )
        return reward

    def at(self, round_number: int) -> "RewardFunction":
        """Return the reward function for a round."""
        if self.compute_in_round is None:
            return self
        return dataclasses.replace(self, compute=self.compute_in_round(round_number))


def find_reward(
    name: str,
    rule: Rule,
    staged: StagedRewardConfig | None = None,
    similarity: Similarity | None = None,
    judge: Correctness | None = None,
) -> RewardFunction:
    """Return the reward with this name: a built-in one, or a user's own as `module:name`.

    - `rule` is the scoring rule of the task.
    - `staged` configures the reward `staged`. `similarity` compares queries for its part `search`.
    - `judge` decides about answers, for rewards that need a judge (`needs_judge`).

    Raises UserError if there is no such reward, or if it needs a judge and there is none.
    """
    staged = staged or StagedRewardConfig()
    if is_place(name):
        compute = reward_function(name)
        return RewardFunction(rule=rule, compute=compute, reads_question=reads_question(compute))
    names = [*REWARDS, STAGED, JUDGE]
    if name not in names:
        raise UserError(
            f"unknown reward {name!r}; {nearest(name, names)} (or your own as module:name)"
        )

    if not needs_judge(name, staged):
        judge = None
    elif judge is None:
        correctness = f" with staged.correctness {staged.correctness}" if name == STAGED else ""
        raise UserError(
            f"the reward {name}{correctness} needs a judge and there is none: give --judge.base-url"
        )

    if name == STAGED:
        return _staged(rule, staged, similarity, judge)
    compute = judged if name == JUDGE else REWARDS[name]
    return RewardFunction(rule=rule, compute=compute, judge=judge)


def _staged(
    rule: Rule, config: StagedRewardConfig, similarity: Similarity | None, judge: Correctness | None
) -> RewardFunction:
    """Return the reward `staged`, whose stage depends on the round."""

    def compute_in_round(round_number: int) -> Parts:
        stage = 1 if round_number < config.stage_two_round else 2

        def compute(answer: Score, trajectory: Trajectory) -> Reward:
            return staged_reward(
                answer,
                trajectory,
                well_formed=is_well_formed(trajectory),
                stage=stage,
                config=config,
                similarity=similarity,
            )

        return compute

    return RewardFunction(
        rule=rule,
        compute=compute_in_round(0),
        best=best_reward(config),
        compute_in_round=compute_in_round,
        judge=judge,
    )
