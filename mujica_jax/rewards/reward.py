"""Rewards of an episode, by the names that a configuration gives them.

`run_episodes` applies one after each episode.

| name | total | best |
|---|---|---|
| `f1` | the official F1 of the answer (Mujica-MyGO, section 3.1) | 1 |
| `em` | its exact match | 1 |
| `f1_format` | 0.9 F1 + 0.1 if every turn was well-formed | 1 |
| `judge` | 1 if a language model says that the answer means the same as a gold one | 1 |
| `staged` | answer, search and format, by stages of training (`staged.py`) | 2 |

A reward reads the trajectory that the agent recorded, which holds only what the model generated as
answer; an episode without an answer earns nothing for it. An episode whose search failed earns
nothing and counts nowhere. Scores shown to users come from `metrics`, never from here.

A reward may be asynchronous. Where it cannot be had (a judge does not answer), it raises
`NoVerdictError`, and the episode counts in no group, mean or threshold.
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from mujica_jax.config.methods import JUDGE, STAGED, StagedRewardConfig, needs_judge
from mujica_jax.errors import UserError, nearest
from mujica_jax.metrics import Rule, Score, score
from mujica_jax.records import Question, Reward, StopReason, Trajectory
from mujica_jax.rewards.staged import Similarity, best_reward, staged_reward

FORMAT_SHARE = 0.1
MALFORMED = "malformed_"  # what an agent counts under such a name speaks against the format
ILL_FORMED_ENDS = (
    StopReason.NO_ACTION,
    StopReason.UNKNOWN_CANDIDATE,
    StopReason.TOO_MANY_SEARCHES,
    StopReason.TURN_LENGTH,
)


Parts = Callable[[Score, Trajectory], Reward | Awaitable[Reward]]
# Whether an answer is right. The answer is None if the episode ended without one.
Correctness = Callable[[Question, str | None], Awaitable[bool]]


class NoVerdictError(Exception):
    """A reward cannot be given; the sentence says why.

    The environment is at fault, not the policy.
    """


# The old name, for rewards that users wrote. It goes with the next release.
NoVerdict = NoVerdictError


def f1(answer: Score, trajectory: Trajectory) -> Reward:
    return Reward(total=answer.f1, parts={"f1": answer.f1})


def exact_match(answer: Score, trajectory: Trajectory) -> Reward:
    return Reward(total=answer.em, parts={"em": answer.em})


def judged(answer: Score, trajectory: Trajectory) -> Reward:
    """Return the judge's verdict, which `RewardFunction` puts into `answer.em`."""
    return Reward(total=answer.em, parts={"judge": answer.em})


def is_well_formed(trajectory: Trajectory) -> bool:
    """Return whether every turn was well-formed.

    Then no refused turn ended the episode, and the agent counted nothing malformed.
    """
    malformed_turns = sum(
        count for name, count in trajectory.counts.items() if name.startswith(MALFORMED)
    )
    return trajectory.stop_reason not in ILL_FORMED_ENDS and not malformed_turns


def f1_and_format(answer: Score, trajectory: Trajectory) -> Reward:
    """Return 0.9 F1 + 0.1 for a well-formed episode."""
    well_formed = float(is_well_formed(trajectory))
    total = (1 - FORMAT_SHARE) * answer.f1 + FORMAT_SHARE * well_formed
    return Reward(total=total, parts={"f1": answer.f1, "format": well_formed})


REWARDS: dict[str, Parts] = {"f1": f1, "em": exact_match, "f1_format": f1_and_format}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward under a task's scoring rule.

    `best` is the highest possible total (`r_sup` in the Mujica-MyGO paper): thresholds are measured
    against it.
    """

    rule: Rule
    compute: Parts
    best: float = 1.0
    # Returns the function of a round, for a reward that changes while a method trains.
    compute_in_round: Callable[[int], Parts] | None = None
    judge: Correctness | None = None  # says what is right, in place of an exact match

    def __call__(self, trajectory: Trajectory, question: Question) -> Reward:
        """Return what an episode earned. Only for rewards that need not be awaited."""
        assert self.judge is None, "a judge has to be waited for: use `rewarded`"
        if trajectory.is_environment_fault:
            return Reward(total=0.0)
        return self._checked(self.compute(self._score(trajectory, question), trajectory))

    async def rewarded(self, trajectory: Trajectory, question: Question) -> Trajectory:
        """Return the episode with its reward, or marked as one without a verdict."""
        if trajectory.is_environment_fault:
            return trajectory
        answer = self._score(trajectory, question)
        try:
            if self.judge is not None:
                is_right = await self.judge(question, trajectory.final_answer)
                answer = dataclasses.replace(answer, em=float(is_right))
            reward = self.compute(answer, trajectory)
            if inspect.isawaitable(reward):
                reward = await reward
        except NoVerdictError:
            return trajectory.without_verdict()
        return trajectory.with_reward(self._checked(reward))

    def _score(self, trajectory: Trajectory, question: Question) -> Score:
        return score(trajectory.final_answer, question.answers, self.rule)

    def _checked(self, reward: Any) -> Reward:
        """Return the reward. Raises UserError if it is no Reward of finite numbers."""
        is_reward = isinstance(reward, Reward) and isinstance(reward.parts, Mapping)
        numbers = [reward.total, *reward.parts.values()] if is_reward else [None]
        if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            name = getattr(self.compute, "__name__", self.compute)
            raise UserError(
                f"the reward {name} gave {reward!r}; it must return a Reward of finite numbers"
            )
        return reward

    def at(self, round_number: int) -> "RewardFunction":
        """Return the reward of a round."""
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
    """Return the reward of this name.

    `staged` and `similarity` are for the reward `staged`; only its part `search` compares queries.
    `judge` is for those rewards that need one (`needs_judge`). Raises UserError with the nearest
    name if there is no such reward.
    """
    staged = staged or StagedRewardConfig()
    names = [*REWARDS, STAGED, JUDGE]
    if name not in names:
        raise UserError(f"there is no reward {name}: {nearest(name, names)}")

    if not needs_judge(name, staged):
        judge = None
    elif judge is None:
        correctness = f" with staged.correctness {staged.correctness}" if name == STAGED else ""
        raise UserError(
            f"the reward {name}{correctness} asks a judge and there is none: give --judge.base-url"
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
