"""Early warnings from a round's trajectories about the policy that sampled them.

docs/reference/metrics.md explains them (`mygo`).
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
    """Return the numbers of one round.

    Shares are of trajectories, unless they name something else; 0 where there is nothing.
    `trajectories` counts all that were sampled. Every other number leaves out those that could not
    be rewarded, which `left_out` counts.
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

    # Repeated first conversations, and turns that search.
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
    """Return the mean of -log p of the sampled tokens, by the engine.

    It estimates the entropy of the engine's policy at temperature 1.
    """
    log_probs: list[float] = []
    for trajectory in trajectories:
        for conversation in trajectory.conversations:
            for turn in conversation.turns:
                log_probs += turn.logprobs or ()
    return -sum(log_probs) / max(1, len(log_probs))


def in_words(statistics: dict[str, float | int]) -> str:
    """Return the numbers of a round as one line for the console."""
    attempts = ""
    if statistics["accepted"]:
        attempts = f", {statistics['attempts_a_kept']:.1f} attempts for each"
    left_out = ""
    if statistics["left_out"]:
        left_out = f", {statistics['left_out']} left out because a search or the judge failed"
    quantiles = ", ".join(f"{statistics[name]:.2f}" for name in REWARD_QUANTILES)
    return (
        f"{statistics['accepted']} of {statistics['trajectories']} kept{attempts}{left_out}; mean "
        f"reward {statistics['mean_reward']:.2f} ({quantiles}), "
        f"{statistics['unsolved_questions']:.0%} of the questions unsolved, "
        f"{statistics['format_failures']:.0%} malformed, {statistics['duplicates']:.0%} of the "
        f"kept repeated, entropy {statistics['entropy']:.2f}, {statistics['searches']:.1f} "
        f"searches, {statistics['searches_a_turn']:.1f} a turn"
    )


def advice(trajectories: Sequence[Trajectory]) -> str:
    """Return what to change where nothing of a round is kept, by the commonest end of episodes."""
    num_sampled = len(trajectories)
    trajectories = rewarded(trajectories)
    stop_reasons = collections.Counter(trajectory.stop_reason for trajectory in trajectories)
    if num_sampled and not stop_reasons:
        return (
            f"A search or the judge failed in all {num_sampled} of them: check that the retriever "
            "and the judge answer"
        )
    if not stop_reasons:
        return "It sampled nothing: raise sampling.questions_per_round"

    commonest, number = stop_reasons.most_common(1)[0]
    if commonest in (StopReason.TURN_LENGTH, StopReason.TRAJECTORY_LENGTH):
        return (
            f"{number} of them ended as {commonest}: raise agent.max_turn_tokens or "
            "agent.max_trajectory_tokens"
        )
    if stop_reasons[StopReason.ANSWERED] / len(trajectories) < 0.5:
        return (
            f"{number} of them ended as {commonest}: the policy does not know the format, raise "
            "warmup.steps"
        )
    best_reward = max(trajectory.reward for trajectory in trajectories)
    return (
        f"Most of them answered, and earned {best_reward:.2f} at most: raise method.max_attempts "
        "or warmup.steps, or what a reward of your own gives at best"
    )
