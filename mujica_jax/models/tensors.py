"""Read the safetensors files of a Hugging Face folder. Pickled weights are never opened.

All names are checked before the first tensor is read. A UserError names a tensor that belongs to
none of the expected weights, a tensor that is set twice, and a tensor that is missing. It also
names a file that is cut or damaged, or a pointer that Git LFS left in place of a file.

Callers (`weights`, `retrieval.embedding.encoder`) say which weights they expect.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json, refuse_pointer
from mujica_jax.models.layers import Weight
from mujica_jax.models.sharding import partition_spec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
NOTHING = re.compile(r"(?!)")
Index = tuple[slice, ...]
Folder = str | os.PathLike[str]
ALIGNMENT = 64  # bytes: where XLA wants its arrays on a CPU to begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTable:
    """Every weight of a model, with its names in a checkpoint."""

    outer: Sequence[Weight]  # outside the layers
    inner: Sequence[Weight]  # of one layer; a module stacks those of all layers
    num_layers: int
    layer: str  # what names of a layer begin with, for `format` with the layer's number
    stacked: str | None  # leading logical axis of stacked weights

    def names(self) -> Iterator[tuple[str, Weight]]:
        """Yield every tensor of a checkpoint with the weight it belongs to."""
        for weight in self.outer:
            yield weight.hugging_face, weight
        for layer in range(self.num_layers):
            for weight in self.inner:
                yield self.layer.format(layer) + weight.hugging_face, weight


class Tensors:
    """The tensors of a checkpoint directory.

    A file is mapped only while one of its tensors is read. Otherwise pages that were read would
    stay in memory as part of the mapping.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        table: WeightTable,
        *,
        needed: str,
        ignored: re.Pattern[str] = NOTHING,
        prefix: str = "",
        tied: tuple[str, str] | None = None,
    ) -> None:
        """Find every tensor of the table, and check that there are no others. Raises UserError.

        `needed` completes the "give ..." of an error. `prefix` is dropped from the beginning of
        names. `tied` names two tensors. The first one is ignored if it is equal to the second.
        """
        self.folder = folder
        self.table = table
        expected = dict(table.names())

        # Find each tensor: name -> (file, name in the file).
        self.files: dict[str, tuple[pathlib.Path, str]] = {}
        for path in safetensors_files(folder):
            with open_file(path) as opened:
                names = list(opened.keys())
            for stored in names:
                name = stored.removeprefix(prefix)
                if ignored.search(name):
                    continue
                if name in self.files:
                    raise UserError(
                        f"tensor {name} is set twice in {folder}: remove one of its files"
                    )
                self.files[name] = path, stored
        # Some exports of tied models store the embedding a second time as head; a head that differs
        # would be lost.
        if tied is not None and self._has_equal(*tied):
            del self.files[tied[0]]

        # Refuse tensors beyond the table, and a table beyond the tensors.
        for name in sorted(self.files.keys() - expected.keys()):
            raise UserError(
                f"{self.files[name][0]} has a tensor {name} and none of our weights is mapped to "
                f"it, as its config.json does not expect it: give {needed}, or correct config.json"
            )
        for name in sorted(expected.keys() - self.files.keys()):
            raise UserError(
                f"{folder} lacks the tensor {name} that its config.json asks for: download it again"
            )

    def read(self, weight: Weight, name: str, index: Index | None = None) -> np.ndarray:
        """Return a tensor in our layout, float32.

        With `index`, only that part of the tensor is read from the file.
        """
        path, stored_name = self.files[name]
        with open_file(path) as opened:
            return self._part(opened.get_slice(stored_name), weight, name, index)

    def _part(self, stored: Any, weight: Weight, name: str, index: Index | None) -> np.ndarray:
        """Read a part of a tensor, in our layout."""
        shape = tuple(stored.get_shape())
        if shape != weight.hugging_face_shape:
            raise UserError(
                f"tensor {name} in {self.folder} has shape {shape} and config.json asks for "
                f"{weight.hugging_face_shape}: the two files do not belong together"
            )

        if index is None:
            index = (slice(None),) * len(weight.shape)
        bounds = []
        for dimension, size in zip(index, weight.shape, strict=True):
            start, stop, _ = dimension.indices(size)
            bounds.append(slice(start, stop))
        index = tuple(bounds)

        if weight.inputs:  # stored as [outputs, inputs], each side flattened
            inputs = _flattened(index[: weight.inputs], weight.shape[: weight.inputs])
            outputs = _flattened(index[weight.inputs :], weight.shape[weight.inputs :])
            values = stored[outputs, inputs].T
        elif len(shape) == len(index):
            values = stored[index]
        else:
            values = stored[_flattened(index, weight.shape)]
        part_shape = [dimension.stop - dimension.start for dimension in index]
        return values.astype(np.float32, copy=False).reshape(part_shape)

    def load(self, mesh: Mesh | None, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """Return all weights in the structure of a module with this table.

        They lie on the default device, or each part on those devices of the mesh that hold it. The
        host holds one part of a weight at a time in `dtype`, and one layer of that part in float32.
        """
        names: dict[str, list[str]] = {}
        for name, weight in self.table.names():
            names.setdefault(weight.name, []).append(name)

        weights: dict[str, Any] = {}
        for weight in self.table.outer:
            (name,) = names[weight.name]
            weights[weight.name] = self._load_weight(weight, name, mesh, dtype)
        layers = {}
        for weight in self.table.inner:
            layers[weight.name] = self._load_stacked(weight, names[weight.name], mesh, dtype)
        weights["layers"] = layers
        return weights

    def _load_weight(
        self, weight: Weight, name: str, mesh: Mesh | None, dtype: DTypeLike
    ) -> jax.Array:
        """Load a weight outside of the layers."""

        def read_part(index: Index) -> np.ndarray:
            values = _aligned(_part_shape(weight.shape, index), jnp.dtype(dtype))
            values[...] = self.read(weight, name, index)
            return values

        return _placed(weight.shape, weight.axes, mesh, read_part)

    def _load_stacked(
        self, weight: Weight, names: Sequence[str], mesh: Mesh | None, dtype: DTypeLike
    ) -> jax.Array:
        """Load a weight of all layers, stacked; `names` are those of its tensors, one a layer."""
        shape = (len(names), *weight.shape)
        axes = (self.table.stacked, *weight.axes)

        def read_part(index: Index) -> np.ndarray:
            layers, *index_in_layer = index
            values = _aligned(_part_shape(shape, index), jnp.dtype(dtype))
            for place, name in enumerate(names[layers]):
                values[place] = self.read(weight, name, tuple(index_in_layer))
            return values

        return _placed(shape, axes, mesh, read_part)

    def _has_equal(self, name: str, other_name: str) -> bool:
        """Return whether both tensors are there and hold the same numbers."""
        if name not in self.files or other_name not in self.files:
            return False
        return np.array_equal(self._stored(name), self._stored(other_name))

    def _stored(self, name: str) -> np.ndarray:
        """Read a whole tensor in the layout of its file."""
        path, stored_name = self.files[name]
        with open_file(path) as opened:
            return opened.get_tensor(stored_name)


def _placed(
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
    mesh: Mesh | None,
    read_part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Return an array whose distinct parts are each read once.

    A part is freed before the next one is read: the function waits until the devices have it.
    """
    if mesh is None:
        values = read_part((slice(None),) * len(shape))
        return jax.device_put(values, may_alias=True).block_until_ready()

    sharding = NamedSharding(mesh, partition_spec(logical_axes, shape, mesh))
    indexes = sharding.addressable_devices_indices_map(shape)
    holders: dict[str, list[Any]] = {}
    for device, index in indexes.items():
        holders.setdefault(str(index), []).append(device)

    arrays: dict[Any, jax.Array] = {}
    for devices in holders.values():
        values = read_part(indexes[devices[0]] or ())
        for device in devices:
            arrays[device] = jax.device_put(values, device).block_until_ready()
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in indexes]
    )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """Return uninitialised memory that a CPU device can use without a copy.

    A copy would double the memory of an import.
    """
    size = math.prod(shape)
    spare = ALIGNMENT // dtype.itemsize
    buffer = np.empty(size + spare, dtype)
    start = -(buffer.ctypes.data // dtype.itemsize) % spare
    return buffer[start : start + size].reshape(shape)


def _flattened(index: Index, shape: tuple[int, ...]) -> slice:
    """Return the slice of the flattened dimensions that belongs to a part of the first one."""
    for dimension, size in zip(index[1:], shape[1:], strict=True):
        assert (dimension.start, dimension.stop) == (0, size), (
            "the mesh splits the first dimension of a kernel's inputs and of its outputs only"
        )
    stride = math.prod(shape[1:])
    return slice(index[0].start * stride, index[0].stop * stride)


def _part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of a part of an array."""
    return tuple(len(range(size)[dimension]) for size, dimension in zip(shape, index, strict=True))


def safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that hold a folder's weights. Raises UserError where there are none."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        return _indexed_files(folder)
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLED)
    if pickled:
        raise UserError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when opened: "
            "convert them to safetensors first"
        )
    raise UserError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the directory of a Hugging "
        "Face checkpoint"
    )


def _indexed_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that the index of a split checkpoint names.

    Raises UserError if one of them is missing.
    """
    file = folder / INDEX_FILE
    weight_map = read_json(file).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{file} has no weight_map of tensor names to file names: download it again"
        )
    paths = [folder / name for name in sorted(set(names))]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is named by {INDEX_FILE} but missing: download it again")
    return paths


def open_file(path: pathlib.Path) -> Any:
    """Map a safetensors file. Raises UserError where it is damaged."""
    refuse_pointer(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None
