"""Statistics of a round's trajectories, which warn early if the policy goes wrong.

docs/reference/metrics.md explains each number (section `mygo`).
"""

import collections
from collections.abc import Sequence

from mujica_jax.records import StopReason, Trajectory, rewarded
from mujica_jax.rewards.reward import ILL_FORMED_ENDS
from mujica_jax.trajectories.select import mean_first_attempt_reward

REWARD_QUANTILES = {"reward_p10": 0.1, "reward_p50": 0.5, "reward_p90": 0.9}


def round_statistics(
    trajectories: Sequence[Trajectory],
    kept_trajectories: Sequence[Trajectory],
    *,
    best_reward: float,
) -> dict[str, float | int]:
    """Return the statistics of one round, by the names that metrics.jsonl uses.

    `trajectories` are all that were sampled, and `kept_trajectories` those that are learnt. Shares
    are between 0 and 1, and a share of nothing is 0. They are shares of the trajectories, unless
    the name says otherwise (`unsolved_questions`; `duplicates` is a share of the kept ones).

    `left_out` counts the trajectories without a reward, because a search or the judge failed. Only
    `trajectories` includes them; every other statistic is computed without them.
    """
    num_sampled = len(trajectories)
    trajectories = rewarded(trajectories)
    count = max(1, len(trajectories))

    # Rewards.
    rewards = sorted(trajectory.reward for trajectory in trajectories) or [0.0]
    reward_quantiles = {
        name: rewards[round(quantile * (len(rewards) - 1))]
        for name, quantile in REWARD_QUANTILES.items()
    }
    question_ids = {trajectory.question_id for trajectory in trajectories}
    solved_ids = {
        trajectory.question_id for trajectory in trajectories if trajectory.reward >= best_reward
    }

    # How many kept trajectories repeat another one's first conversation, and how many searches
    # a turn makes.
    first_conversations = {
        (trajectory.question_id, tuple(trajectory.conversations[0].token_ids))
        for trajectory in kept_trajectories
    }
    duplicate_share = 0.0
    if kept_trajectories:
        duplicate_share = 1 - len(first_conversations) / len(kept_trajectories)
    searches_by_turn = collections.Counter(
        (trajectory.question_id, trajectory.attempt, search.iteration)
        for trajectory in trajectories
        for search in trajectory.searches
    )
    num_ill_formed = sum(trajectory.stop_reason in ILL_FORMED_ENDS for trajectory in trajectories)
    num_searches = sum(len(trajectory.searches) for trajectory in trajectories)

    return {
        "trajectories": num_sampled,
        "left_out": num_sampled - len(trajectories),
        "accepted": len(kept_trajectories),
        "acceptance": len(kept_trajectories) / count,
        "attempts_a_kept": len(trajectories) / max(1, len(kept_trajectories)),
        "mean_reward": mean_first_attempt_reward(trajectories),
        **reward_quantiles,
        "unsolved_questions": 1 - len(solved_ids) / max(1, len(question_ids)),
        "format_failures": num_ill_formed / count,
        "duplicates": duplicate_share,
        "entropy": entropy(trajectories),
        "searches": num_searches / count,
        "searches_a_turn": sum(searches_by_turn.values()) / max(1, len(searches_by_turn)),
    }


def entropy(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean of -log p over the sampled tokens, in nats, as the engine computes p.

    It estimates the entropy of the engine's policy at temperature 1.
    """
    log_probs: list[float] = []
    for trajectory in trajectories:
        for conversation in trajectory.conversations:
            for turn in conversation.turns:
                log_probs += turn.logprobs or ()
    return -sum(log_probs) / max(1, len(log_probs))


def in_words(statistics: dict[str, float | int]) -> str:
    """Return the statistics of a round as one line for the console."""
    attempts = ""
    if statistics["accepted"]:
        attempts = f" ({statistics['attempts_a_kept']:.1f} attempts per kept trajectory)"
    left_out = ""
    if statistics["left_out"]:
        left_out = f", {statistics['left_out']} left out because a search or the judge failed"
    return (
        f"kept {statistics['accepted']} of {statistics['trajectories']} trajectories"
        f"{attempts}{left_out}; mean reward of first attempts {statistics['mean_reward']:.2f}; "
        f"reward of all attempts: 10th percentile {statistics['reward_p10']:.2f}, "
        f"median {statistics['reward_p50']:.2f}, "
        f"90th percentile {statistics['reward_p90']:.2f}; "
        f"{statistics['unsolved_questions']:.0%} of questions unsolved; "
        f"{statistics['format_failures']:.0%} of trajectories malformed; "
        f"{statistics['duplicates']:.0%} of kept trajectories are duplicates; "
        f"entropy {statistics['entropy']:.2f} nats per token; "
        f"{statistics['searches']:.1f} searches per trajectory, "
        f"{statistics['searches_a_turn']:.1f} per turn that searches"
    )


def advice(trajectories: Sequence[Trajectory]) -> str:
    """Return what to change if a round keeps nothing, judged by how most of its episodes ended."""
    num_sampled = len(trajectories)
    trajectories = rewarded(trajectories)
    stop_reasons = collections.Counter(trajectory.stop_reason for trajectory in trajectories)
    if num_sampled and not stop_reasons:
        return (
            f"A search or the judge failed in all {num_sampled} trajectories: check that the "
            "retriever and the judge answer"
        )
    if not stop_reasons:
        return "The round sampled nothing: raise sampling.questions_per_round"

    commonest, number = stop_reasons.most_common(1)[0]
    if commonest in (StopReason.TURN_LENGTH, StopReason.TRAJECTORY_LENGTH):
        return (
            f"{number} of {len(trajectories)} trajectories ended with {commonest}: raise "
            "agent.max_turn_tokens or agent.max_trajectory_tokens"
        )
    if stop_reasons[StopReason.ANSWERED] / len(trajectories) < 0.5:
        return (
            f"{number} of {len(trajectories)} trajectories ended with {commonest}: the policy does "
            "not know the format yet, so raise warmup.steps"
        )
    best_reward = max(trajectory.reward for trajectory in trajectories)
    return (
        f"Most trajectories ended with an answer, but the best reward was {best_reward:.2f}: raise "
        "method.max_attempts or warmup.steps. If you use your own reward, check its best value"
    )
