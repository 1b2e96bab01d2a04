"""Decoders for tests."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig


def filled_decoder(config: DecoderConfig, **options) -> Decoder:
    """Return a decoder with weights drawn by numpy.

    Compiling the real initialisers would take most of a test's time. Norms scatter around one and
    biases around zero, so that a swapped or missing weight shows.
    """
    draw = np.random.default_rng(0)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))

    def fill(path, leaf):
        centre = 1.0 if any("norm" in str(key) for key in path) else 0.0
        return jnp.asarray(draw.normal(centre, 0.2, leaf.shape), leaf.dtype)

    nnx.update(decoder, jax.tree_util.tree_map_with_path(fill, nnx.state(decoder)))
    return decoder
