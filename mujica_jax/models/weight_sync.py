"""Move weights from the trainer's mesh to the mesh of an engine, from device to device.

The trainer's mesh may span all hosts. The mesh of an engine has only devices of its own host. The
arrays move one after the other, and each device receives only the part that the engine needs there.

If the trainer's mesh spans several hosts, an array moves in two steps:

1. The devices of all hosts form groups, each as large as an engine. The groups form one mesh with
   the axes (copy, data, fsdp, tensor), in which each group holds the array once. One transfer, in
   which all processes take part, moves the array from the trainer's mesh to this mesh.
2. The engine's devices are one of the groups. The engine makes its array from the parts that these
   devices now hold, without a copy.

There are no such groups if the size of an engine does not divide the number of devices of a host,
for example three and four. The whole array then goes to every device first.

`inference.engine` calls this module.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from mujica_jax.models.sharding import MESH_AXES, shardings_of

# Name of the mesh axis that numbers the groups of devices.
COPY = "copy"


def sync_weights(weights: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Return the weights sharded over `mesh`, or for None on the first device of this process.

    All devices of `mesh` belong to this process. An array that already has the right sharding is
    not copied.
    """
    if mesh is None:
        first_device = SingleDeviceSharding(jax.local_devices()[0])
        targets = jax.tree.map(lambda array: first_device, weights)
    else:
        targets = shardings_of(weights, mesh)
    return jax.tree.map(_move, weights, targets)


def _move(array: Array, target: Sharding) -> Array:
    """Return the array with the sharding `target`, on devices of this process."""
    if array.sharding.is_equivalent_to(target, array.ndim):
        return array
    if array.is_fully_addressable:
        return jax.device_put(array, target)

    host_devices = _devices_by_host(array)
    host_sizes = {len(devices) for devices in host_devices}
    target_size = len(_devices(target))
    if len(host_sizes) > 1 or max(host_sizes) % target_size:
        # Groups of the target's size do not fill the hosts. Copy the whole array to every device.
        assert isinstance(array.sharding, NamedSharding), (
            f"an array on several hosts must be on the trainer's mesh, not {array.sharding}"
        )
        replicated = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
        return jax.device_put(replicated.addressable_shards[0].data, target)

    # Move the array to all groups at once. The target's devices are one of the groups.
    spec = target.spec if isinstance(target, NamedSharding) else PartitionSpec()
    all_groups = NamedSharding(_mesh_of_all_groups(host_devices, target), spec)
    copies = jax.device_put(array, all_groups)
    shards = {shard.device: shard.data for shard in copies.addressable_shards}
    own_shards = [shards[device] for device in _devices(target)]
    return jax.make_array_from_single_device_arrays(array.shape, target, own_shards)


def _devices_by_host(array: Array) -> list[list[Any]]:
    """Return the devices that hold an array: one list for each host, in the order of their ids."""
    by_host: dict[int, list[Any]] = {}
    for device in sorted(array.sharding.device_set, key=lambda device: device.id):
        by_host.setdefault(device.process_index, []).append(device)
    return list(by_host.values())


def _mesh_of_all_groups(host_devices: list[list[Any]], target: Sharding) -> Mesh:
    """Return a mesh of all devices, in groups that have the shape of the target's mesh.

    The devices of a host follow each other. The devices of the target are one of the groups.
    """
    target_ids = [device.local_hardware_id for device in _devices(target)]
    if isinstance(target, NamedSharding):
        group_shape = tuple(target.mesh.shape.values())
    else:
        group_shape = (1,) * len(MESH_AXES)

    ordered: list[Any] = []
    for devices in host_devices:
        ordered += _target_first(devices, target_ids)
    num_groups = len(ordered) // math.prod(group_shape)
    return Mesh(np.array(ordered).reshape(num_groups, *group_shape), (COPY, *MESH_AXES))


def _target_first(devices: list[Any], target_ids: list[int | None]) -> list[Any]:
    """Return the devices of a host, with the devices of its engine first.

    `target_ids` are the local ids of the engine's devices, in the order of its mesh. They are the
    same on every host. The devices with these ids come first, in this order.
    """
    ranks = {local_id: rank for rank, local_id in enumerate(target_ids)}
    return sorted(devices, key=lambda device: ranks.get(device.local_hardware_id, len(ranks)))


def _devices(sharding: Sharding) -> list[Any]:
    """Return the devices of a sharding, in the order of its mesh."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)
