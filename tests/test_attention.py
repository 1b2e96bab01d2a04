"""Every attention kernel computes the same: TPU's splash kernel is run in Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.models import attention
from mujica_jax.models.attention import check_platform, resolve, segment_attention


def packed(time: int, *, heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random query, key and value over two rows: three segments and padding, and one whole segment."""
    draw = np.random.default_rng(seed)
    shapes = [(2, time, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    cuts = (np.arange(time) >= time // 4).astype(int) + (np.arange(time) >= time // 2)
    segments = np.stack([np.where(np.arange(time) < time - 7, 1 + cuts, 0), np.ones(time, int)])
    values = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]
    return (*values, jnp.asarray(segments, jnp.int32))


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention, "_splash", functools.partial(attention._splash, interpret=True))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 128), pytest.param(2, 2, 128, marks=pytest.mark.slow), pytest.param(4, 1, 64, marks=pytest.mark.slow)],
)
def test_splash_computes_what_xla_does(interpreted, heads, kv_heads, head_dim):
    *inputs, segments = packed(128, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def loss(implementation, *inputs):
        mixed = segment_attention(*inputs, segments, implementation)
        return jnp.sum(jnp.sin(mixed)), mixed

    (_, xla), expected = jax.value_and_grad(functools.partial(loss, "xla"), argnums=(0, 1, 2), has_aux=True)(*inputs)
    (_, splash), found = jax.value_and_grad(functools.partial(loss, "splash"), argnums=(0, 1, 2), has_aux=True)(*inputs)
    np.testing.assert_allclose(splash, xla, atol=2e-5)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


def test_the_gpu_path_computes_what_xla_does():
    inputs = packed(48, heads=4, kv_heads=2, head_dim=16)
    np.testing.assert_allclose(
        segment_attention(*inputs, "cudnn"), segment_attention(*inputs, "xla"), atol=2e-5
    )  # in float32, where cuDNN has no kernel and the same call runs on XLA


def test_auto_takes_the_platforms_kernel(monkeypatch):
    for platform, time, chosen in (
        ("cpu", 256, "xla"),
        ("tpu", 256, "splash"),
        ("tpu", 250, "xla"),
        ("gpu", 250, "cudnn"),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert resolve("auto", time=time) == chosen
        assert resolve("xla", time=time) == "xla"


@pytest.mark.parametrize(("kernel", "needed"), [("splash", "tpu"), ("cudnn", "gpu")])
def test_a_kernel_of_another_platform_is_refused(monkeypatch, kernel, needed):
    with pytest.raises(UserError, match=rf"trainer.attention {kernel} runs on {needed} and this is cpu: use auto"):
        check_platform(kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: needed)
    check_platform(kernel)
