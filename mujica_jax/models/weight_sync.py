"""Move weights from the trainer's mesh to an engine's, from device to device.

The trainer's mesh may span all hosts. An engine's mesh has devices of this host only. Each array
moves by itself, and each device receives only the part that the engine keeps there.

If the trainer's mesh spans hosts, the target is first one mesh over all of them, with the axes
(copy, data, fsdp, tensor). The devices of every host form groups as large as an engine, and every
group holds the engine's weights once. One transfer, in which all processes take part, brings an
array there. Then this host's engine takes the parts of its own devices as an array of its own,
without a copy. If groups of that size do not fill the hosts (three of four devices), the whole
array goes to every device first. `inference.engine` calls this module.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from mujica_jax.models.sharding import MESH_AXES, shardings_of

COPY = "copy"


def sync_weights(weights: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Return the same weights over `mesh`, or on the first device of this process.

    All devices of `mesh` belong to this process. Arrays that are there already are not copied.
    """
    if mesh is None:
        first_device = SingleDeviceSharding(jax.local_devices()[0])
        targets = jax.tree.map(lambda array: first_device, weights)
    else:
        targets = shardings_of(weights, mesh)
    return jax.tree.map(_move, weights, targets)


def _move(array: Array, target: Sharding) -> Array:
    """Return an array laid out as `target`, on devices of this process."""
    if array.sharding.is_equivalent_to(target, array.ndim):
        return array
    if array.is_fully_addressable:
        return jax.device_put(array, target)

    host_devices = _devices_by_host(array)
    host_sizes = {len(devices) for devices in host_devices}
    target_size = len(_devices(target))
    if len(host_sizes) > 1 or max(host_sizes) % target_size:
        # Groups of the target's size do not fill the hosts: the array comes whole to every device.
        assert isinstance(array.sharding, NamedSharding), (
            "an array over several hosts lies on the trainer's mesh"
        )
        replicated = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
        return jax.device_put(replicated.addressable_shards[0].data, target)

    # One transfer to groups of devices on every host, of which the target's devices are one.
    spec = target.spec if isinstance(target, NamedSharding) else PartitionSpec()
    all_groups = NamedSharding(_mesh_of_all_groups(host_devices, target), spec)
    copies = jax.device_put(array, all_groups)
    shards = {shard.device: shard.data for shard in copies.addressable_shards}
    own_shards = [shards[device] for device in _devices(target)]
    return jax.make_array_from_single_device_arrays(array.shape, target, own_shards)


def _devices_by_host(array: Array) -> list[list[Any]]:
    """Return the devices that hold an array: one list for each host, in order of their ids."""
    by_host: dict[int, list[Any]] = {}
    for device in sorted(array.sharding.device_set, key=lambda device: device.id):
        by_host.setdefault(device.process_index, []).append(device)
    return list(by_host.values())


def _mesh_of_all_groups(host_devices: list[list[Any]], target: Sharding) -> Mesh:
    """Return a mesh of all devices, in groups like the target's.

    The devices of one host stand beside each other. The target is one of the groups.
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
    """Return a host's devices, in the target's order.

    Those that have the target's local ids stand first. Every host's engine has the same local ids.
    """
    ranks = {local_id: rank for rank, local_id in enumerate(target_ids)}
    return sorted(devices, key=lambda device: ranks.get(device.local_hardware_id, len(ranks)))


def _devices(sharding: Sharding) -> list[Any]:
    """Return the devices of a sharding, in the order of its mesh."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)
