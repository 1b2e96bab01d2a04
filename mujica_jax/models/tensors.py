"""The safetensors files of a Hugging Face folder, checked by name before the first tensor is read. Pickled weights are
never opened.

Reading has four refusals: a tensor that none of our weights is mapped to, one that this configuration does not expect,
one that is set twice, and one that is missing. Called by `weights` and `encoder`, which say what they expect.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from mujica_jax.errors import UserError
from mujica_jax.models.layers import Weight
from mujica_jax.models.sharding import partition_spec

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
NOTHING = re.compile(r"(?!)")
Index = tuple[slice, ...]
ALIGNMENT = 64  # bytes: where XLA wants its arrays on a CPU to begin


class Tensors:
    """The tensors of a checkpoint directory. A file is mapped while one of its tensors is read, and no longer: what was
    read would stay in memory as part of the mapping.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        expected: Collection[str],
        *,
        is_mapped: Callable[[str], bool] | None = None,
        wanted: str = "another checkpoint",
        ignored: re.Pattern[str] = NOTHING,
        prefix: str = "",
        tied: tuple[str, str] | None = None,
    ) -> None:
        """`is_mapped` tells foreign tensors from unexpected ones (default: what is not expected is foreign), `wanted`
        completes "give".

        `prefix` before a name is dropped. `tied` names a tensor and the one it must equal: it is then no tensor of its
        own.
        """
        self.folder = folder
        self.files: dict[str, tuple[pathlib.Path, str]] = {}
        for path in safetensors_files(folder):
            with open_file(path) as opened:
                names = list(opened.keys())
            for stored in names:
                name = stored.removeprefix(prefix)
                if ignored.search(name):
                    continue
                if not (name in expected if is_mapped is None else is_mapped(name)):
                    raise UserError(
                        f"{path} has a tensor {name} and none of our weights is mapped to it: give {wanted}"
                    )
                if name in self.files:
                    raise UserError(f"tensor {name} is set twice in {folder}: remove one of its files")
                self.files[name] = path, stored
        if tied is not None:
            self._drop_tied(*tied)
        for name in sorted(self.files.keys() - set(expected)):
            raise UserError(
                f"{folder} has a tensor {name} that its config.json does not expect: which of the two is right?"
            )
        for name in sorted(set(expected) - self.files.keys()):
            raise UserError(f"{folder} lacks the tensor {name} that its config.json asks for: download it again")

    def read(self, weight: Weight, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor in our layout, float32; with `index` only that part of it is read from the file."""
        path, stored = self.files[name]
        with open_file(path) as opened:
            return self._part(opened.get_slice(stored), weight, name, index)

    def _part(self, stored: Any, weight: Weight, name: str, index: Index | None) -> np.ndarray:
        shape = tuple(stored.get_shape())
        if shape != weight.hugging_face_shape:
            raise UserError(
                f"tensor {name} in {self.folder} has shape {shape} and config.json asks for "
                f"{weight.hugging_face_shape}: the two files do not belong together"
            )
        asked = (slice(None),) * len(weight.shape) if index is None else index
        index = tuple(slice(*of.indices(size)[:2]) for of, size in zip(asked, weight.shape, strict=True))
        if weight.inputs:  # stored as [outputs, inputs], each side flattened
            rows = _flattened(index[weight.inputs :], weight.shape[weight.inputs :])
            values = stored[rows, _flattened(index[: weight.inputs], weight.shape[: weight.inputs])].T
        else:
            values = stored[index if len(shape) == len(index) else _flattened(index, weight.shape)]
        return values.astype(np.float32, copy=False).reshape([of.stop - of.start for of in index])

    def load(self, weight: Weight, name: str, mesh: Mesh | None) -> jax.Array:
        """One tensor, on the default device or each part on the devices of the mesh that hold it."""

        def part(index: Index) -> np.ndarray:
            values = self.read(weight, name, index)
            whole = _aligned(values.shape)
            whole[...] = values
            return whole

        return _placed(weight.shape, weight.axes, mesh, part)

    def load_stacked(self, weight: Weight, names: Sequence[str], layers: str | None, mesh: Mesh | None) -> jax.Array:
        """One weight of all layers, under a leading logical axis. A host holds one part of it at a time, and one layer
        of that part."""

        shape = (len(names), *weight.shape)

        def part(index: Index) -> np.ndarray:
            stacked = _aligned(tuple(len(range(size)[of]) for size, of in zip(shape, index, strict=True)))
            for place, name in enumerate(names[index[0]]):
                stacked[place] = self.read(weight, name, index[1:])
            return stacked

        return _placed(shape, (layers, *weight.axes), mesh, part)

    def _stored(self, name: str) -> np.ndarray:
        path, stored = self.files[name]
        with open_file(path) as opened:
            return opened.get_tensor(stored)

    def _drop_tied(self, name: str, original: str) -> None:
        """Some exports of tied models store the embedding a second time as head; a head that differs would be lost."""
        if {name, original} <= self.files.keys() and np.array_equal(self._stored(name), self._stored(original)):
            del self.files[name]


def _placed(
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
    mesh: Mesh | None,
    part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Reads each distinct part once and waits until its devices have it, so that it is gone before the next one is
    read."""
    if mesh is None:
        return jax.device_put(part((slice(None),) * len(shape)), may_alias=True).block_until_ready()
    sharding = NamedSharding(mesh, partition_spec(logical_axes, shape, mesh))
    indexes = sharding.addressable_devices_indices_map(shape)
    holders: dict[str, list[Any]] = {}
    for device, index in indexes.items():
        holders.setdefault(str(index), []).append(device)
    arrays: dict[Any, jax.Array] = {}
    for devices in holders.values():
        values = part(indexes[devices[0]] or ())
        arrays |= {device: jax.device_put(values, device).block_until_ready() for device in devices}
    return jax.make_array_from_single_device_arrays(shape, sharding, [arrays[device] for device in indexes])


def _aligned(shape: tuple[int, ...]) -> Float[np.ndarray, "*shape"]:
    """Memory that a CPU device takes over as it is: a copy would double what an import needs."""
    size = math.prod(shape)
    spare = ALIGNMENT // 4
    buffer = np.empty(size + spare, np.float32)
    start = -(buffer.ctypes.data // 4) % spare
    return buffer[start : start + size].reshape(shape)


def _flattened(index: Index, shape: tuple[int, ...]) -> slice:
    """The stretch of the flattened dimensions that a part of the first one takes."""
    assert all((of.start, of.stop) == (0, size) for of, size in zip(index[1:], shape[1:], strict=True)), (
        "the mesh splits the first dimension of a kernel's inputs and of its outputs only"
    )
    rest = math.prod(shape[1:])
    return slice(index[0].start * rest, index[0].stop * rest)


def safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map") or {}
        return [folder / name for name in sorted(set(weight_map.values()))]
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLED)
    if pickled:
        raise UserError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when opened: convert them to "
            "safetensors first"
        )
    raise UserError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the directory of a Hugging Face checkpoint"
    )


def open_file(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise UserError(f"{path} is named by {INDEX_FILE} but missing: download it again") from None
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give the directory of a Hugging Face checkpoint") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): download it again") from None
