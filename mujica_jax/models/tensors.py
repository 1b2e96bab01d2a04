"""Read and check the safetensors files of a Hugging Face folder.

The caller passes a table of the weights that it expects (`WeightTable`). All names are compared
with this table before the first tensor is read. A UserError names a tensor that is unexpected,
missing, or stored twice. It also names a file that is truncated, damaged, or a Git LFS pointer.
Pickled weights are never opened, because they can run code.

Called by `weights` and `retrieval.embedding.encoder`.
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
# Suffixes of files with pickled weights.
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# A pattern that matches no name.
NOTHING = re.compile(r"(?!)")
# A part of an array: one slice for each dimension.
Index = tuple[slice, ...]
Folder = str | os.PathLike[str]
# XLA uses host memory on a CPU without a copy if its address is a multiple of this many bytes.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTable:
    """The weights of a model, with their names in a checkpoint."""

    # Weights outside the layers.
    outer: Sequence[Weight]
    # Weights of one layer. The model stacks each of them over all layers.
    inner: Sequence[Weight]
    num_layers: int
    # Beginning of the names of a layer's tensors, with {} for the number of the layer.
    layer: str
    # Logical axis of the leading dimension of stacked weights.
    stacked: str | None

    def names(self) -> Iterator[tuple[str, Weight]]:
        """Yield the name of each tensor of a checkpoint, and the weight that it belongs to."""
        for weight in self.outer:
            yield weight.hugging_face, weight
        for layer in range(self.num_layers):
            for weight in self.inner:
                yield self.layer.format(layer) + weight.hugging_face, weight


class Tensors:
    """The tensors of a checkpoint directory.

    A file is mapped into memory only while one of its tensors is read. A mapping that stays open
    would keep all pages that were read in memory.
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
        """Find the file of each tensor in the table, and check that there are no other tensors.

        Error messages say `needed`, a phrase for the kind of checkpoint that fits. Tensors whose
        names match `ignored` are skipped. `prefix` is removed from the beginning of names. `tied`
        names two tensors, and the first is ignored if it is equal to the second. Raises UserError.
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
                        f"tensor {name} is set twice in {folder}: remove one of the files that "
                        "hold it"
                    )
                self.files[name] = path, stored
        # Some exports of models with tied embeddings store the embedding again as the head. Ignore
        # such a head only if it is equal, because the decoder would lose one that differs.
        if tied is not None and self._has_equal(*tied):
            del self.files[tied[0]]

        # Refuse tensors that are not in the table, and weights that have no tensor.
        for name in sorted(self.files.keys() - expected.keys()):
            raise UserError(
                f"{self.files[name][0]} has a tensor {name}, but its config.json does not expect "
                f"it: use {needed}, or correct config.json"
            )
        for name in sorted(expected.keys() - self.files.keys()):
            raise UserError(
                f"{folder} lacks the tensor {name}, which its config.json expects: download it "
                "again"
            )

    def read(self, weight: Weight, name: str, index: Index | None = None) -> np.ndarray:
        """Return a tensor in float32, with the shape `weight.shape`.

        With `index`, only this part of the tensor is read from the file and returned.
        """
        path, stored_name = self.files[name]
        with open_file(path) as opened:
            return self._part(opened.get_slice(stored_name), weight, name, index)

    def _part(self, stored: Any, weight: Weight, name: str, index: Index | None) -> np.ndarray:
        """Return a part of a stored tensor, as `read`. Raises UserError for another shape."""
        shape = tuple(stored.get_shape())
        if shape != weight.hugging_face_shape:
            raise UserError(
                f"tensor {name} in {self.folder} has shape {shape}, but config.json asks for "
                f"{weight.hugging_face_shape}: the two files do not belong together, so download "
                "the checkpoint again"
            )

        if index is None:
            index = (slice(None),) * len(weight.shape)
        bounds = []
        for dimension, size in zip(index, weight.shape, strict=True):
            start, stop, _ = dimension.indices(size)
            bounds.append(slice(start, stop))
        index = tuple(bounds)

        # A kernel is stored as a matrix [outputs, inputs], with each side flattened.
        if weight.inputs:
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
        """Return all weights in `dtype`, by their names in the module.

        Weights of layers are stacked over the layers, and are under the key "layers". With `mesh`
        each device gets its part of each weight. Without it the weights are on the default device.
        Host memory holds one part of one weight at a time in `dtype`, and one layer of this part in
        float32.
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
        """Return a weight outside of the layers."""

        def read_part(index: Index) -> np.ndarray:
            values = _aligned(_part_shape(weight.shape, index), jnp.dtype(dtype))
            values[...] = self.read(weight, name, index)
            return values

        return _placed(weight.shape, weight.axes, mesh, read_part)

    def _load_stacked(
        self, weight: Weight, names: Sequence[str], mesh: Mesh | None, dtype: DTypeLike
    ) -> jax.Array:
        """Return a weight of all layers, stacked. `names` has the tensor's name in each layer."""
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
        """Return whether both tensors exist and hold the same numbers."""
        if name not in self.files or other_name not in self.files:
            return False
        return np.array_equal(self._stored(name), self._stored(other_name))

    def _stored(self, name: str) -> np.ndarray:
        """Return a whole tensor with the shape and type that it has in its file."""
        path, stored_name = self.files[name]
        with open_file(path) as opened:
            return opened.get_tensor(stored_name)


def _placed(
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
    mesh: Mesh | None,
    read_part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Return an array that `read_part` reads, on the default device or sharded over `mesh`.

    Each distinct part is read once, also if several devices hold it. The function waits until the
    devices have received a part. Its host memory is then freed before the next part is read.
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
    """Return an uninitialised array that a CPU device can use without a copy.

    A copy would double the memory that loading a checkpoint takes.
    """
    size = math.prod(shape)
    spare = ALIGNMENT // dtype.itemsize
    buffer = np.empty(size + spare, dtype)
    start = -(buffer.ctypes.data // dtype.itemsize) % spare
    return buffer[start : start + size].reshape(shape)


def _flattened(index: Index, shape: tuple[int, ...]) -> slice:
    """Return the slice of flattened dimensions that corresponds to a part of the first dimension.

    `index` is the part of an array of this shape. It takes all other dimensions whole.
    """
    for dimension, size in zip(index[1:], shape[1:], strict=True):
        assert (dimension.start, dimension.stop) == (0, size), (
            f"the part {index} of an array of shape {shape} cuts a dimension after the first, "
            "and the mesh may split only the first one of a kernel's inputs and of its outputs"
        )
    stride = math.prod(shape[1:])
    return slice(index[0].start * stride, index[0].stop * stride)


def _part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of a part of an array."""
    return tuple(len(range(size)[dimension]) for size, dimension in zip(shape, index, strict=True))


def safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that hold the weights of a folder. Raises UserError if there are none."""
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
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: choose the directory of a Hugging "
        "Face checkpoint"
    )


def _indexed_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that the index of a checkpoint in several files names.

    Raises UserError if the index is damaged or one of the files is missing.
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
            raise UserError(f"{path} is named by {INDEX_FILE} but is missing: download it again")
    return paths


def open_file(path: pathlib.Path) -> Any:
    """Map a safetensors file into memory and return it. Raises UserError if it is damaged."""
    refuse_pointer(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None
