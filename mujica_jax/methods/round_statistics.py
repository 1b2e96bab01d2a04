"""Early warnings: what a round's trajectories say of the policy that sampled them (docs/metrics.md,
`mygo`)."""

import collections
from collections.abc import Sequence

from mujica_jax.records import StopReason, Trajectory, rewarded
from mujica_jax.rewards import ILL_FORMED_ENDS
from mujica_jax.trajectories.select import mean_first_attempt_reward

REWARD_QUANTILES = {"reward_p10": 0.1, "reward_p50": 0.5, "reward_p90": 0.9}


def round_statistics(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory], *, best_reward: float
) -> dict[str, float | int]:
    """Return the numbers of one round. Shares are of trajectories, unless they name something else;
    0 where there is nothing. `trajectories` counts all that were sampled; every other number leaves
    out those that could not be rewarded, which `left_out` counts."""
    sampled = len(trajectories)
    trajectories = rewarded(trajectories)
    count = max(1, len(trajectories))
    rewards = sorted(trajectory.reward for trajectory in trajectories) or [0.0]
    questions = {trajectory.question_id for trajectory in trajectories}
    solved = {
        trajectory.question_id for trajectory in trajectories if trajectory.reward >= best_reward
    }
    turns = collections.Counter(
        (trajectory.question_id, trajectory.attempt, search.iteration)
        for trajectory in trajectories
        for search in trajectory.searches
    )
    first_conversations = {(t.question_id, tuple(t.conversations[0].token_ids)) for t in kept}
    return {
        "trajectories": sampled,
        "left_out": sampled - len(trajectories),
        "accepted": len(kept),
        "acceptance": len(kept) / count,
        "attempts_a_kept": len(trajectories) / max(1, len(kept)),
        "mean_reward": mean_first_attempt_reward(trajectories),
        **{name: rewards[round(q * (len(rewards) - 1))] for name, q in REWARD_QUANTILES.items()},
        "unsolved_questions": 1 - len(solved) / max(1, len(questions)),
        "format_failures": sum(t.stop_reason in ILL_FORMED_ENDS for t in trajectories) / count,
        "duplicates": 1 - len(first_conversations) / len(kept) if kept else 0.0,
        "entropy": entropy(trajectories),
        "searches": sum(len(t.searches) for t in trajectories) / count,
        "searches_a_turn": sum(turns.values()) / max(1, len(turns)),
    }


def entropy(trajectories: Sequence[Trajectory]) -> float:
    """Mean of -log p of the sampled tokens, by the engine: an estimate of its policy's entropy at
    temperature 1."""
    log_probs = [
        p
        for t in trajectories
        for c in t.conversations
        for turn in c.turns
        for p in turn.logprobs or ()
    ]
    return -sum(log_probs) / max(1, len(log_probs))


def in_words(found: dict[str, float | int]) -> str:
    """The same for the console, in one line."""
    spent = f", {found['attempts_a_kept']:.1f} attempts for each" if found["accepted"] else ""
    left_out = (
        f", {found['left_out']} left out because a search or the judge failed"
        if found["left_out"]
        else ""
    )
    return (
        f"{found['accepted']} of {found['trajectories']} kept{spent}{left_out}; mean reward "
        f"{found['mean_reward']:.2f} "
        f"({', '.join(f'{found[name]:.2f}' for name in REWARD_QUANTILES)}), "
        f"{found['unsolved_questions']:.0%} of the questions unsolved, "
        f"{found['format_failures']:.0%} malformed, {found['duplicates']:.0%} of the kept "
        f"repeated, entropy {found['entropy']:.2f}, {found['searches']:.1f} searches, "
        f"{found['searches_a_turn']:.1f} a turn"
    )


def advice(trajectories: Sequence[Trajectory]) -> str:
    """What to change where nothing of a round is kept: by the commonest end of its episodes."""
    sampled = len(trajectories)
    trajectories = rewarded(trajectories)
    ends = collections.Counter(trajectory.stop_reason for trajectory in trajectories)
    if sampled and not ends:
        return (
            f"A search or the judge failed in all {sampled} of them: check that the retriever and "
            "the judge answer"
        )
    if not ends:
        return "It sampled nothing: raise sampling.questions_per_round"
    (end, number), share = ends.most_common(1)[0], ends[StopReason.ANSWERED] / len(trajectories)
    if end in (StopReason.TURN_LENGTH, StopReason.TRAJECTORY_LENGTH):
        return (
            f"{number} of them ended as {end}: raise agent.max_turn_tokens or "
            "agent.max_trajectory_tokens"
        )
    if share < 0.5:
        return (
            f"{number} of them ended as {end}: the policy does not know the format, raise "
            "warmup.steps"
        )
    best = max(trajectory.reward for trajectory in trajectories)
    return (
        f"Most of them answered, and earned {best:.2f} at most: raise method.max_attempts or "
        "warmup.steps, or what a reward of your own gives at best"
    )
