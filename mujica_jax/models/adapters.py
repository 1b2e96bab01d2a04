"""Read and write LoRA adapters in the format of PEFT.

An adapter corrects some of a model's kernels: it adds a product of two small matrices to each of
them (`lora`). The folder of an adapter has two files:

    adapter_config.json         which modules the adapter corrects, and with what scale
                                (`adapter_config`)
    adapter_model.safetensors   lora_A [rank, inputs] and lora_B [outputs, rank], for each kernel of
                                each layer

transformers with PEFT can load such a folder, too. Values are written in float16. They are small,
so the three extra bits of precision that float16 has are worth more than the range of bfloat16.

The configuration has one field that PEFT lacks, `base_fingerprint`. It identifies the model that
the adapter was trained on, because the shapes of an adapter fit many models.

A run writes an adapter beside each policy (`runs.versions`), and may start from one (`runs.parts`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.layers import Weight, projections
from mujica_jax.models.lora import add_product
from mujica_jax.models.sharding import on_host
from mujica_jax.models.tensors import PICKLED, open_file
from mujica_jax.storage.local import share_files

TENSORS_FILE = "adapter_model.safetensors"


def fingerprint(decoder: Decoder) -> str:
    """Return a fingerprint of a plain decoder's weights: 16 hexadecimal digits of a SHA-256.

    The hash covers the weights of the first input of every kernel of every layer, in float32. Any
    training changes these weights, and they are small enough to gather from a mesh. If the decoder
    is split over several processes, all of them must call this function.
    """
    digest = hashlib.sha256()
    for weight in projections(decoder.config):
        kernel = getattr(decoder.layers, weight.name)[...]
        first_input = (0,) * weight.inputs
        first_rows = on_host(kernel[(slice(None), *first_input)])
        digest.update(first_rows.astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


def adapter_tensors(decoder: Decoder, layers: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return the adapters of a decoder as float16 tensors, by their names in PEFT.

    `layers` holds `<kernel>_lora_a` [layers, inputs, rank] and `<kernel>_lora_b` [layers, rank,
    outputs]. Every process of a job must call this function, because all of them take part in
    gathering the tensors.
    """
    tensors = {}
    for weight in projections(decoder.config):
        modules = _modules(weight, decoder.config.num_layers)
        for part, peft_part in (("a", "A"), ("b", "B")):
            stacked = on_host(layers[f"{weight.name}_lora_{part}"]).astype(np.float16)
            for module, values in zip(modules, stacked, strict=True):
                tensors[_tensor_name(module, peft_part)] = np.ascontiguousarray(values.T)
    return tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that an adapter was trained on.

    Attributes:
        fingerprint: The fingerprint of its weights.
        name: The user's name for it: a folder, or the name of a model at the Hugging Face Hub.
        revision: The commit of a model at the Hub. None: the name is a folder.
    """

    fingerprint: str
    name: str
    revision: str | None = None


def save_adapter(
    tensors: Mapping[str, np.ndarray], folder: Path, *, alpha: float, base: BaseModel
) -> None:
    """Write the folder of an adapter. `tensors` comes from `adapter_tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / TENSORS_FILE, metadata={"format": "pt"})
    rank = next(values.shape[0] for key, values in tensors.items() if ".lora_A." in key)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "base_fingerprint": base.fingerprint,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({key.split(".")[-3] for key in tensors}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")
    share_files(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices of an adapter for one kernel.

    Layers may have different ranks, so `rank` in shapes is the largest of them. The matrices are
    zero beyond the rank of a layer, and in layers that the adapter does not correct.
    """

    a: np.ndarray  # [layers, inputs, rank]
    b: np.ndarray  # [layers, rank, outputs]
    # Rank of each layer, 0 for a layer that the adapter does not correct.
    ranks: tuple[int, ...]
    # Scale of each layer, float32, 0 for a layer that the adapter does not correct.
    scales: np.ndarray  # [layers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of a folder, read for one decoder."""

    folder: Path
    # Name of a kernel -> matrices, for each kernel that the adapter corrects.
    matrices: dict[str, Matrices]

    def rank_and_alpha(self) -> tuple[int, float]:
        """Return the rank and the alpha with which training continues. The scale is alpha / rank.

        Raises UserError if layers or kernels differ in rank or scale, because the trainer supports
        only one rank and one scale.
        """
        ranks_and_scales: set[tuple[int, float]] = set()
        for matrices in self.matrices.values():
            ranks_and_scales |= set(zip(matrices.ranks, matrices.scales.tolist(), strict=True))
        if len(ranks_and_scales) > 1:
            shown = ", ".join(
                f"rank {rank} and scale {scale:g}" for rank, scale in sorted(ranks_and_scales)
            )
            raise UserError(
                f"the adapter {self.folder} has matrices of {shown}, but training needs one rank "
                "and one scale in all layers: merge the adapter into its base with PEFT "
                "(merge_and_unload) and pass the result to --init"
            )
        ((rank, scale),) = ranks_and_scales
        return rank, scale * rank


def read_adapter(decoder: Decoder, folder: Path) -> Adapter:
    """Return the adapter of a folder.

    Raises UserError if the folder holds no adapter, or an adapter of another model than `decoder`.
    """
    config = read_adapter_config(folder)
    base_fingerprint = fingerprint(decoder)
    # Adapters that PEFT wrote have no fingerprint.
    if config.base_fingerprint not in (None, base_fingerprint):
        raise UserError(
            f"the adapter {folder} was trained on {config.base_model} (fingerprint "
            f"{config.base_fingerprint}), but this model has the fingerprint {base_fingerprint}: "
            "use the checkpoint that the adapter was trained on"
        )

    _check_tensors_file(folder)
    with open_file(folder / TENSORS_FILE) as opened:
        names = set(opened.keys())
        _check_names(names, decoder, config)
        matrices = {}
        for weight in projections(decoder.config):
            modules = _modules(weight, decoder.config.num_layers)
            if any(map(config.corrects, modules)):
                matrices[weight.name] = _read_matrices(opened, names, weight, modules, config)
    if not matrices:
        modules = ", ".join(_module(weight) for weight in projections(decoder.config))
        raise UserError(
            f"{config.file} has target_modules {config.targets!r}, which names no projection of "
            f"this model's layers ({modules}): use the checkpoint that the adapter was trained on "
            f"({config.base_model})"
        )
    return Adapter(folder=folder, matrices=matrices)


def with_adapter(decoder: Decoder, folder: Path) -> Decoder:
    """Merge the adapter of a folder into the weights of the decoder, and return the decoder.

    The decoder is changed in place. Raises UserError as `read_adapter`.
    """
    for name, matrices in read_adapter(decoder, folder).matrices.items():
        kernel = getattr(decoder.layers, name)
        scales = jnp.asarray(matrices.scales)[:, None, None]
        a = jnp.asarray(matrices.a)
        b = jnp.asarray(matrices.b)
        kernel.set_value(add_product(kernel.get_value(), a, b, scales))
    return decoder


def with_trained_adapters(params: nnx.State, adapter: Adapter) -> nnx.State:
    """Return the parameters of an adapted decoder, with `adapter` in place of its fresh adapters.

    Each new array has the type and the sharding of the array that it replaces. A kernel that the
    adapter does not correct keeps its fresh matrices, whose product is zero.
    """
    new_values: dict[str, np.ndarray] = {}
    for name, matrices in adapter.matrices.items():
        new_values[f"{name}_lora_a"] = matrices.a
        new_values[f"{name}_lora_b"] = matrices.b

    def replace(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        values = new_values.get(str(path[-1]))
        if values is None:
            return variable
        current: Array = variable.get_value()
        array = jnp.asarray(values, current.dtype)
        return variable.replace(jax.device_put(array, current.sharding))

    return nnx.map_state(replace, params)


def trained_adapters(params: nnx.State) -> dict[str, Array]:
    """Return the adapters among the parameters of an adapted decoder, by name, [layers, ...]."""
    adapters = nnx.to_flat_state(nnx.filter_state(params, nnx.LoRAParam))
    return {str(path[-1]): variable.get_value() for path, variable in adapters}


def _check_tensors_file(folder: Path) -> None:
    """Check that a folder has the safetensors file of an adapter. Raises UserError."""
    file = folder / TENSORS_FILE
    if file.exists():
        return
    for path in sorted(folder.glob("*")):
        if path.suffix in PICKLED:
            raise UserError(
                f"{folder} has its matrices pickled ({path.name}), which can run code when opened: "
                "convert them to safetensors first"
            )
    raise UserError(f"{file} is missing: download the adapter again")


def _check_names(names: set[str], decoder: Decoder, config: AdapterConfig) -> None:
    """Check that each tensor belongs to a module that the configuration says is corrected.

    `names` are the names of all tensors in the file. Raises UserError.
    """
    model_names: set[str] = set()
    corrected_names: set[str] = set()
    for weight in projections(decoder.config):
        for module in _modules(weight, decoder.config.num_layers):
            tensor_names = {_tensor_name(module, part) for part in "AB"}
            model_names |= tensor_names
            if config.corrects(module):
                corrected_names |= tensor_names

    folder = config.file.parent
    foreign = names - model_names
    if foreign:
        raise UserError(
            f"{folder} has a tensor {min(foreign)}, but no projection in the layers of this model "
            "has such a tensor: use the checkpoint that the adapter was trained on "
            f"({config.base_model}), or merge the adapter into it with PEFT (merge_and_unload)"
        )
    uncorrected = names - corrected_names
    if uncorrected:
        raise UserError(
            f"{folder} has a tensor {min(uncorrected)}, but {CONFIG_FILE} does not select its "
            f"module (target_modules {config.targets!r}, exclude_modules {config.excluded!r}, "
            f"layers_to_transform {config.layers!r}): the two files do not belong together, so "
            "download the adapter again"
        )


def _read_matrices(
    opened: Any, names: set[str], weight: Weight, modules: Sequence[str], config: AdapterConfig
) -> Matrices:
    """Return the matrices of one kernel in all layers. `modules` are its names in PEFT."""
    inputs, outputs = weight.sides
    ranks = [0] * len(modules)
    for layer, module in enumerate(modules):
        if config.corrects(module):
            ranks[layer] = config.rank_of(module)

    scales = np.zeros(len(modules), np.float32)
    a = np.zeros((len(modules), inputs, max(ranks)), np.float32)
    b = np.zeros((len(modules), max(ranks), outputs), np.float32)
    for layer, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
        if not rank:
            continue
        scales[layer] = config.scale_of(module)
        stored_a = _read_tensor(opened, names, _tensor_name(module, "A"), (rank, inputs), config)
        a[layer, :, :rank] = stored_a.T
        stored_b = _read_tensor(opened, names, _tensor_name(module, "B"), (outputs, rank), config)
        b[layer, :rank] = stored_b.T
    return Matrices(a=a, b=b, ranks=tuple(ranks), scales=scales)


def _read_tensor(
    opened: Any, names: set[str], name: str, shape: tuple[int, int], config: AdapterConfig
) -> Float[np.ndarray, "rows columns"]:
    """Return the tensor of this name in float32.

    Raises UserError if it is missing, has another shape, or holds a number that is not finite.
    """
    own_shape = tuple(opened.get_slice(name).get_shape()) if name in names else None
    if own_shape != shape:
        tensor = "no tensor"
        if own_shape is not None:
            tensor = f"a tensor of {' x '.join(map(str, own_shape))} as"
        raise UserError(
            f"{config.file.parent} has {tensor} {name}, but the model needs {shape[0]} x "
            f"{shape[1]} with the rank and the target_modules of {CONFIG_FILE}: use the checkpoint "
            f"that the adapter was trained on ({config.base_model})"
        )
    values = opened.get_tensor(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(
            f"{config.file.parent} has numbers that are not finite in {name}, so its training went "
            "wrong: use another adapter"
        )
    return values


def _modules(weight: Weight, layers: int) -> list[str]:
    """Return the names of one kernel in all layers, as PEFT calls its modules."""
    return [f"model.layers.{layer}.{_module(weight)}" for layer in range(layers)]


def _module(weight: Weight) -> str:
    """Return the name of a kernel's module within its layer, such as `self_attn.q_proj`."""
    return weight.hugging_face.removesuffix(".weight")


def _tensor_name(module: str, part: str) -> str:
    """Return the name of a module's matrix in an adapter. `part` is "A" or "B"."""
    return f"base_model.model.{module}.lora_{part}.weight"
