"""The optimizer, its schedule and its rounding, compared with optax and with numbers worked out by
hand.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mujica_jax.config.files import load_config
from mujica_jax.errors import UserError
from mujica_jax.learning.checkpoints import Checkpoints
from mujica_jax.learning.optimizer import (
    apply_updates,
    decayed,
    learning_rate,
    make_optimizer,
    schedule,
)
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.models.decoder import Decoder
from tests.helpers.packed_rows import (
    MODEL,
    SHORT_SCHEDULE,
    TRAINER,
    random_conversations,
    tiny_decoder,
)


def rates(steps: range, **settings: float) -> list[float]:
    chosen = schedule(**settings)  # pyright: ignore[reportArgumentType]
    return [
        float(rate) for rate in jax.vmap(lambda step: learning_rate(chosen, step))(jnp.array(steps))
    ]


def update(config, gradient, params, steps=1):
    """Return the parameters after some steps with this gradient at learning rate 1."""
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    for _ in range(steps):
        direction, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(lambda parameter, change: parameter - change, params, direction)
    return params


def test_the_rate_rises_linearly_and_falls_along_half_a_cosine():
    assert rates(range(0, 9, 2), peak=1.0, end_value=0.0, total_steps=8) == pytest.approx(
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0], abs=1e-6
    )
    assert rates(
        range(3), peak=3.0, end_value=1.0, total_steps=10, warmup_steps=2
    ) == pytest.approx([1.5, 3.0, 3.0])


def test_the_rate_ends_at_its_end_value_and_stays_there():
    assert rates(
        range(10, 13), peak=1.0, end_value=0.25, total_steps=10, warmup_steps=3
    ) == pytest.approx([0.25] * 3)


def test_the_published_rates_are_those_of_the_configuration_for_7b():
    """Source: Mujica-MyGO, appendix D.

    AdamW, cosine, warm-up from 1e-5 to 1e-6, MyGO from 5e-7 to 1e-8.
    """
    config = load_config("two_wiki_text_v5e")
    for section, peak, end in ((config.warmup, 1e-5, 1e-6), (config.method, 5e-7, 1e-8)):
        published = rates(
            range(0, 101, 50),
            peak=section.learning_rate,
            end_value=section.end_learning_rate,
            total_steps=100,
        )
        assert published == pytest.approx([peak, (peak + end) / 2, end], rel=1e-5)


def test_updates_too_small_for_bfloat16_count_on_average():
    """The spacing of bfloat16 above 1 is 2^-7.

    A thousand steps of 2^-13 are 2^-3, and rounding to nearest would drop every one.
    """
    params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    steps = 1000

    @jax.jit
    def walk(params):
        def one_step(params, step):
            return apply_updates(
                params, {"kernel": jnp.ones((64, 64))}, jnp.float32(-(2.0**-13)), step
            ), None

        return jax.lax.scan(one_step, params, jnp.arange(steps))[0]

    after = np.asarray(walk(params)["kernel"], np.float32)
    assert after.mean() == pytest.approx(1 + steps * 2.0**-13, abs=2e-3)
    assert len(np.unique(after)) > 3, "elements are rounded one by one"


def test_float32_parameters_are_moved_exactly():
    params = {"kernel": jnp.array([0.1, 3.0])}
    direction = {"kernel": jnp.array([0.7, -1e-7])}
    after = apply_updates(params, direction, jnp.float32(0.3), jnp.int32(0))
    np.testing.assert_array_equal(
        after["kernel"], params["kernel"] - jnp.float32(0.3) * direction["kernel"]
    )


@pytest.mark.parametrize("value", [1.0, -2.5, 0.0, np.inf, -np.inf])
def test_what_bfloat16_holds_is_kept(value):
    after = apply_updates(
        {"a": jnp.full(1000, value, jnp.bfloat16)},
        {"a": jnp.zeros(1000)},
        jnp.float32(1.0),
        jnp.int32(3),
    )
    assert np.all(np.asarray(after["a"], np.float32) == value)


def test_a_schedule_that_cannot_be_is_refused_with_both_values():
    with pytest.raises(UserError, match=r"from 0\.1 down to 0\.2"):
        schedule(peak=0.1, end_value=0.2, total_steps=10)
    with pytest.raises(UserError, match=r"20 warm-up steps do not fit into 10 steps"):
        schedule(peak=0.1, end_value=0.0, total_steps=10, warmup_steps=20)


def test_only_matrices_decay():
    config = dataclasses.replace(MODEL, family="qwen2", tie_word_embeddings=False)
    params = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    by_name = {path[-1]: leaf.get_value() for path, leaf in nnx.to_flat_state(decayed(params))}
    free = {name for name, is_decayed in by_name.items() if not is_decayed}
    assert free == {
        "attention_norm",
        "mlp_norm",
        "final_norm",
        "query_bias",
        "key_bias",
        "value_bias",
    }
    assert {"embedding", "head", "query_kernel", "down_kernel"} <= by_name.keys() - free


def test_two_steps_are_those_of_optax_adamw():
    params = {"kernel": jnp.array([[0.5, -1.0]]), "norm": jnp.array([1.0])}
    gradient = {"kernel": jnp.array([[0.1, -0.2]]), "norm": jnp.array([0.3])}
    reference = optax.adamw(
        1.0, b1=TRAINER.b1, b2=TRAINER.b2, weight_decay=TRAINER.weight_decay, mask=decayed
    )
    expected = params
    state = reference.init(params)
    for _ in range(2):
        direction, state = reference.update(gradient, state, expected)
        expected = optax.apply_updates(expected, direction)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        update(TRAINER, gradient, params, 2),
        expected,
    )


def test_the_norm_of_the_whole_gradient_is_clipped():
    # Adam forgets the scale of one gradient, so the first moment itself is looked at: (1 - b1) *
    # gradient * 1 / 5.
    params = {"kernel": jnp.zeros((1, 1)), "norm": jnp.zeros(1)}
    gradient = {"kernel": jnp.array([[3.0]]), "norm": jnp.array([4.0])}
    optimizer = make_optimizer(TRAINER)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    moments = optax.tree.get(state, "mu")
    assert float(moments["kernel"][0, 0]) == pytest.approx((1 - TRAINER.b1) * 3 / 5)
    assert float(moments["norm"][0]) == pytest.approx((1 - TRAINER.b1) * 4 / 5)


@pytest.mark.parametrize(
    ("field", "value"), [("weight_decay", 0.5), ("b1", 0.5), ("b2", 0.5), ("clip_norm", 0.01)]
)
def test_every_setting_changes_the_update(field, value):
    params = {"kernel": jnp.ones((1, 2))}
    gradients = [jnp.array([[0.3, -0.1]]), jnp.array([[0.5, 0.4]])]

    def after_two_steps(config):
        optimizer = make_optimizer(config)
        now = params
        state = optimizer.init(now)
        for gradient in gradients:
            direction, state = optimizer.update({"kernel": gradient}, state, now)
            now = optax.apply_updates(now, direction)
        return np.asarray(now["kernel"])

    assert not np.allclose(
        after_two_steps(TRAINER), after_two_steps(dataclasses.replace(TRAINER, **{field: value}))
    )


def test_muon_moves_matrices_along_orthogonal_directions_of_adams_size():
    config = dataclasses.replace(TRAINER, optimizer="muon", weight_decay=0.0)
    params = nnx.state(Decoder(MODEL, rngs=nnx.Rngs(0)))
    gradient = jax.tree.map(
        lambda array: jax.random.normal(jax.random.key(array.size), array.shape), params
    )
    optimizer = make_optimizer(config)
    muon, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    plain = make_optimizer(dataclasses.replace(config, optimizer="adamw"))
    adam, _ = jax.jit(plain.update)(gradient, plain.init(params), params)
    for name in ("query_kernel", "output_kernel", "down_kernel"):
        direction = np.asarray(muon["layers"][name][...])
        inputs = MODEL.num_heads * MODEL.head_dim if name == "output_kernel" else direction.shape[1]
        stretched = np.linalg.svd(direction.reshape(len(direction), inputs, -1), compute_uv=False)
        # Newton-Schulz stops at singular values about 1
        assert stretched.max() < 1.8 * stretched.min()
        assert 0.13 < np.sqrt(np.mean(direction**2)) < 0.27
    for path, leaf in nnx.to_flat_state(muon):
        if not path[-1].endswith("_kernel"):
            np.testing.assert_array_equal(leaf[...], dict(nnx.to_flat_state(adam))[path][...])


def test_muons_state_continues_from_a_checkpoint_bit_for_bit(tmp_path):
    trainer = Trainer(MODEL, dataclasses.replace(TRAINER, optimizer="muon"))
    rows = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)

    def fitted(state, steps):
        batches = trainer.batches(rows, seed=0, step=int(state.step))
        return fit(trainer, state, batches, schedule=SHORT_SCHEDULE, steps=steps).state

    whole = fitted(trainer.initial_state(tiny_decoder()), 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(fitted(trainer.initial_state(tiny_decoder()), 2), {})
    restored, _ = checkpoints.restore_latest(trainer.abstract_state())
    jax.tree.map(np.testing.assert_array_equal, fitted(restored, 3), whole)
