"""Shard arrays over a device mesh with the axes `data`, `fsdp` and `tensor`.

    data     splits the rows of a batch, and copies the weights
    fsdp     splits the rows of a batch, the weights and the optimiser state
    tensor   splits the heads, the MLP and the vocabulary

Each weight declares the logical axis of each of its dimensions (`layers.Weight`), and `RULES` maps
logical axes to mesh axes. To try another layout, change `RULES`. Initialisation, restoring, import
and the ahead-of-time plan all follow it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from mujica_jax.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The mesh axes over which a logical axis is split."""

    # Without any mesh axis, every device has the whole logical axis.
    mesh_axes: tuple[str, ...] = ()
    # Whether a size that the mesh does not divide stays whole on every device. If False, such a
    # size raises UserError.
    may_replicate: bool = False


RULES: Mapping[str, Rule] = {
    # Rows of activations. `shard_batch`, which shards the inputs, needs a size that divides.
    "batch": Rule(mesh_axes=("data", "fsdp"), may_replicate=True),
    # The scan runs over this axis, so each device needs all of it.
    "layers": Rule(),
    "vocab": Rule(mesh_axes=("tensor",)),
    "embed": Rule(mesh_axes=("fsdp",)),
    "heads": Rule(mesh_axes=("tensor",)),
    # Models often have fewer key heads than the tensor axis has devices. The kernels of these heads
    # are small, so they may stay whole.
    "kv_heads": Rule(mesh_axes=("tensor",), may_replicate=True),
    "head_dim": Rule(),
    "mlp": Rule(mesh_axes=("tensor",)),
    # Scales of norms are small vectors. Gathering them would cost more than storing them whole.
    "norm": Rule(),
}


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of data x fsdp x tensor devices.

    `devices` are by default all devices of the job. A single process may have more devices than the
    mesh needs, which then uses the first ones. Several processes must use all of their devices.
    Raises UserError if the numbers do not fit.
    """
    shape = (data, fsdp, tensor)
    available = list(jax.devices() if devices is None else devices)
    mesh_size = math.prod(shape)
    must_use_all = len({device.process_index for device in available}) > 1
    slices = _num_slices(available)
    if mesh_size > len(available) or (must_use_all and mesh_size != len(available)):
        raise UserError(
            f"the mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {mesh_size} devices, but "
            f"{len(available)} are available: choose three numbers whose product is "
            f"{'' if must_use_all else 'at most '}{len(available)}, for example data={slices}, "
            f"fsdp={len(available) // slices}, tensor=1"
        )

    mesh_devices = available[:mesh_size]
    types = (AxisType.Auto,) * len(MESH_AXES)
    slices = _num_slices(mesh_devices)
    if slices == 1:
        return jax.make_mesh(shape, MESH_AXES, devices=mesh_devices, axis_types=types)

    # The network between slices is slow. Only the data axis crosses it, because its gradients are
    # summed just once per step.
    if data % slices:
        raise UserError(
            f"trainer.data_parallel_size is {data}, but the job has {slices} slices (TPU slices, or "
            f"GPU hosts): use a multiple of {slices}, because only the data axis may cross the "
            "network between slices"
        )
    grid = mesh_utils.create_hybrid_device_mesh(
        (data // slices, fsdp, tensor),
        (slices, 1, 1),
        mesh_devices,
        allow_split_physical_axes=True,
    )
    return Mesh(grid, MESH_AXES, axis_types=types)


def _num_slices(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices, or GPU hosts, that the devices belong to."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def partition_spec(
    logical_axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Return the mesh axes over which each dimension of a weight is split.

    `logical_axes` names the logical axis of each dimension of `shape`. Raises UserError for a size
    that the mesh does not divide. JAX raises an error if a mesh axis is used twice.
    """
    axis_sizes = dict(mesh.shape)
    spec = []
    for axis, size in zip(logical_axes, shape, strict=True):
        assert axis is None or axis in RULES, f"logical axis {axis!r} has no rule: add it to RULES"
        rule = Rule() if axis is None else RULES[axis]
        parts = math.prod(axis_sizes[name] for name in rule.mesh_axes)
        is_divided = size % parts == 0
        # A dimension of size 1 stays whole. The scale of a kernel in eight bits has such a
        # dimension in place of the kernel's inputs.
        if not is_divided and not (rule.may_replicate or size == 1):
            divisors = [
                count for count in range(1, size + 1) if size % count == 0 and count <= mesh.size
            ]
            raise UserError(
                f"axis {axis} of size {size} cannot be split over {' x '.join(rule.mesh_axes)} of "
                f"size {parts}: use {' x '.join(rule.mesh_axes)} of size {_either(divisors)}"
            )

        if not is_divided or not rule.mesh_axes:
            spec.append(None)
        elif len(rule.mesh_axes) == 1:
            spec.append(rule.mesh_axes[0])
        else:
            spec.append(rule.mesh_axes)
    return PartitionSpec(*spec)


def shardings_of(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the NamedSharding of every array of a module, or of a state made from modules.

    The state may be abstract, and may hold optimiser state or gradients. The result has the
    structure of the state, as `jax.tree.map`, `jax.jit` and `jax.device_put` expect it. An array
    without logical axes, such as a step counter, is replicated.
    """
    state = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree

    def is_variable(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Variable)

    def leaf_sharding(leaf: Any) -> Any:
        axes = leaf.get_metadata().get("logical_axes") if is_variable(leaf) else None

        def array_sharding(array: Any) -> NamedSharding:
            if axes is None:
                return NamedSharding(mesh, PartitionSpec())
            return NamedSharding(mesh, partition_spec(axes, array.shape, mesh))

        return jax.tree.map(array_sharding, leaf)

    return jax.tree.map(leaf_sharding, state, is_leaf=is_variable)


def own_rows(count: int, mesh: Mesh) -> Int[np.ndarray, " own"]:
    """Return the indexes of the rows of a batch that are on devices of this process.

    The batch has `count` rows, and the indexes rise. A single process has all rows.
    `config.checks.check_rows` has checked that the mesh divides `count`.
    """
    row_numbers = np.arange(count)
    if jax.process_count() == 1:
        return row_numbers
    indices = _row_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([row_numbers[index] for index in indices]))


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Return the arrays with their rows (leading dimension) split over data x fsdp.

    Each process passes only its `own_rows` of the batch.
    """
    put_rows = functools.partial(jax.make_array_from_process_local_data, _row_sharding(mesh))
    return jax.tree.map(put_rows, batch)


def on_host(values: Array) -> np.ndarray:
    """Return a copy of a whole array in the memory of this host.

    If the array is split over the devices of several processes, all of them must call this
    function.
    """
    if not values.is_fully_addressable:
        from jax.experimental import multihost_utils

        values = multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)


def _row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the leading dimension over data x fsdp."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"].mesh_axes))


def constrain(array: Array, logical_axes: Sequence[str | None]) -> Array:
    """Fix the sharding of an activation under `jax.set_mesh(mesh)`.

    Otherwise the compiler may carry the sharding of the embedding, which is split over features,
    through the whole network. Without a mesh, or inside `shard_map`, the array is returned as it
    is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.axis_names != MESH_AXES:
        return array
    # Inside `shard_map` an axis is not Auto.
    if any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        return array
    return jax.lax.with_sharding_constraint(array, partition_spec(logical_axes, array.shape, mesh))


def _either(numbers: Sequence[int]) -> str:
    """Return the numbers as a phrase, such as "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
