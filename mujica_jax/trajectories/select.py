"""Selection of what is learnt: MyGO's rule, and the groups that GRPO compares.

**MyGO.** After each batch of questions the threshold rises with the policy,

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

where r_mean is the mean reward of the batch's *first* attempts, r_sup the best possible reward and
K' the previous threshold. The paper prints the formula without the factor one half; its K would lie
above r_sup and accept nothing, so we read the midpoint of r_mean and r_sup. A trajectory is kept if
its reward is above K or reaches r_sup (K = r_sup would accept nothing otherwise), at most m a
question. Learning is then plain maximum likelihood on the planner's conversation and on each of its
workers', as independent rows.

**GRPO.** All attempts at one question are a group. Learning compares each attempt with its group.
An attempt that could not be rewarded (a search or the judge failed) is no member: its group is
compared without it. The soft overlong punishment is that of DAPO (arXiv 2503.14476, equation 13),
with L the generated tokens of a trajectory:

    0                                 L <= limit - cache
    (limit - cache - L) / cache       up to the limit
    -1                                beyond it

Pure functions, called by `methods.mygo` and `methods.grpo`.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from mujica_jax.records import Conversation, Trajectory, rewarded

MIN_MEMBERS = 2  # of a group whose rewards are compared


def threshold(*, previous_k: float, mean_first_attempt_reward: float, best_reward: float) -> float:
    """Return the threshold K after a batch. It never falls."""
    return max(previous_k, (mean_first_attempt_reward / best_reward + 1.0) / 2.0 * best_reward)


def mean_first_attempt_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return r_mean; 0.0 for no trajectories.

    A first attempt that the policy failed counts with its reward. One that could not be rewarded
    does not count.
    """
    first_attempt = min((trajectory.attempt for trajectory in trajectories), default=0)
    first_trajectories = [
        trajectory for trajectory in trajectories if trajectory.attempt == first_attempt
    ]
    return mean_reward(first_trajectories)


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean over those that were rewarded; 0.0 where there are none."""
    rewards = [trajectory.reward for trajectory in rewarded(trajectories)]
    return sum(rewards) / len(rewards) if rewards else 0.0


def accepts(reward: float, *, k: float, best_reward: float) -> bool:
    """Return whether a reward is above K or the best there is."""
    return reward > k or reward >= best_reward


def select(
    trajectories: Sequence[Trajectory], *, k: float, keep_per_question: int, best_reward: float
) -> list[Trajectory]:
    """Return at most `keep_per_question` accepted trajectories of each question.

    The earliest attempts come first. A trajectory that could not be rewarded is not accepted. A
    trajectory is dropped if its first conversation (the planner's) repeats, token for token, one
    already kept for its question: it would only weigh the same text twice. The result stands in the
    order in which questions first appear, attempts ascending, whatever the order in which samplers
    finished within a question.
    """
    by_question: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for trajectory in rewarded(trajectories):
        by_question[trajectory.question_id].append(trajectory)
    selected: list[Trajectory] = []
    for attempts in by_question.values():
        accepted: dict[tuple[int, ...], Trajectory] = {}  # by the tokens of the first conversation
        for trajectory in sorted(attempts, key=lambda trajectory: trajectory.attempt):
            if len(accepted) >= keep_per_question:
                break
            if accepts(trajectory.reward, k=k, best_reward=best_reward):
                token_ids = tuple(trajectory.conversations[0].token_ids)
                accepted.setdefault(token_ids, trajectory)
        selected.extend(accepted.values())
    return selected


def training_rows(trajectories: Sequence[Trajectory]) -> list[Conversation]:
    """Return the planner's conversation and every worker's.

    Each is an independent row of maximum likelihood.
    """
    return [
        conversation for trajectory in trajectories for conversation in trajectory.conversations
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All attempts at one question."""

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
    """Return a group for each question, in the order in which questions first appear.

    The attempts of a group ascend.
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
    """Return the soft overlong punishment of a trajectory of this many generated tokens."""
    first_punished = limit_tokens - cache_tokens
    return max(-1.0, min(0.0, (first_punished - tokens) / cache_tokens))


def policy_gradient_rows(trajectory: Trajectory) -> list[Conversation]:
    """Return a trajectory's rows for a policy gradient.

    Turns that a length limit cut are trained too.
    """
    return [conversation.with_cut_turns_trained() for conversation in trajectory.conversations]
