"""The trainer under every loss but maximum likelihood (`test_trainer.py`), on trajectories of the
tiny world: its metric moves, parts add up, and a resume is exact.
"""

import asyncio
import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.policy import DAPO, GRPO, group_advantages
from mujica_jax.learning.losses.preference import DPO
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import PackedRows, pack
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from mujica_jax.records import Conversation
from tests.helpers.little_agent import agent, attempt, rewarded, tokenizer
from tests.helpers.packed_rows import MODEL as TINY
from tests.helpers.packed_rows import TRAINER as SHORT
from tests.helpers.packed_rows import tiny_decoder
from tests.helpers.tiny_worlds import small_world

MODEL = dataclasses.replace(TINY, vocab_size=tokenizer().vocab_size, max_position_embeddings=1024)
GROUPS = 8
SCHEDULE = schedule(peak=1e-2, end_value=1e-3, total_steps=8)
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {"grpo": GRPO(**CLIP, kl_coefficient=0.01), "dapo": DAPO(**CLIP), "dpo": DPO(beta=0.5)}


@functools.cache
def played() -> list[tuple[Conversation, float]]:
    """Return planner conversations with their rewards.

    Each question has an episode that is right and one that misses a fact, which serve as the pairs
    of DPO and the groups of GRPO.
    """
    world = small_world(8, GROUPS, 8, facts=4)
    player = agent(max_turn_tokens=600, max_trajectory_tokens=4000, max_observation_tokens=3000)
    rewarded_conversations = []
    for question, environment in world.demonstrations():
        for miss_rate in (0.0, 0.99):
            policy = ScriptedPolicy(tokenizer(), miss_rate=miss_rate)
            trajectory = rewarded(
                asyncio.run(player.run(attempt(question), environment, policy)), question
            )
            rewarded_conversations.append((trajectory.conversations[0], trajectory.reward))
    assert [reward for _, reward in rewarded_conversations] == [1.0, 0.0] * GROUPS
    return rewarded_conversations


CONVERSATIONS = [conversation for conversation, _ in played()]
REWARDS = np.array([reward for _, reward in played()]).reshape(GROUPS, 2)
LONGEST_PAIR = max(
    len(first.token_ids) + len(second.token_ids)
    for first, second in zip(CONVERSATIONS[::2], CONVERSATIONS[1::2], strict=True)
)
TRAINER = dataclasses.replace(SHORT, sequence_length=64 * -(-LONGEST_PAIR // 64), batch_size=4)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(MODEL)


@pytest.fixture(scope="module")
def rows(decoder) -> PackedRows:
    """Return rows with the columns of all losses.

    The numbers of the policy before training come from `Trainer.score`, as users get them.
    """
    advantages = group_advantages(REWARDS).ravel()
    packed = pack(
        CONVERSATIONS,
        sequence_length=TRAINER.sequence_length,
        seed=0,
        columns={"advantages": advantages},
        pairs=True,
    )
    trainer = Trainer(MODEL, TRAINER)
    before = trainer.score(trainer.initial_state(decoder), packed)
    return packed.with_columns(sampled_log_probs=before, reference_log_probs=before)


def train(
    trainer: Trainer, state: TrainState, rows: PackedRows, steps: int, place: dict | None = None
) -> tuple[TrainState, list[StepMetrics], dict]:
    seen: list[StepMetrics] = []
    batches = trainer.batches(rows, seed=3)
    if place is not None:
        batches.set_state(place)
    result = fit(trainer, state, batches, schedule=SCHEDULE, steps=steps, on_step=seen.append)
    return result.state, seen, result.input_state


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_moves_its_own_metric_and_resumes_exactly(name, decoder, rows, tmp_path):
    trainer = Trainer(MODEL, TRAINER, LOSSES[name])
    whole, seen, _ = train(trainer, trainer.initial_state(decoder), rows, 8)
    first = seen[0].loss_metrics
    last = seen[-1].loss_metrics
    if name == "dpo":
        assert first["margin"] == pytest.approx(0.0, abs=1e-4)
        assert last["margin"] > 0.5
        assert last["accuracy"] > 0.8
        assert seen[0].loss == pytest.approx(np.log(2), abs=1e-4)
    else:
        assert first["mean_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert first["clipped_share"] == 0.0
        assert first["advantage_log_ratio"] == pytest.approx(0.0, abs=1e-4)
        assert last["advantage_log_ratio"] > 0.05
        assert last["clipped_share"] > 0.0
    if name == "grpo":
        assert first["reference_kl"] == pytest.approx(0.0, abs=1e-9)
        assert last["reference_kl"] > 0.0
    assert seen[0].values()["loss"] == seen[0].loss
    assert first.items() <= seen[0].values().items()

    half, _, place = train(trainer, trainer.initial_state(decoder), rows, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(half, {"input": place})
    checkpoint = Checkpoints(tmp_path, keep=1).restore_latest(trainer.abstract_state())
    assert checkpoint is not None
    restored, saved = checkpoint
    resumed, after, _ = train(trainer, restored, rows, 8, json.loads(json.dumps(saved["input"])))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert after == seen[3:]


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_parts_of_a_batch_add_up_to_the_whole(name, decoder, rows):
    """Conversations, pairs and trained tokens of the parts differ, so a mean over parts would weigh
    them alike. The second step is compared: before it the margins are rounding, and Adam makes
    much of the rounding of gradients near zero.
    """

    def two_steps(parts: int) -> tuple[TrainState, list[StepMetrics], Any]:
        config = dataclasses.replace(TRAINER, accumulation_steps=parts)
        trainer = Trainer(MODEL, config, LOSSES[name])
        return train(trainer, trainer.initial_state(decoder), rows, 2)

    whole, metrics_of_whole, _ = two_steps(parts=1)
    in_parts, metrics_in_parts, _ = two_steps(parts=4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), in_parts.params, whole.params
    )
    for metric, value in metrics_of_whole[1].values().items():
        assert metrics_in_parts[1].values()[metric] == pytest.approx(value, abs=1e-5), metric


def test_rows_without_a_column_that_the_loss_needs_are_refused(decoder):
    trainer = Trainer(MODEL, TRAINER, LOSSES["dapo"])
    without = pack(CONVERSATIONS, sequence_length=TRAINER.sequence_length, seed=0)
    with pytest.raises(
        AssertionError, match=r"needs the columns \['advantages', 'sampled_log_probs'\]"
    ):
        train(trainer, trainer.initial_state(decoder), without, 1)


def test_a_new_loss_is_a_class_with_one_function(decoder, rows):
    @dataclasses.dataclass(frozen=True)
    class Weighted(Loss):
        """Maximum likelihood weighed by advantages."""

        @property
        def columns(self) -> tuple[str, ...]:
            return ("advantages",)

        def of(self, log_probs, batch, counts):
            weighted = (log_probs * batch.columns["advantages"]).sum() / counts["trained_tokens"]
            return -weighted, {"weighted": weighted}

    trainer = Trainer(MODEL, TRAINER, Weighted())
    _, seen, _ = train(trainer, trainer.initial_state(decoder), rows, 2)
    assert seen[0].loss_metrics["weighted"] == -seen[0].loss
