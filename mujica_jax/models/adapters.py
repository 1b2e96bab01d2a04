"""Read and write LoRA adapters in PEFT's format.

An adapter's folder has two files, `adapter_config.json` and `adapter_model.safetensors`. The second
holds `lora_A` as [rank, inputs] and `lora_B` as [outputs, rank] for each projection of each layer.
transformers with PEFT reads such a folder too. `adapter_config` says which projections an adapter
corrects, and with what scale.

Values are written in float16. They are small, and need its three extra bits of precision more than
the range of bfloat16. The configuration has one field of our own, `base_fingerprint`: the shapes of
an adapter fit many models, but it is right for only one of them.

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

TENSORS_FILE = "adapter_model.safetensors"


def fingerprint(decoder: Decoder) -> str:
    """Return a fingerprint of a plain decoder's weights, 16 hexadecimal digits of a SHA-256.

    The hash covers one row, that of the first input, of every projection of every layer in float32.
    Any training changes these rows, and they are small enough to gather from a mesh.
    """
    digest = hashlib.sha256()
    for weight in projections(decoder.config):
        kernel = getattr(decoder.layers, weight.name)[...]
        first_input = (0,) * weight.inputs
        first_rows = on_host(kernel[(slice(None), *first_input)])
        digest.update(first_rows.astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


def adapter_tensors(decoder: Decoder, layers: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return stacked adapters as float16 tensors under PEFT's names.

    `layers` holds `<kernel>_lora_a` and `<kernel>_lora_b`, [layers, ...]. Every process of a job
    must call this, because all take part in gathering the tensors.
    """
    tensors = {}
    for weight in projections(decoder.config):
        modules = _modules(weight, decoder.config.num_layers)
        for part, peft_part in (("a", "A"), ("b", "B")):
            stacked = on_host(layers[f"{weight.name}_lora_{part}"]).astype(np.float16)
            for module, values in zip(modules, stacked, strict=True):
                tensors[_tensor_name(module, peft_part)] = np.ascontiguousarray(values.T)
    return tensors


def save_adapter(
    tensors: Mapping[str, np.ndarray], folder: Path, *, alpha: float, base: str, name: str
) -> None:
    """Write an adapter's folder.

    `base` is the fingerprint of the decoder that the adapters belong to. `name` is the user's name
    for that decoder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / TENSORS_FILE, metadata={"format": "pt"})
    rank = next(values.shape[0] for key, values in tensors.items() if ".lora_A." in key)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "base_fingerprint": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({key.split(".")[-3] for key in tensors}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
    """An adapter's matrices for one kernel.

    In layers that the adapter does not correct, they are zero.
    """

    a: np.ndarray  # [layers, inputs, rank], zero beyond a layer's rank
    b: np.ndarray  # [layers, rank, outputs]
    ranks: tuple[int, ...]  # of each layer, 0 where it is not corrected
    scales: np.ndarray  # [layers], float32, 0 where it is not corrected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter of a folder, for the decoder that it was read for."""

    folder: Path
    matrices: dict[str, Matrices]  # of each kernel that it corrects, by name

    def rank_and_alpha(self) -> tuple[int, float]:
        """Return the rank and the alpha with which training continues.

        The adapter's scale is alpha / rank. Raises UserError if layers or kernels differ in rank or
        scale: adapters are trained with one of each.
        """
        ranks_and_scales: set[tuple[int, float]] = set()
        for matrices in self.matrices.values():
            ranks_and_scales |= set(zip(matrices.ranks, matrices.scales.tolist(), strict=True))
        if len(ranks_and_scales) > 1:
            shown = ", ".join(
                f"rank {rank} and scale {scale:g}" for rank, scale in sorted(ranks_and_scales)
            )
            raise UserError(
                f"{self.folder} corrects some matrices with {shown}, and adapters are trained with "
                "one rank and one scale in all layers: merge it into its base with PEFT "
                "(merge_and_unload) and give --init the result"
            )
        ((rank, scale),) = ranks_and_scales
        return rank, scale * rank


