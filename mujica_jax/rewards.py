"""The reward of an episode: the official F1 of the answer that the planner generated, nothing else.

MyGO's threshold needs the best reward there can be (`r_sup` in the paper); for F1 that is 1. Who calls it: agents, when an episode
ends with an answer. Every other end of an episode is worth 0.
"""

from collections.abc import Sequence

from mujica_jax.metrics import Rule, score

BEST_REWARD = 1.0


def f1_reward(answer: str, golds: Sequence[str], rule: Rule) -> float:
    """F1 between 0 and `BEST_REWARD` under the task's rule; `answer` is the text of the planner's own <answer> span."""
    return score(answer, golds, rule).f1
