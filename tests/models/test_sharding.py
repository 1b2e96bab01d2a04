"""Rules and refusals of the device mesh, and the same numbers on eight devices as on one."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mujica_jax.errors import UserError
from mujica_jax.models import sharding
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import from_hugging_face
from mujica_jax.models.sharding import make_mesh, partition_spec, shardings_of
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_models import filled_decoder

CONFIG = from_hugging_face(
    {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
)
# Only sizes matter to the rules, so these need no devices.
MESH = AbstractMesh((2, 4, 8), ("data", "fsdp", "tensor"))


def test_a_kernel_is_split_over_fsdp_and_tensor():
    axes = ("layers", "embed", "heads", "head_dim")
    assert partition_spec(axes, (3, 64, 16, 16), MESH) == PartitionSpec(
        None, "fsdp", "tensor", None
    )
    assert partition_spec(("norm",), (63,), MESH) == PartitionSpec(None)


def test_few_key_heads_are_replicated():
    assert partition_spec(("embed", "kv_heads", "head_dim"), (64, 2, 16), MESH) == PartitionSpec(
        "fsdp", None, None
    )


def test_an_axis_of_size_one_is_whole_everywhere():
    """The scales of kernels in eight bits have such an axis."""
    assert partition_spec(("layers", "mlp", "embed"), (3, 1, 64), MESH) == PartitionSpec(
        None, None, "fsdp"
    )


def test_an_indivisible_axis_is_refused_with_what_would_work():
    with pytest.raises(
        UserError,
        match=r"axis heads of size 12 .* tensor of size 8: use tensor of size 1, 2, 3, 4, 6 or 12",
    ):
        partition_spec(("embed", "heads", "head_dim"), (64, 12, 16), MESH)


def test_a_mesh_axis_used_twice_is_refused():
    with pytest.raises(Exception, match=r"at most one positional dimension"):
        NamedSharding(MESH, partition_spec(("heads", "mlp"), (16, 48), MESH))


def test_too_many_devices_are_refused_with_both_numbers():
    available = jax.device_count()
    with pytest.raises(
        UserError,
        match=f"needs {8 * available} devices, but {available} are available.*fsdp={available}",
    ):
        make_mesh(2, 2, 2 * available)


def test_an_axis_that_no_rule_knows_is_our_own_fault():
    with pytest.raises(AssertionError, match=r"'expert' has no rule"):
        partition_spec(("expert",), (4,), MESH)


def test_optimiser_state_is_laid_out_like_its_weights():
    mesh = make_mesh(1, 1, 1)
    decoder = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(Decoder(CONFIG, rngs=nnx.Rngs(0)), optax.adamw(1e-3), wrt=nnx.Param)
    )
    weights = shardings_of(decoder, mesh)
    state = shardings_of(optimizer, mesh)
    assert jax.tree.structure(weights) == jax.tree.structure(nnx.state(decoder))
    momentum = state["opt_state"][0]["mu"]["layers"]["gate_kernel"]
    assert weights["layers"]["gate_kernel"].get_value().spec == PartitionSpec(
        None, "fsdp", "tensor"
    )
    assert momentum.get_value().spec == PartitionSpec(None, "fsdp", "tensor")
    assert state["step"].get_value().spec == PartitionSpec()


def test_every_logical_axis_of_every_weight_has_a_rule_and_every_rule_a_weight():
    states = jax.tree.leaves(
        nnx.state(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    declared = {axis for variable in states for axis in variable.get_metadata()["logical_axes"]}
    assert declared == sharding.RULES.keys() - {"batch"}


EIGHT_DEVICES = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.sharding import make_mesh, shard_batch, shardings_of
from mujica_jax.models.weights import load_checkpoint

jax.config.update("jax_num_cpu_devices", 8)


def loss_and_gradient(decoder, tokens):
    def loss(decoder):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = decoder(tokens, positions, causal_self_attention(jnp.ones_like(tokens)))
        log_probabilities = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
        return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()

    return nnx.value_and_grad(loss)(decoder)


tokens = np.random.default_rng(0).integers(0, 64, (8, 16))
expected, expected_gradient = nnx.jit(loss_and_gradient)(load_checkpoint(sys.argv[1]), tokens)
for shape in [(2, 2, 2), (1, 2, 4), (1, 8, 1)]:
    mesh = make_mesh(*shape)
    decoder = load_checkpoint(sys.argv[1], mesh=mesh)
    kernel = decoder.layers.gate_kernel[...]
    assert kernel.addressable_shards[0].data.size * shape[1] * shape[2] == kernel.size, shape
    with jax.set_mesh(mesh):
        loss, gradient = nnx.jit(loss_and_gradient)(decoder, shard_batch(tokens, mesh))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected_gradient)
    wanted = jax.tree.leaves(shardings_of(decoder, mesh))
    for leaf, sharding in zip(jax.tree.leaves(nnx.state(decoder)), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
print("equal")
"""


@pytest.mark.slow
def test_eight_devices_give_the_loss_and_gradient_of_one(tmp_path):
    save_checkpoint(filled_decoder(CONFIG), tmp_path / "model")
    finished = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=HANG_SECONDS,
    )
    assert finished.stdout == "equal\n", finished.stderr


def test_constrain_leaves_arrays_alone_without_a_mesh():
    array = jnp.ones((3, 5))
    assert sharding.constrain(array, ("batch", None)) is array


def test_over_several_slices_the_data_axis_alone_crosses_the_network():
    @dataclasses.dataclass(frozen=True)
    class Device:  # of any kind but a TPU, whose coordinates would be asked for
        id: int
        slice_index: int
        process_index: int = 0
        platform: str = "none"
        device_kind: str = "none"

    chips: list[Any] = [Device(id=n, slice_index=n // 4) for n in range(8)]
    for data, fsdp in ((2, 4), (4, 2)):
        mesh = make_mesh(data, fsdp, 1, chips)
        for number, row in enumerate(mesh.devices):
            slices = {chip.slice_index for chip in row.flat}
            assert slices == ({0} if number < data // 2 else {1})
        assert len(mesh.devices) == data
    with pytest.raises(UserError, match="is 1, but the job has 2 slices"):
        make_mesh(1, 8, 1, chips)
