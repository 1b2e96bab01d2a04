"""The safetensors files of a Hugging Face folder, checked by name before the first tensor is read.
Pickled weights are never opened.

A file that is cut, damaged or only the pointer that Git LFS leaves in its place is named in one
sentence. Reading has three refusals: a tensor that none of the expected weights is mapped to, one
that is set twice, and one that is missing. Called by `weights` and `encoder`, which say what they
expect.
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

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
NOTHING = re.compile(r"(?!)")
Index = tuple[slice, ...]
Folder = str | os.PathLike[str]
ALIGNMENT = 64  # bytes: where XLA wants its arrays on a CPU to begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTable:
    """Every weight of a model: those outside the layers, and those of one layer, which a module
    stacks under the leading logical axis `stacked`. In a checkpoint the latter have `layer`, with
    the layer's number, before their names."""

    outer: Sequence[Weight]
    inner: Sequence[Weight]
    num_layers: int
    layer: str
    stacked: str | None

    def names(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor of a checkpoint with the weight it belongs to."""
        for weight in self.outer:
            yield weight.hugging_face, weight
        for layer in range(self.num_layers):
            for weight in self.inner:
                yield self.layer.format(layer) + weight.hugging_face, weight


class Tensors:
    """The tensors of a checkpoint directory. A file is mapped while one of its tensors is read, and
    no longer: what was read would stay in memory as part of the mapping."""

    def __init__(
        self,
        folder: pathlib.Path,
        table: WeightTable,
        *,
        wanted: str,
        ignored: re.Pattern[str] = NOTHING,
        prefix: str = "",
        tied: tuple[str, str] | None = None,
    ) -> None:
        """`wanted` completes "give". `prefix` before a name is dropped. `tied` names a tensor and
        the one it must equal: it is then no tensor of its own."""
        self.folder, self.table = folder, table
        expected = dict(table.names())
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
        if (
            tied is not None
            and self.files.keys() >= {*tied}
            and np.array_equal(self._stored(tied[0]), self._stored(tied[1]))
        ):
            del self.files[tied[0]]
        for name in sorted(self.files.keys() - expected.keys()):
            raise UserError(
                f"{self.files[name][0]} has a tensor {name} and none of our weights is mapped to "
                f"it, as its config.json does not expect it: give {wanted}, or correct config.json"
            )
        for name in sorted(expected.keys() - self.files.keys()):
            raise UserError(
                f"{folder} lacks the tensor {name} that its config.json asks for: download it again"
            )

    def read(self, weight: Weight, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor in our layout, float32; with `index` only that part of it is read from the
        file."""
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
        index = tuple(
            slice(*of.indices(size)[:2]) for of, size in zip(asked, weight.shape, strict=True)
        )
        if weight.inputs:  # stored as [outputs, inputs], each side flattened
            rows = _flattened(index[weight.inputs :], weight.shape[weight.inputs :])
            values = stored[
                rows, _flattened(index[: weight.inputs], weight.shape[: weight.inputs])
            ].T
        else:
            values = stored[index if len(shape) == len(index) else _flattened(index, weight.shape)]
        return values.astype(np.float32, copy=False).reshape([of.stop - of.start for of in index])

    def load(self, mesh: Mesh | None, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """All weights as a module of this table has them, on the default device or each part on the
        devices of the mesh that hold it. A host holds one part of a weight at a time in `dtype`,
        and one layer of that part in float32."""

        def placed(weight: Weight, names: Sequence[str], leading: int) -> jax.Array:
            shape, axes = (
                (len(names), *weight.shape)[1 - leading :],
                (self.table.stacked, *weight.axes)[1 - leading :],
            )

            def part(index: Index) -> np.ndarray:
                sizes = tuple(len(range(size)[of]) for size, of in zip(shape, index, strict=True))
                values = _aligned(sizes, jnp.dtype(dtype))
                stacked = values if leading else values[None]
                for place, name in enumerate(names[index[0]] if leading else names):
                    stacked[place] = self.read(weight, name, index[leading:])
                return values

            return _placed(shape, axes, mesh, part)

        names: dict[str, list[str]] = {}
        for name, weight in self.table.names():
            names.setdefault(weight.name, []).append(name)
        loaded: dict[str, Any] = {
            weight.name: placed(weight, names[weight.name], 0) for weight in self.table.outer
        }
        return loaded | {
            "layers": {
                weight.name: placed(weight, names[weight.name], 1) for weight in self.table.inner
            }
        }

    def _stored(self, name: str) -> np.ndarray:
        path, stored = self.files[name]
        with open_file(path) as opened:
            return opened.get_tensor(stored)


def _placed(
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
    mesh: Mesh | None,
    part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Reads each distinct part once and waits until its devices have it, so that it is gone before
    the next one is read."""
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
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in indexes]
    )


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """Memory that a CPU device takes over as it is: a copy would double what an import needs."""
    size = math.prod(shape)
    spare = ALIGNMENT // dtype.itemsize
    buffer = np.empty(size + spare, dtype)
    start = -(buffer.ctypes.data // dtype.itemsize) % spare
    return buffer[start : start + size].reshape(shape)


def _flattened(index: Index, shape: tuple[int, ...]) -> slice:
    """The stretch of the flattened dimensions that a part of the first one takes."""
    assert all(
        (of.start, of.stop) == (0, size) for of, size in zip(index[1:], shape[1:], strict=True)
    ), "the mesh splits the first dimension of a kernel's inputs and of its outputs only"
    rest = math.prod(shape[1:])
    return slice(index[0].start * rest, index[0].stop * rest)


def safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
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
    either = f"{SINGLE_FILE} nor {INDEX_FILE}"
    raise UserError(
        f"{folder} has neither {either}: give the directory of a Hugging Face checkpoint"
    )


def _indexed_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that the index of a split checkpoint names. Raises UserError where one is
    missing."""
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
    refuse_pointer(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None
