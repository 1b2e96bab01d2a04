"""The selection of trajectories for training: MyGO's threshold, and the groups of GRPO.

**MyGO.** In each round the threshold K rises with the policy:

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

Here r_mean is the mean reward of the round's *first* attempts, r_sup the best possible reward, and
K' the threshold of the round before. The paper prints the formula without the factor one half. Its
K would be above r_sup, and no trajectory would pass. We therefore use the midpoint of r_mean and
r_sup.

A trajectory is kept if its reward is above K or equal to r_sup. Without the second case, K = r_sup
would reject every trajectory. At most `keep_per_question` trajectories of a question are kept.
Training maximises the likelihood of the planner's conversation and of each worker's conversation.
Each of them is learnt independently of the others.

**GRPO.** All attempts at the same question are a group, and training compares each attempt with its
group. If a search or the judge failed, the attempt has no reward and is left out of its group.

A trajectory with L generated tokens gets the soft overlong punishment of DAPO (arXiv 2503.14476,
equation 13):

    0                                 if L <= limit - cache
    (limit - cache - L) / cache       if limit - cache < L <= limit
    -1                                if L > limit

All functions are pure. `methods.mygo` and `methods.grpo` call them.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from mujica_jax.records import Conversation, Trajectory, rewarded

# The smallest number of trajectories in a group that can be compared.
MIN_MEMBERS = 2


def threshold(*, previous_k: float, mean_first_attempt_reward: float, best_reward: float) -> float:
    """Return the threshold K of a round. It never falls."""
    return max(previous_k, (mean_first_attempt_reward / best_reward + 1.0) / 2.0 * best_reward)


def mean_first_attempt_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean reward of the first attempts (r_mean), or 0.0 if there are none.

    Wrong attempts count with their reward. If a search or the judge failed during an attempt, it
    has no reward and does not count.
    """
    first_attempt = min((trajectory.attempt for trajectory in trajectories), default=0)
    first_trajectories = [
        trajectory for trajectory in trajectories if trajectory.attempt == first_attempt
    ]
    return mean_reward(first_trajectories)


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean reward of the trajectories that have a reward, or 0.0 if there are none."""
    rewards = [trajectory.reward for trajectory in rewarded(trajectories)]
    return sum(rewards) / len(rewards) if rewards else 0.0


def accepts(reward: float, *, k: float, best_reward: float) -> bool:
    """Return whether a reward is above the threshold or the best possible one."""
    return reward > k or reward >= best_reward


def select(
    trajectories: Sequence[Trajectory], *, k: float, keep_per_question: int, best_reward: float
) -> list[Trajectory]:
    """Return at most `keep_per_question` accepted trajectories of each question.

    Earlier attempts are preferred. A trajectory without a reward is not accepted. A trajectory is
    also dropped if another kept trajectory of the question has the same tokens in its first
    conversation, the planner's. Otherwise the same text would count twice.

    The result has the questions in the order in which they first appear, and the attempts at a
    question in ascending order. It does not depend on the order in which the attempts at a question
    finished.
    """
    by_question: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for trajectory in rewarded(trajectories):
        by_question[trajectory.question_id].append(trajectory)
    selected: list[Trajectory] = []
    for attempts in by_question.values():
        # The key is the tokens of the first conversation.
        accepted: dict[tuple[int, ...], Trajectory] = {}
        for trajectory in sorted(attempts, key=lambda trajectory: trajectory.attempt):
            if len(accepted) >= keep_per_question:
                break
            if accepts(trajectory.reward, k=k, best_reward=best_reward):
                token_ids = tuple(trajectory.conversations[0].token_ids)
                accepted.setdefault(token_ids, trajectory)
        selected.extend(accepted.values())
    return selected


def training_rows(trajectories: Sequence[Trajectory]) -> list[Conversation]:
    """Return all conversations of the trajectories.

    Each conversation, of a planner or of a worker, is learnt independently of the others. Later,
    `learning.packing` puts several conversations into one packed row.
    """
    return [
        conversation for trajectory in trajectories for conversation in trajectory.conversations
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The attempts at one question that have a reward.

    `rewards` holds the reward of each trajectory. `left_out` counts the attempts without a reward.
    """

    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]
    left_out: int = 0

    @property
    def is_comparable(self) -> bool:
        """Whether the group has at least two members to compare."""
        return len(self.rewards) >= MIN_MEMBERS

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ, so that there is something to learn."""
        return self.is_comparable and min(self.rewards) < max(self.rewards)


def groups_of(
    trajectories: Sequence[Trajectory], reward: Callable[[Trajectory], float]
) -> list[Group]:
    """Return a group for each question, in the order in which questions first appear.

    The attempts in a group are in ascending order. `reward` returns the reward to compare.
    """
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
    """Return the soft overlong punishment of a trajectory with this number of generated tokens."""
    first_punished = limit_tokens - cache_tokens
    return max(-1.0, min(0.0, (first_punished - tokens) / cache_tokens))


def policy_gradient_rows(trajectory: Trajectory) -> list[Conversation]:
    """Return the conversations of a trajectory for a policy gradient.

    Turns that a length limit cut are training targets too.
    """
    return [conversation.with_cut_turns_trained() for conversation in trajectory.conversations]
