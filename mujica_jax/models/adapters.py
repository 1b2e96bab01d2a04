"""LoRA adapters in and out, as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.

PEFT keeps `lora_A` as [rank, inputs] and `lora_B` as [outputs, rank] of each projection of each layer, so that
transformers with PEFT reads such a folder too. Values are float16: they are small and need its three bits more than the
range of bfloat16. One field of the configuration is ours, `base_fingerprint`: an adapter fits every model of its shapes
and means something on one of them alone. Called by `methods.run`, which writes one beside each policy and may begin
with one, and by `methods.policies`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.layers import projections
from mujica_jax.models.lora import add_product
from mujica_jax.models.sharding import on_host
from mujica_jax.models.tensors import open_file, read_json

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"


def fingerprint(decoder: Decoder) -> str:
    """Of a plain decoder's weights: SHA-256 of the first input's row of every projection of every layer, in float32.
    Training of any kind moves these, and they are few enough to gather from a mesh."""
    digest = hashlib.sha256()
    for weight in projections(decoder.config):
        kernel = getattr(decoder.layers, weight.name)[...]
        digest.update(on_host(kernel[(slice(None), *[0] * weight.inputs)]).astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


def adapter_tensors(decoder: Decoder, layers: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """The adapters of `layers` (`<kernel>_lora_a` and `_lora_b`, stacked) under PEFT's names, float16. Every process of
    a job takes part in gathering them."""
    tensors = {}
    for weight in projections(decoder.config):
        for ours, theirs in (("a", "A"), ("b", "B")):
            stacked = on_host(layers[f"{weight.name}_lora_{ours}"]).astype(np.float16)
            for layer, values in enumerate(stacked):
                tensors[_name(weight.hugging_face, layer, theirs)] = np.ascontiguousarray(values.T)
    return tensors


def save_adapter(tensors: Mapping[str, np.ndarray], folder: Path, *, alpha: float, base: str, name: str) -> None:
    """`base` is the fingerprint of the decoder that the adapters belong to, `name` what the user calls it."""
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
class Adapter:
    """An adapter of a folder, for the decoder that it was read for."""

    rank: int
    alpha: float
    # Of each kernel, by name: A [layers, inputs, rank] and B [layers, rank, outputs].
    matrices: dict[str, tuple[np.ndarray, np.ndarray]]


def read_adapter(decoder: Decoder, folder: Path) -> Adapter:
    """Raises UserError where the folder holds none, or that of another base than `decoder`."""
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no {folder / CONFIG_FILE}: give --adapter a folder as RUN/policies/N/adapter")
    fields = read_json(folder / CONFIG_FILE)
    if not {"r", "lora_alpha"} <= fields.keys():
        raise UserError(f"{folder / CONFIG_FILE} has no r or no lora_alpha: give a LoRA adapter in PEFT's format")
    rank = int(fields["r"])
    made_for, given = fields.get("base_fingerprint"), fingerprint(decoder)
    base = fields.get("base_model_name_or_path")
    if made_for not in (None, given):  # PEFT's own adapters name no fingerprint
        raise UserError(
            f"{folder} corrects {base} (fingerprint {made_for}) and the model given has fingerprint {given}: "
            "give the checkpoint that the adapter was trained on"
        )
    matrices = {}
    with open_file(folder / TENSORS_FILE) as opened:
        foreign = set(opened.keys())
        for weight in projections(decoder.config):
            inputs, outputs = weight.sides
            a_and_b = []
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                names = [_name(weight.hugging_face, layer, part) for layer in range(decoder.config.num_layers)]
                for name in names:
                    _check(opened, name, shape, folder, base)
                foreign -= set(names)
                a_and_b.append(np.stack([opened.get_tensor(name).T for name in names]).astype(np.float32))
            matrices[weight.name] = (a_and_b[0], a_and_b[1])
    if foreign:
        raise UserError(
            f"{folder} has a tensor {min(foreign)} and the model no such matrix: give the checkpoint that the adapter "
            f"was trained on ({base})"
        )
    return Adapter(rank=rank, alpha=float(fields["lora_alpha"]), matrices=matrices)


def with_adapter(decoder: Decoder, folder: Path) -> Decoder:
    """The decoder with the adapter of a folder merged into its weights. Raises UserError as `read_adapter` does."""
    adapter = read_adapter(decoder, folder)
    for name, (a, b) in adapter.matrices.items():
        kernel = getattr(decoder.layers, name)
        kernel.set_value(add_product(kernel.get_value(), jnp.asarray(a), jnp.asarray(b), adapter.alpha / adapter.rank))
    return decoder


def with_trained_adapters(params: nnx.State, adapter: Adapter) -> nnx.State:
    """An adapted decoder's parameters with these adapters in the place of its own, laid out as those are."""
    stacked = {
        f"{name}_lora_{part}": values
        for name, both in adapter.matrices.items()
        for part, values in zip("ab", both, strict=True)
    }

    def placed(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        values = stacked.get(str(path[-1]))
        if values is None:
            return variable
        here: Array = variable.get_value()
        return variable.replace(jax.device_put(jnp.asarray(values, here.dtype), here.sharding))

    return nnx.map_state(placed, params)


def trained_adapters(params: nnx.State) -> dict[str, Array]:
    """The stacked adapters of an adapted decoder's parameters, by name."""
    found = nnx.to_flat_state(nnx.filter_state(params, nnx.LoRAParam))
    return {str(path[-1]): variable.get_value() for path, variable in found}


def _check(opened: Any, name: str, shape: tuple[int, int], folder: Path, base: str | None) -> None:
    found = tuple(opened.get_slice(name).get_shape()) if name in set(opened.keys()) else None
    if found != shape:
        said = "no tensor" if found is None else f"a tensor of {found[0]} x {found[1]} as"
        raise UserError(
            f"{folder} has {said} {name} and the model needs {shape[0]} x {shape[1]}: give the checkpoint that the "
            f"adapter was trained on ({base})"
        )


def _name(module: str, layer: int, part: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module.removesuffix('.weight')}.lora_{part}.weight"
