"""Groups: all attempts at one question, and what each is worth against the others. Called by
`methods.policy_gradient`.

Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), with L the generated tokens of a trajectory:

    0                                 L <= limit - cache
    (limit - cache - L) / cache       up to the limit
    -1                                beyond it
"""

import dataclasses
from collections.abc import Callable, Sequence

from mujica_jax.records import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]  # that are compared, one a trajectory

    @property
    def teaches(self) -> bool:
        """Whether any attempt is better than another one."""
        return min(self.rewards) < max(self.rewards)


def groups_of(trajectories: Sequence[Trajectory], reward: Callable[[Trajectory], float]) -> list[Group]:
    """In the order in which questions first appear, attempts ascending."""
    by_question: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_question.setdefault(trajectory.question_id, []).append(trajectory)
    groups = []
    for members in by_question.values():
        ordered = tuple(sorted(members, key=lambda trajectory: trajectory.attempt))
        groups.append(Group(trajectories=ordered, rewards=tuple(map(reward, ordered))))
    return groups


def overlong_punishment(tokens: int, *, limit_tokens: int, cache_tokens: int) -> float:
    begins = limit_tokens - cache_tokens
    return max(-1.0, min(0.0, (begins - tokens) / cache_tokens))
