"""Weights from one mesh to another on the devices: from the trainer's, over all hosts, to an
engine's, over devices of this host.

Each array goes by itself, and each device receives only the part that the engine keeps there. Where
the trainer's mesh spans hosts, the target is first seen as one mesh over all of them, (copy, data,
fsdp, tensor): every host holds the engine's weights once on as many of its devices as its engine
has, and once more on each further group of them. One transfer, in which all processes take part,
brings an array there; then this host's engine takes its own devices' parts as an array of its own,
without a copy. Where groups of that size do not fill the hosts (three of four devices), the array
comes whole to every device first. Called by `inference.engine`.
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
    """The same weights over `mesh`, devices of this process, or on its first device. Those that are
    there already are not copied."""
    if mesh is None:
        whole = SingleDeviceSharding(jax.local_devices()[0])
        targets = jax.tree.map(lambda array: whole, weights)
    else:
        targets = shardings_of(weights, mesh)
    return jax.tree.map(_to, weights, targets)


def _to(array: Array, target: Sharding) -> Array:
    if array.sharding.is_equivalent_to(target, array.ndim):
        return array
    if array.is_fully_addressable:
        return jax.device_put(array, target)
    by_host: dict[int, list[Any]] = {}
    for device in sorted(array.sharding.device_set, key=lambda device: device.id):
        by_host.setdefault(device.process_index, []).append(device)
    counts, wanted = {len(devices) for devices in by_host.values()}, len(_devices(target))
    if len(counts) > 1 or max(counts) % wanted:
        assert isinstance(array.sharding, NamedSharding), (
            "an array over several hosts lies on the trainer's mesh"
        )
        whole = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
        return jax.device_put(whole.addressable_shards[0].data, target)
    spec = target.spec if isinstance(target, NamedSharding) else PartitionSpec()
    spread = jax.device_put(
        array, NamedSharding(_on_every_host(list(by_host.values()), target), spec)
    )
    parts = {part.device: part.data for part in spread.addressable_shards}
    own = [parts[device] for device in _devices(target)]
    return jax.make_array_from_single_device_arrays(array.shape, target, own)


def _on_every_host(by_host: list[list[Any]], target: Sharding) -> Mesh:
    """All devices in groups like the target's, those of one host beside each other; the target
    itself is one of them."""
    places = [device.local_hardware_id for device in _devices(target)]
    shape = (
        tuple(target.mesh.shape.values())
        if isinstance(target, NamedSharding)
        else (1,) * len(MESH_AXES)
    )
    ordered = [device for devices in by_host for device in _first(devices, places)]
    return Mesh(
        np.array(ordered).reshape(len(ordered) // math.prod(shape), *shape), (COPY, *MESH_AXES)
    )


def _first(devices: list[Any], places: list[int | None]) -> list[Any]:
    """A host's devices with those at the engine's places in front, in its order: every host's
    engine sits at the same places."""
    rank = {place: number for number, place in enumerate(places)}
    return sorted(devices, key=lambda device: rank.get(device.local_hardware_id, len(rank)))


def _devices(sharding: Sharding) -> list[Any]:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)
