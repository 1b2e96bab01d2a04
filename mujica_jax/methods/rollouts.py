"""What a round of GRPO or DAPO samples, made ready for learning: groups with their advantages,
packed rows with the columns of the loss, and the figures of the round. Called by
`methods.policy_gradient`.
"""

import dataclasses
import io
from collections.abc import Callable, Sequence

import numpy as np

from mujica_jax.config.methods import GrpoConfig, PolicyGradientConfig
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.policy import DAPO, GRPO, group_advantages, importance_weights
from mujica_jax.methods.evaluation import right_ones
from mujica_jax.methods.phases import GetState
from mujica_jax.methods.round_statistics import entropy
from mujica_jax.methods.run import Run
from mujica_jax.records import Conversation, Trajectory, generated_tokens, rewarded
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.groups import Group, groups_of, overlong_punishment
from mujica_jax.trajectories.packing import PackedRows, pack, sampled_log_probs, too_long
from mujica_jax.trajectories.select import policy_gradient_rows

Method = PolicyGradientConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    trajectories: list[Trajectory]
    groups: list[Group]  # all that were sampled
    learnt: list[Group]
    too_long: int  # conversations of those that are learnt, left out because they exceed a row
    rows: PackedRows  # with the columns `advantages` and `sampled_log_probs`, the engine's


def loss_of(config: Method) -> Loss:
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    weighted = config.importance_cap > 0
    loss = GRPO if isinstance(config, GrpoConfig) else DAPO
    return loss(**bounds, importance_weighted=weighted, kl_coefficient=config.kl_coefficient)


def compared_groups(config: Method, trajectories: Sequence[Trajectory]) -> list[Group]:
    """With the rewards that are compared: overlong trajectories are punished."""

    def reward(trajectory: Trajectory) -> float:
        if not config.overlong_tokens:
            return trajectory.reward
        limits = {
            "limit_tokens": config.overlong_tokens,
            "cache_tokens": config.overlong_cache_tokens,
        }
        return trajectory.reward + overlong_punishment(generated_tokens([trajectory]), **limits)

    return groups_of(trajectories, reward)


def is_learnt(config: Method, group: Group) -> bool:
    """Whether a group is learnt: under dynamic sampling only if it teaches something."""
    return group.teaches if config.dynamic_sampling else group.is_comparable


def prepare(run: Run, config: Method, trajectories: list[Trajectory], number: int) -> Rollout:
    """Turn a round's trajectories into training rows with advantages.

    Groups that teach nothing are left out under dynamic sampling alone: in GRPO they count in its
    mean. A group of fewer than two members is always left out. Turns that a length limit cut are
    learnt like others."""
    groups = compared_groups(config, trajectories)
    learnt = [group for group in groups if is_learnt(config, group)]
    selected: list[Conversation] = []
    advantage_of: dict[int, float] = {}  # by the identity of the conversation
    for group in learnt:
        of_group = group_advantages(np.array([group.rewards]))[0]
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True):
            conversations = policy_gradient_rows(trajectory)
            advantage_of |= {id(conversation): float(advantage) for conversation in conversations}
            selected += conversations
    conversations = run.fitting(selected)
    with run.clock.stage("packing"):
        rows = pack(
            conversations,
            row_tokens=run.config.trainer.row_tokens,
            seed=run.config.seed + number,
            columns={
                "advantages": [advantage_of[id(conversation)] for conversation in conversations],
                "sampled_log_probs": sampled_log_probs(conversations),
            },
        )
    left_out = too_long(selected, run.config.trainer.row_tokens)
    return Rollout(
        trajectories=trajectories, groups=groups, learnt=learnt, too_long=left_out, rows=rows
    )


def scored(
    run: Run, config: Method, rows: PackedRows, state: GetState, number: int, reference: GetState
) -> PackedRows:
    """With what the trainer's policy before the round, and the reference, say of the same tokens.
    Both are kept in the round's `scores.npy`: a restart in the middle of learning has neither
    policy at hand."""
    weighted, distant = config.importance_cap > 0, config.kl_coefficient > 0
    if not (weighted or distant):
        return rows
    file = f"rounds/{number:04d}/scores.npy"
    policies = [state] * weighted + [reference] * distant
    scores = score_once(
        run, file, lambda: np.stack([run.trainer.score(policy(), rows) for policy in policies])
    )
    assert scores.shape[1:] == rows.tokens.shape, (
        f"{file} scores rows {scores.shape[1:]}, not {rows.tokens.shape}"
    )
    if distant:
        rows = rows.with_columns(reference_log_probs=scores[-1])
    if weighted:
        engine = rows.columns["sampled_log_probs"]
        weights = importance_weights(scores[0], engine, cap=config.importance_cap)
        rows = rows.with_columns(sampled_log_probs=scores[0], importance_weights=weights)
    return rows


def score_once(run: Run, file: str, score: Callable[[], np.ndarray]) -> np.ndarray:
    """What the trainer's policies say of rows, computed once in the life of a run and kept in
    `file`."""
    if not distributed.broadcast(file, lambda: run.store.exists(file)):
        run.generator.release_weights()
        with run.clock.stage("scoring"):
            found = score()
        if distributed.is_primary():
            content = io.BytesIO()
            np.save(content, found, allow_pickle=False)
            run.store.create(file, content.getvalue())
        distributed.barrier(file)
    return np.load(io.BytesIO(run.store.read(file)), allow_pickle=False)


def figures(
    run: Run, config: Method, rollout: Rollout, rows: PackedRows | None
) -> dict[str, float | int]:
    """The round's line of metrics.jsonl; `rows` are those that were learnt."""
    groups = rollout.groups
    trajectories = rewarded(rollout.trajectories)
    right = {id(t) for t in right_ones(run.task.questions("train"), trajectories, run.task.rule)}
    right_of = [
        [id(t) in right for t in group.trajectories] for group in groups if group.trajectories
    ]
    found = {
        "mean_reward": _mean([t.reward for t in trajectories]),
        "mean_compared_reward": _mean([reward for group in groups for reward in group.rewards]),
        "mean_searches": _mean([len(t.searches) for t in trajectories]),
        "trajectories": len(rollout.trajectories),
        "left_out": len(rollout.trajectories) - len(trajectories),
        "sampled_groups": len(groups),
        "learnt_groups": len(rollout.learnt) if rows else 0,
        "dropped_groups": len(groups) - len(rollout.learnt),
        "equal_groups": sum(group.is_comparable and not group.teaches for group in groups),
        "degenerate_groups": sum(not group.is_comparable for group in groups),
        "all_right_share": _mean([all(of_group) for of_group in right_of]),
        "all_wrong_share": _mean([not any(of_group) for of_group in right_of]),
        "entropy_estimate": entropy(trajectories),
        "too_long": rollout.too_long,
    }
    for part in sorted({name for t in trajectories for name in t.rewards_by_part}):
        found[f"reward_{part}"] = _mean([t.rewards_by_part.get(part, 0.0) for t in trajectories])
    if rows is not None and "importance_weights" in rows.columns:
        weights = rows.columns["importance_weights"][rows.loss_mask]
        found["mean_importance_weight"] = _mean(weights.tolist())
        found["truncated_share"] = _mean((weights >= np.float32(config.importance_cap)).tolist())
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
