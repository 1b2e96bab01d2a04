"""The trainer under every loss but maximum likelihood (`test_trainer.py`): its own metric moves, parts add up, and a
resume is exact."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from packed_rows import MODEL, TRAINER, random_conversations, tiny_decoder

from mujica_jax.errors import UserError
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.losses import find_loss
from mujica_jax.learning.losses.loss import Loss
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.losses.policy import GRPO, group_advantages
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.trainer import StepMetrics, Trainer, TrainState, fit
from mujica_jax.trajectories.packing import PackedRows, pack

CONVERSATIONS = random_conversations(32, longest=16)
REWARDS = np.random.default_rng(0).random((8, 4))
SCHEDULE = schedule(peak=1e-2, end_value=1e-3, total_steps=8)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {
    "grpo": find_loss("grpo", **CLIP, kl_coefficient=0.01),
    "dapo": find_loss("dapo", **CLIP),
    "dpo": find_loss("dpo", beta=0.5),
}


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def rows(decoder) -> PackedRows:
    """With the columns of all losses; what the policy was before training comes from `Trainer.score`, as users get
    it."""
    advantages = group_advantages(REWARDS).ravel()
    packed = pack(CONVERSATIONS, row_tokens=TRAINER.row_tokens, seed=0, columns={"advantages": advantages}, pairs=True)
    trainer = Trainer(MODEL, TRAINER)
    before = trainer.score(trainer.initial_state(decoder), packed)
    return packed.with_columns(sampled_log_probs=before, reference_log_probs=before)


def train(
    trainer: Trainer, state: TrainState, rows: PackedRows, steps: int, place: dict | None = None
) -> tuple[TrainState, list[StepMetrics], dict]:
    seen: list[StepMetrics] = []
    result = fit(trainer, state, rows, schedule=SCHEDULE, steps=steps, seed=3, input_state=place, on_step=seen.append)
    return result.state, seen, result.input_state


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_moves_its_own_metric_and_resumes_exactly(name, decoder, rows, tmp_path):
    trainer = Trainer(MODEL, TRAINER, LOSSES[name])
    whole, seen, _ = train(trainer, trainer.initial_state(decoder), rows, 8)
    first, last = seen[0].of_loss, seen[-1].of_loss
    if name == "dpo":
        assert first["margin"] == pytest.approx(0.0, abs=1e-6) and last["margin"] > 0.5
        assert last["accuracy"] > 0.8 > first["accuracy"]
        assert seen[0].loss == pytest.approx(np.log(2), abs=1e-6)
    else:
        assert first["mean_ratio"] == pytest.approx(1.0, abs=1e-5) and first["clipped_share"] == 0.0
        assert first["advantage_log_ratio"] == pytest.approx(0.0, abs=1e-6) and last["advantage_log_ratio"] > 0.05
        assert last["clipped_share"] > 0.0
    if name == "grpo":
        assert first["reference_kl"] == pytest.approx(0.0, abs=1e-9) and last["reference_kl"] > 0.0
    assert seen[0].values()["loss"] == seen[0].loss and first.items() <= seen[0].values().items()

    half, _, place = train(trainer, trainer.initial_state(decoder), rows, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(half, {"input": place})
    found = Checkpoints(tmp_path, keep=1).restore_latest(trainer.abstract_state())
    assert found is not None
    restored, saved = found
    resumed, after, _ = train(trainer, restored, rows, 8, json.loads(json.dumps(saved["input"])))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert after == seen[3:]


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_parts_of_a_batch_add_up_to_the_whole(name, decoder, rows):
    """Conversations, pairs and trained tokens of the parts differ: a mean over parts would weigh them alike. In the
    second step, for before it the margins are rounding."""
    whole, in_parts = (
        train(trainer, trainer.initial_state(decoder), rows, 2)
        for trainer in (
            Trainer(MODEL, dataclasses.replace(TRAINER, accumulation_steps=parts), LOSSES[name]) for parts in (1, 4)
        )
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), in_parts[0].params, whole[0].params)
    for metric, value in whole[1][1].values().items():
        assert in_parts[1][1].values()[metric] == pytest.approx(value, abs=1e-5), metric


def test_losses_are_found_by_name():
    assert find_loss("grpo", **CLIP) == GRPO(**CLIP, kl_coefficient=0.0)
    assert find_loss("mle") == MLE()


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("grop", {}, r"no loss 'grop': did you mean 'grpo'\? There are mle, grpo, dapo, dpo"),
        ("dpo", {"bta": 0.1}, r"the loss dpo has no parameter 'bta': did you mean 'beta'\?"),
        ("dapo", {"clip_low": 0.2}, r"the loss dapo is given no clip_high"),
    ],
)
def test_an_unknown_loss_or_parameter_is_answered_with_the_nearest(name, parameters, sentence):
    with pytest.raises(UserError, match=sentence):
        find_loss(name, **parameters)


def test_rows_without_a_column_that_the_loss_needs_are_refused(decoder):
    trainer = Trainer(MODEL, TRAINER, LOSSES["dapo"])
    without = pack(CONVERSATIONS, row_tokens=TRAINER.row_tokens, seed=0)
    with pytest.raises(AssertionError, match=r"needs the columns \['advantages', 'sampled_log_probs'\]"):
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
    assert seen[0].of_loss["weighted"] == -seen[0].loss
