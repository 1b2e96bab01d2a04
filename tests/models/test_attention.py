"""Every attention kernel computes the same: TPU's splash kernel is run in Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.models import attention
from mujica_jax.models.attention import check_platform, resolve, segment_attention
from tests.helpers.extras import needs


def packed(
    time: int, *, heads: int, kv_heads: int, head_dim: int, seed: int = 0
) -> tuple[jax.Array, ...]:
    """Return random query, key and value over two rows.

    One row has three segments and padding, the other one whole segment.
    """
    draw = np.random.default_rng(seed)
    shapes = [(2, time, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    cuts = (np.arange(time) >= time // 4).astype(int) + (np.arange(time) >= time // 2)
    segments = np.stack([np.where(np.arange(time) < time - 7, 1 + cuts, 0), np.ones(time, int)])
    values = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]
    return (*values, jnp.asarray(segments, jnp.int32))


def with_gradients(implementation, inputs, segments) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def loss(*inputs):
        mixed = segment_attention(*inputs, segments, implementation)
        return jnp.sum(jnp.sin(mixed)), mixed

    (_, mixed), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return mixed, gradients


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention, "_splash", functools.partial(attention._splash, interpret=True))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (4, 2, 128),
        pytest.param(2, 2, 128, marks=pytest.mark.slow),
        pytest.param(4, 1, 64, marks=pytest.mark.slow),
    ],
)
def test_splash_computes_what_xla_does(interpreted, heads, kv_heads, head_dim):
    *inputs, segments = packed(128, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    (xla, results_of_xla), (splash, results_of_splash) = (
        with_gradients(kind, inputs, segments) for kind in ("xla", "splash")
    )
    np.testing.assert_allclose(splash, xla, atol=2e-5)
    for ours, theirs in zip(results_of_splash, results_of_xla, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


@needs("numba", "cpu")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "time"), [(6, 2, 16, 200), (2, 2, 16, 96), (7, 1, 20, 37)]
)
def test_blocks_compute_what_xla_does(heads, kv_heads, head_dim, time):
    """Lengths are no multiple of a block or of a tile, conversations begin within one.

    There is padding.
    """
    *inputs, segments = packed(time, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    (xla, results_of_xla), (blocks, results_of_blocks) = (
        with_gradients(kind, inputs, segments) for kind in ("xla", "blocks")
    )
    np.testing.assert_allclose(blocks, xla, atol=2e-6)
    for ours, theirs in zip(results_of_blocks, results_of_xla, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-6, atol=5e-6)
    assert not np.asarray(blocks)[0, time - 7 :].any(), "padding is 0"


@needs("numba", "cpu")
def test_blocks_of_another_conversation_are_not_multiplied():
    """NaN in the keys of another conversation does no harm. A product would spread it."""
    *inputs, segments = packed(288, heads=2, kv_heads=2, head_dim=16)
    query, key, value = inputs
    # the whole first conversation of the first row, which ends within a block
    poisoned = key.at[0, :72].set(jnp.nan)
    mixed = segment_attention(query, poisoned, value, segments, "blocks")
    assert np.isnan(mixed[0, :72]).all()
    assert not np.isnan(mixed[0, 72:]).any()


def test_the_gpu_path_computes_what_xla_does():
    inputs = packed(48, heads=4, kv_heads=2, head_dim=16)
    np.testing.assert_allclose(
        segment_attention(*inputs, "cudnn"), segment_attention(*inputs, "xla"), atol=2e-5
    )  # in float32, where cuDNN has no kernel and the same call runs on XLA


@needs("numba", "cpu")
def test_auto_takes_the_platforms_kernel(monkeypatch):
    for platform, time, chosen in (
        ("cpu", 256, "xla"),
        ("cpu", 768, "blocks"),
        ("tpu", 256, "splash"),
        ("tpu", 250, "xla"),
        ("gpu", 250, "cudnn"),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert resolve("auto", time=time) == chosen
        assert resolve("xla", time=time) == "xla"


@pytest.mark.parametrize(("kernel", "needed"), [("splash", "tpu"), ("cudnn", "gpu")])
def test_a_kernel_of_another_platform_is_refused(monkeypatch, kernel, needed):
    with pytest.raises(
        UserError, match=rf"trainer.attention {kernel} runs on {needed}, but this is cpu: use auto"
    ):
        check_platform(kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: needed)
    check_platform(kernel)
    with pytest.raises(
        UserError, match=f"trainer.attention blocks runs on cpu, but this is {needed}"
    ):
        check_platform("blocks")
