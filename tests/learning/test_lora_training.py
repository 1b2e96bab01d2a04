"""Training with adapters: what changes, what stays, what is saved, and what the engine receives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.log_probs import token_log_probs
from mujica_jax.learning.losses.mle import MLE
from mujica_jax.learning.optimizer import schedule
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import FitResult, Trainer, TrainState, fit
from mujica_jax.models.layers import projections
from tests.helpers.packed_rows import MODEL as ONE_LAYER
from tests.helpers.packed_rows import TRAINER, random_conversations, tiny_decoder

MODEL = dataclasses.replace(ONE_LAYER, num_layers=2)
LORA = dataclasses.replace(TRAINER, lora_rank=2, lora_alpha=4.0)
ROWS = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
SCHEDULE = schedule(peak=1e-1, end_value=1e-2, total_steps=6)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(MODEL)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(MODEL, LORA)


def run(trainer: Trainer, state: TrainState, steps: int = 6, **options) -> FitResult:
    batches = trainer.batches(ROWS, seed=3, step=int(state.step))
    return fit(trainer, state, batches, schedule=SCHEDULE, steps=steps, **options)


@pytest.fixture(scope="module")
def trained(trainer, decoder) -> TrainState:
    return run(trainer, trainer.initial_state(decoder)).state


def split(state: TrainState) -> tuple[nnx.State, nnx.State]:
    """Return the adapters and the rest of the parameters."""
    adapters, rest = nnx.split_state(state.params, nnx.LoRAParam, ...)
    return adapters, rest


def assert_same(state, expected, tolerance: float = 0.0) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), state, expected
    )


@pytest.mark.slow
def test_a_step_is_adamw_on_the_gradient_through_merged_weights(trainer, decoder):
    """The expected gradient is the chain rule through W + (alpha / rank) A B, written out."""
    batch = ROWS.batch(slice(0, TRAINER.batch_size))
    # after one step B is not zero, so A has a gradient too
    state = run(trainer, trainer.initial_state(decoder), 1).state
    graph = nnx.graphdef(decoder)
    adapters, rest = jax.tree.map(jnp.copy, split(state))

    def merged(adapters) -> nnx.State:
        changed = {path: leaf[...] for path, leaf in nnx.to_flat_state(rest)}
        flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(adapters)}
        for weight in projections(MODEL):
            a = flat[("layers", f"{weight.name}_lora_a")]
            b = flat[("layers", f"{weight.name}_lora_b")]
            path = ("layers", weight.name)
            update = 2.0 * jnp.einsum("lir,lro->lio", a, b)
            changed[path] = changed[path] + update.reshape(changed[path].shape)
        return nnx.from_flat_state(
            (path, nnx.Param(value)) for path, value in sorted(changed.items())
        )

    @jax.jit
    def gradient_of(adapters):
        return jax.value_and_grad(
            lambda adapters: MLE()(nnx.merge(graph, merged(adapters)), batch)[0]
        )(adapters)

    loss, gradient = gradient_of(adapters)
    zero_rate = schedule(peak=0.0, end_value=0.0, total_steps=1)
    still, metrics = trainer.train_step(jax.tree.map(jnp.copy, state), batch, zero_rate)
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(
        float(optax.global_norm(gradient)), rel=1e-4
    )
    # The first moment says the gradient itself: m := b1 m + (1 - b1) g min(1, clip / |g|).
    clipped = min(1.0, LORA.clip_norm / float(metrics["grad_norm"]))
    before = state.opt_state[1].mu
    after = still.opt_state[1].mu
    expected = jax.tree.map(
        lambda m, g: LORA.b1 * m + (1 - LORA.b1) * clipped * g, before, gradient
    )
    assert_same(after, expected, 1e-6)


def test_training_moves_every_adapter_and_no_weight(trainer, decoder, trained):
    adapters, rest = split(trained)
    jax.tree.map(np.testing.assert_array_equal, rest, nnx.state(decoder))
    fresh, _ = split(trainer.initial_state(decoder))
    assert all(
        (a != b).all()
        for a, b in zip(jax.tree.leaves(adapters), jax.tree.leaves(fresh), strict=True)
    )


def test_the_optimiser_keeps_moments_of_adapters_only(trained):
    adapters = sum(leaf.size for leaf in jax.tree.leaves(split(trained)[0]))
    moments = sum(leaf.size for leaf in jax.tree.leaves(trained.opt_state) if leaf.ndim)
    assert moments == 2 * adapters


def test_training_lowers_the_loss(trainer, decoder):
    losses = []
    chosen = schedule(peak=1e-1, end_value=0.0, total_steps=40)
    state = trainer.initial_state(decoder)
    fit(
        trainer,
        state,
        trainer.batches(ROWS, seed=0),
        schedule=chosen,
        steps=40,
        on_step=lambda metrics: losses.append(metrics.loss),
    )
    assert losses[-1] < 0.95 * losses[0], "the frozen model is a random one"


def test_resumed_equals_uninterrupted_bit_for_bit(trainer, decoder, trained, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(run(trainer, trainer.initial_state(decoder), 4).state, {})
    checkpoints.finish()
    restored, _ = Checkpoints(tmp_path, keep=1).restore_latest(trainer.abstract_state())
    resumed = run(trainer, restored).state
    jax.tree.map(np.testing.assert_array_equal, resumed, trained)


def test_the_policy_is_a_plain_decoder_that_scores_as_the_trained_one(trainer, decoder, trained):
    alone = trainer.decoder(trained)
    assert nnx.graphdef(alone) == nnx.graphdef(decoder)
    batch = ROWS.batch(slice(None))
    scores = trainer.score(trained, ROWS)
    np.testing.assert_allclose(nnx.jit(token_log_probs)(alone, batch), scores, atol=1e-5)
    assert np.abs(scores - trainer.score(trainer.initial_state(decoder), ROWS)).max() > 0.1
    assert_same(nnx.state(alone), trainer.policy(trained))


def test_the_seed_draws_the_adapters(trainer, decoder):
    def adapters_of_seed(seed: int) -> nnx.State:
        adapters, _ = split(trainer.initial_state(decoder, seed=seed))
        return adapters

    def query_adapter(adapters: nnx.State) -> jax.Array:
        return dict(nnx.to_flat_state(adapters))[("layers", "query_kernel_lora_a")][...]

    first = adapters_of_seed(0)
    assert_same(first, adapters_of_seed(0))
    assert (query_adapter(first) != query_adapter(adapters_of_seed(1))).all()


def test_rank_and_alpha_each_change_the_program():
    def program(**changes) -> str:
        return Trainer(MODEL, dataclasses.replace(LORA, **changes)).lower_step().as_text()

    assert (
        len({program(), program(lora_rank=3), program(lora_alpha=8.0), program(lora_rank=0)}) == 4
    )
    assert program(lora_rank=0) == program(lora_rank=0, lora_alpha=8.0)


def test_a_rank_that_the_model_cannot_have_is_refused():
    with pytest.raises(
        UserError, match=r"lora_rank is 17, but .* 16 x 16: use a rank of at most 16"
    ):
        Trainer(MODEL, dataclasses.replace(LORA, lora_rank=17))
