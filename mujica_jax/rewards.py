"""Rewards of an episode, by the names that a configuration gives them. `run_episodes` applies one after each episode.

| name | total | best |
|---|---|---|
| `f1` | the official F1 of the answer (Mujica-MyGO, section 3.1) | 1 |
| `em` | its exact match | 1 |
| `f1_format` | 0.9 F1 + 0.1 if every turn was well-formed | 1 |

A reward reads the trajectory that the agent recorded, which holds only what the model generated as answer; an episode
without an answer earns nothing for it. Scores shown to users come from `metrics`, never from here.
"""

import dataclasses
from collections.abc import Callable

from mujica_jax.errors import UserError, nearest
from mujica_jax.metrics import Rule, Score, score
from mujica_jax.records import Question, Reward, StopReason, Trajectory

FORMAT_SHARE = 0.1
MALFORMED = "malformed_"  # what an agent counts under such a name speaks against the format
ILL_FORMED_ENDS = (
    StopReason.NO_ACTION,
    StopReason.UNKNOWN_CANDIDATE,
    StopReason.TOO_MANY_SEARCHES,
    StopReason.TURN_LENGTH,
)


Parts = Callable[[Score, Trajectory], Reward]


def f1(answer: Score, trajectory: Trajectory) -> Reward:
    return Reward(total=answer.f1, parts={"f1": answer.f1})


def exact_match(answer: Score, trajectory: Trajectory) -> Reward:
    return Reward(total=answer.em, parts={"em": answer.em})


def f1_and_format(answer: Score, trajectory: Trajectory) -> Reward:
    """Well-formed: no turn that its parser refused ended the episode, and the agent counted nothing malformed."""
    malformed = sum(count for name, count in trajectory.counts.items() if name.startswith(MALFORMED))
    well_formed = float(trajectory.stop_reason not in ILL_FORMED_ENDS and not malformed)
    total = (1 - FORMAT_SHARE) * answer.f1 + FORMAT_SHARE * well_formed
    return Reward(total=total, parts={"f1": answer.f1, "format": well_formed})


REWARDS: dict[str, Parts] = {"f1": f1, "em": exact_match, "f1_format": f1_and_format}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward under a task's scoring rule. `best` is the best total there can be (`r_sup` in the Mujica-MyGO paper):
    thresholds are measured against it."""

    rule: Rule
    of: Parts
    best: float = 1.0

    def __call__(self, trajectory: Trajectory, question: Question) -> Reward:
        return self.of(score(trajectory.final_answer, question.answers, self.rule), trajectory)


def find_reward(name: str, rule: Rule) -> RewardFunction:
    """The reward of this name. Raises UserError with the nearest name if there is none."""
    if name not in REWARDS:
        raise UserError(f"there is no reward {name}: {nearest(name, REWARDS)}")
    return RewardFunction(rule=rule, of=REWARDS[name])
