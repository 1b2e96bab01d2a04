"""Groups: all attempts at one question, and what each is worth against the others. Called by
`methods.policy_gradient`.

An attempt that could not be rewarded (a search or the judge failed) is no member: its group is
compared without it.

Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), with L the generated tokens of a
trajectory:

    0                                 L <= limit - cache
    (limit - cache - L) / cache       up to the limit
    -1                                beyond it
"""

import dataclasses
from collections.abc import Callable, Sequence

from mujica_jax.records import Trajectory, rewarded

MIN_MEMBERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    trajectories: tuple[Trajectory, ...]  # the members
    rewards: tuple[float, ...]  # that are compared, one a member
    left_out: int = 0  # attempts that could not be rewarded

    @property
    def is_comparable(self) -> bool:
        """Whether the group has at least two members to compare."""
        return len(self.rewards) >= MIN_MEMBERS

    @property
    def teaches(self) -> bool:
        """Whether any attempt is better than another one."""
        return self.is_comparable and min(self.rewards) < max(self.rewards)


def groups_of(
    trajectories: Sequence[Trajectory], reward: Callable[[Trajectory], float]
) -> list[Group]:
    """Return a group for each question, in the order in which questions first appear, attempts
    ascending."""
    by_question: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_question.setdefault(trajectory.question_id, []).append(trajectory)
    groups = []
    for members in by_question.values():
        ordered = tuple(sorted(rewarded(members), key=lambda trajectory: trajectory.attempt))
        group = Group(
            trajectories=ordered,
            rewards=tuple(map(reward, ordered)),
            left_out=len(members) - len(ordered),
        )
        groups.append(group)
    return groups


def overlong_punishment(tokens: int, *, limit_tokens: int, cache_tokens: int) -> float:
    """Return the soft overlong punishment of a trajectory of this many generated tokens."""
    first_punished = limit_tokens - cache_tokens
    return max(-1.0, min(0.0, (first_punished - tokens) / cache_tokens))