def read_adapter(decoder: Decoder, folder: Path) -> Adapter:
    """Read the adapter of a folder.

    Raises UserError if the folder holds no adapter, or one of another base than `decoder`.
    """
    config = read_adapter_config(folder)
    base_fingerprint = fingerprint(decoder)
    # PEFT's own adapters name no fingerprint.
    if config.base_fingerprint not in (None, base_fingerprint):
        raise UserError(
            f"{folder} corrects {config.base_model} (fingerprint {config.base_fingerprint}) and "
            f"the model given has fingerprint {base_fingerprint}: give the checkpoint that the "
            "adapter was trained on"
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
            f"this model's layers ({modules}): give the checkpoint that the adapter was trained on "
            f"({config.base_model})"
        )
    return Adapter(folder=folder, matrices=matrices)


def with_adapter(decoder: Decoder, folder: Path) -> Decoder:
    """Merge the adapter of a folder into the decoder's weights, in place, and return the decoder.

    Raises the errors of `read_adapter`.
    """
    for name, matrices in read_adapter(decoder, folder).matrices.items():
        kernel = getattr(decoder.layers, name)
        scales = jnp.asarray(matrices.scales)[:, None, None]
        a = jnp.asarray(matrices.a)
        b = jnp.asarray(matrices.b)
        kernel.set_value(add_product(kernel.get_value(), a, b, scales))
    return decoder


def with_trained_adapters(params: nnx.State, adapter: Adapter) -> nnx.State:
    """Return an adapted decoder's parameters with its adapters replaced by this one.

    Each new array has the type and the layout of the one that it replaces. A kernel that the
    adapter does not correct keeps its fresh matrices, which change nothing yet.
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
    """Return the stacked adapters of an adapted decoder's parameters, by name."""
    adapters = nnx.to_flat_state(nnx.filter_state(params, nnx.LoRAParam))
    return {str(path[-1]): variable.get_value() for path, variable in adapters}


def _check_tensors_file(folder: Path) -> None:
    """Check that an adapter's matrices are there. Raises UserError."""
    file = folder / TENSORS_FILE
    if file.exists():
        return
    for path in sorted(folder.glob("*")):
        if path.suffix in PICKLED:
            raise UserError(
                f"{folder} has its matrices pickled ({path.name}), which can run code when opened: "
                "save the adapter as safetensors"
            )
    raise UserError(f"{file} is missing: download the adapter again")


def _check_names(names: set[str], decoder: Decoder, config: AdapterConfig) -> None:
    """Check that each tensor belongs to a matrix that the configuration names as corrected.

    Raises UserError.
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
            f"{folder} has a tensor {min(foreign)} and the model no such matrix in its layers' "
            "projections: give the checkpoint that the adapter was trained on "
            f"({config.base_model}), or merge the adapter into it with PEFT (merge_and_unload)"
        )
    uncorrected = names - corrected_names
    if uncorrected:
        raise UserError(
            f"{folder} has a tensor {min(uncorrected)} and {CONFIG_FILE} does not name its module "
            f"(target_modules {config.targets!r}, exclude_modules {config.excluded!r}, "
            f"layers_to_transform {config.layers!r}): the two files do not belong together, so "
            "download the adapter again"
        )


def _read_matrices(
    opened: Any, names: set[str], weight: Weight, modules: Sequence[str], config: AdapterConfig
) -> Matrices:
    """Read the matrices of one kernel in all layers."""
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
    """Read one tensor in float32.

    Raises UserError if it is missing, has another shape, or holds a number that is not finite.
    """
    own_shape = tuple(opened.get_slice(name).get_shape()) if name in names else None
    if own_shape != shape:
        tensor = "no tensor"
        if own_shape is not None:
            tensor = f"a tensor of {' x '.join(map(str, own_shape))} as"
        raise UserError(
            f"{config.file.parent} has {tensor} {name} and the model needs {shape[0]} x {shape[1]} "
            f"with the rank and the target_modules of {CONFIG_FILE}: give the checkpoint that the "
            f"adapter was trained on ({config.base_model})"
        )
    values = opened.get_tensor(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(
            f"{config.file.parent} has numbers that are not finite in {name}, so its training went "
            "wrong: give another adapter"
        )
    return values


def _modules(weight: Weight, layers: int) -> list[str]:
    """Return the names of one projection in all layers, as PEFT calls them."""
    return [f"model.layers.{layer}.{_module(weight)}" for layer in range(layers)]


def _module(weight: Weight) -> str:
    """Return the name of a projection in its layer, such as `self_attn.q_proj`."""
    return weight.hugging_face.removesuffix(".weight")


def _tensor_name(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"
