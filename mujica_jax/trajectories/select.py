"""MyGO's selection: which sampled trajectories become training rows.

After each batch of questions the threshold rises with the policy,

    K := max(K', (r_mean / r_sup + 1) / 2 * r_sup)

where r_mean is the mean reward of the batch's *first* attempts, r_sup the best possible reward and
K' the previous threshold. The paper prints the formula without the factor one half; its K would lie
above r_sup and accept nothing, so we read the midpoint of r_mean and r_sup. A trajectory is kept if
its reward is above K or reaches r_sup (K = r_sup would accept nothing otherwise), at most m a
question. Learning is then plain maximum likelihood on the planner's conversation and on each of its
workers', as independent rows.

Pure functions, called by `methods.mygo`.
"""

import collections
from collections.abc import Sequence

from mujica_jax.records import Conversation, Trajectory, rewarded


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
    """Return at most `keep_per_question` accepted trajectories of each question, the earliest
    attempts first.

    A trajectory that could not be rewarded is not accepted.

    A trajectory whose first conversation (the planner's) repeats, token for token, one already kept
    for its question is dropped: it would only weigh the same text twice. The result stands in the
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
    """Return the planner's conversation and every worker's, each an independent row of maximum
    likelihood."""
    return [
        conversation for trajectory in trajectories for conversation in trajectory.conversations
    ]


def policy_gradient_rows(trajectory: Trajectory) -> list[Conversation]:
    """Return a trajectory's rows for a policy gradient: turns that a length limit cut are trained
    too."""
    return [conversation.with_cut_turns_trained() for conversation in trajectory.conversations]
