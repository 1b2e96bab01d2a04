"""Make what a round of GRPO or DAPO samples ready for learning.

This gives groups with their advantages, packed rows with the columns of the loss, and the figures
of the round. Called by `methods.policy_gradient`.
"""

import dataclasses
import io
from collections.abc import Callable, Sequence

import numpy as np

from mujica_jax.config.methods import GrpoConfig, PolicyGradientConfig
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.policy import DAPO, GRPO, group_advantages, importance_weights
from mujica_jax.learning.packing import PackedRows, pack, sampled_log_probs, too_long
from mujica_jax.records import Conversation, Trajectory, generated_tokens, rewarded
from mujica_jax.runs.evaluation import right_ones
from mujica_jax.runs.phases import GetState
from mujica_jax.runs.round_statistics import entropy
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.select import (
    Group,
    groups_of,
    overlong_punishment,
    policy_gradient_rows,
)

Method = PolicyGradientConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a round sampled, ready for learning."""

    trajectories: list[Trajectory]
    groups: list[Group]  # all that were sampled
    learnt: list[Group]
    too_long: int  # conversations of those that are learnt, left out because they exceed a row
    rows: PackedRows  # with the columns `advantages` and `sampled_log_probs`, the engine's


def loss_of(config: Method) -> Loss:
    """Return the loss of a method, with the configured coefficients."""
    loss = GRPO if isinstance(config, GrpoConfig) else DAPO
    return loss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_weighted=config.importance_cap > 0,
        kl_coefficient=config.kl_coefficient,
    )


def compared_groups(config: Method, trajectories: Sequence[Trajectory]) -> list[Group]:
    """Return the groups with the rewards that are compared: overlong trajectories are punished."""

    def reward(trajectory: Trajectory) -> float:
        if not config.overlong_tokens:
            return trajectory.reward
        punishment = overlong_punishment(
            generated_tokens([trajectory]),
            limit_tokens=config.overlong_tokens,
            cache_tokens=config.overlong_cache_tokens,
        )
        return trajectory.reward + punishment

    return groups_of(trajectories, reward)


def is_learnt(config: Method, group: Group) -> bool:
    """Whether a group is learnt: under dynamic sampling only if it teaches something."""
    return group.teaches if config.dynamic_sampling else group.is_comparable


def prepare(run: Run, config: Method, trajectories: list[Trajectory], number: int) -> Rollout:
    """Turn a round's trajectories into training rows with advantages.

    Groups that teach nothing are left out under dynamic sampling alone: in GRPO they count in its
    mean. A group of fewer than two members is always left out. Turns that a length limit cut are
    learnt like others."""
    # Compare: the conversations of an attempt all carry its advantage over its group.
    groups = compared_groups(config, trajectories)
    learnt_groups = [group for group in groups if is_learnt(config, group)]
    selected: list[Conversation] = []
    advantage_of: dict[int, float] = {}  # by the identity of the conversation
    for group in learnt_groups:
        advantages = group_advantages(np.array([group.rewards]))[0]
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for conversation in policy_gradient_rows(trajectory):
                advantage_of[id(conversation)] = float(advantage)
                selected.append(conversation)

    # Pack the conversations that fit a row.
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
    return Rollout(
        trajectories=trajectories,
        groups=groups,
        learnt=learnt_groups,
        too_long=too_long(selected, run.config.trainer.row_tokens),
        rows=rows,
    )


def scored(
    run: Run, config: Method, rows: PackedRows, state: GetState, number: int, reference: GetState
) -> PackedRows:
    """Return the rows with the columns that the importance weights and the KL term need.

    They hold what the trainer's policy before the round, and the reference, say of the same tokens.
    Both are stored in the round's `scores.npy`: a restart in the middle of learning has neither
    policy at hand."""
    needs_weights = config.importance_cap > 0
    needs_reference = config.kl_coefficient > 0
    policies: list[GetState] = []
    if needs_weights:
        policies.append(state)
    if needs_reference:
        policies.append(reference)
    if not policies:
        return rows

    file = f"rounds/{number:04d}/scores.npy"
    scores = score_once(
        run, file, lambda: np.stack([run.trainer.score(policy(), rows) for policy in policies])
    )
    assert scores.shape[1:] == rows.tokens.shape, (
        f"{file} scores rows {scores.shape[1:]}, not {rows.tokens.shape}"
    )
    if needs_reference:
        rows = rows.with_columns(reference_log_probs=scores[-1])
    if needs_weights:
        trainer_log_probs = scores[0]
        engine_log_probs = rows.columns["sampled_log_probs"]
        weights = importance_weights(trainer_log_probs, engine_log_probs, cap=config.importance_cap)
        rows = rows.with_columns(sampled_log_probs=trainer_log_probs, importance_weights=weights)
    return rows


def score_once(run: Run, file: str, score: Callable[[], np.ndarray]) -> np.ndarray:
    """Return what the trainer's policies say of rows.

    It is computed once in the life of a run, and stored in `file`."""
    if not distributed.broadcast(file, lambda: run.store.exists(file)):
        run.generator.release_weights()
        with run.clock.stage("scoring"):
            scores = score()
        if distributed.is_primary():
            content = io.BytesIO()
            np.save(content, scores, allow_pickle=False)
            run.store.create(file, content.getvalue())
        distributed.barrier(file)
    return np.load(io.BytesIO(run.store.read(file)), allow_pickle=False)


def figures(
    run: Run, config: Method, rollout: Rollout, rows: PackedRows | None
) -> dict[str, float | int]:
    """Return the round's line of metrics.jsonl. `rows` are those that were learnt."""
    groups = rollout.groups
    trajectories = rewarded(rollout.trajectories)

    # Which attempts of each group are right.
    right = right_ones(run.task.questions("train"), trajectories, run.task.rule)
    right_ids = {id(trajectory) for trajectory in right}
    is_right_by_group: list[list[bool]] = []
    for group in groups:
        if group.trajectories:
            is_right_by_group.append(
                [id(trajectory) in right_ids for trajectory in group.trajectories]
            )

    values: dict[str, float | int] = {
        "mean_reward": _mean([trajectory.reward for trajectory in trajectories]),
        "mean_compared_reward": _mean([reward for group in groups for reward in group.rewards]),
        "mean_searches": _mean([len(trajectory.searches) for trajectory in trajectories]),
        "trajectories": len(rollout.trajectories),
        "left_out": len(rollout.trajectories) - len(trajectories),
        "sampled_groups": len(groups),
        "learnt_groups": len(rollout.learnt) if rows else 0,
        "dropped_groups": len(groups) - len(rollout.learnt),
        "equal_groups": sum(group.is_comparable and not group.teaches for group in groups),
        "degenerate_groups": sum(not group.is_comparable for group in groups),
        "all_right_share": _mean([all(is_right) for is_right in is_right_by_group]),
        "all_wrong_share": _mean([not any(is_right) for is_right in is_right_by_group]),
        "entropy_estimate": entropy(trajectories),
        "too_long": rollout.too_long,
    }

    # The parts of a reward, where it has some.
    part_names: set[str] = set()
    for trajectory in trajectories:
        part_names.update(trajectory.rewards_by_part)
    for name in sorted(part_names):
        rewards = [trajectory.rewards_by_part.get(name, 0.0) for trajectory in trajectories]
        values[f"reward_{name}"] = _mean(rewards)

    # The importance weights, where they are used.
    if rows is not None and "importance_weights" in rows.columns:
        weights = rows.columns["importance_weights"][rows.loss_mask]
        is_truncated = weights >= np.float32(config.importance_cap)
        values["mean_importance_weight"] = _mean(weights.tolist())
        values["truncated_share"] = _mean(is_truncated.tolist())
    return values


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
