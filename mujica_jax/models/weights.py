"""Read and write Hugging Face checkpoints: `config.json` and safetensors files.

The weight tables in `layers` give the names and shapes of the tensors, and say which of them are
stored transposed. `tensors` reads and checks the files. Pickled weights are never opened, because
they can run code.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json, stop_tokens
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import FAMILIES, DecoderConfig, from_hugging_face, to_hugging_face
from mujica_jax.models.layers import Weight, block_weights, model_weights
from mujica_jax.models.sharding import on_host
from mujica_jax.models.tensors import INDEX_FILE, Folder, Tensors, WeightTable
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.storage.local import write_folder

# Largest size of a safetensors file. transformers splits checkpoints at the same size.
MAX_FILE_BYTES = 5 * 10**9
# A buffer that is in old exports and is ignored. The decoder computes its values.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_config(directory: Folder) -> DecoderConfig:
    """Return the configuration of a checkpoint, from its `config.json`.

    If `generation_config.json` names stop tokens, these replace the stop tokens of `config.json`.
    """
    folder = pathlib.Path(directory)
    config = from_hugging_face(read_json(folder / "config.json"))
    stop_token_ids = stop_tokens(folder)
    if stop_token_ids:
        config = dataclasses.replace(config, eos_token_ids=stop_token_ids)
    return config


def load_checkpoint(
    directory: Folder, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Decoder:
    """Return the decoder of a checkpoint, with float32 parameters.

    It computes in `dtype`. With `mesh` its parameters are sharded over the mesh, else they are on
    the default device.
    """
    _, load = open_checkpoint(directory, dtype=dtype)
    return load(mesh)


def open_checkpoint(
    directory: Folder, *, dtype: DTypeLike = jnp.float32
) -> tuple[Decoder, Callable[..., Decoder]]:
    """Return a decoder without arrays, and a function that loads them from the checkpoint.

    The function is `load(mesh, parameter_dtype)` and returns a decoder. Raises UserError if a
    tensor is missing or unexpected, before the first tensor is read.
    """
    folder = pathlib.Path(directory)
    config = load_config(folder)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    tied = None
    if config.tie_word_embeddings:
        tied = ("lm_head.weight", "model.embed_tokens.weight")
    tensors = Tensors(
        folder,
        _table(config),
        needed=f"a checkpoint of one of {', '.join(FAMILIES)} with its adapters merged",
        ignored=IGNORED,
        tied=tied,
    )

    def load(mesh: Mesh | None = None, parameter_dtype: DTypeLike = jnp.float32) -> Decoder:
        decoder = nnx.clone(abstract)
        nnx.update(decoder, tensors.load(mesh, parameter_dtype))
        return decoder

    return abstract, load


def save_checkpoint(
    decoder: Decoder,
    directory: Folder,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = jnp.float32,
) -> None:
    """Write a directory that transformers can load, with tensors in `dtype`.

    The files are first written into a folder beside the target, which is then renamed. So the
    directory appears with all of its files or not at all. Raises UserError if the directory exists
    and is not empty.

    If the decoder is split over the devices of several processes, one process calls this function.
    All other processes must call `gather_checkpoint` at the same time.
    """
    target = pathlib.Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and is not empty: choose another directory, or remove this one"
        )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")

    def write(folder: pathlib.Path) -> None:
        _write_tensors(decoder, folder, jnp.dtype(dtype))
        _write_configs(decoder.config, folder, jnp.dtype(dtype))
        if tokenizer is not None:
            tokenizer.save(folder)

    write_folder(partial, write)
    partial.rename(target)


def gather_checkpoint(decoder: Decoder) -> None:
    """Take part in gathering each tensor, and discard it.

    One process calls `save_checkpoint` for a decoder that is split over the devices of several
    processes. All other processes call this function.
    """
    for name, weight in _table(decoder.config).names():
        _exported(decoder, weight, name)


def export_tensors(decoder: Decoder) -> dict[str, np.ndarray]:
    """Return the tensors of a Hugging Face checkpoint by name.

    They are float32 and have the shapes of transformers.
    """
    table = _table(decoder.config)
    return {name: _exported(decoder, weight, name) for name, weight in table.names()}


def _table(config: DecoderConfig) -> WeightTable:
    """Return the weights of a decoder with their names in a Hugging Face checkpoint."""
    return WeightTable(
        outer=model_weights(config),
        inner=block_weights(config),
        num_layers=config.num_layers,
        layer="model.layers.{}.",
        stacked="layers",
    )


def _files(weights: dict[str, Weight], itemsize: int) -> Any:
    """Return which tensors go into which safetensors file.

    `weights` maps tensor names to weights, and `itemsize` is the number of bytes of an element. All
    tensors go into one file, or into several if one would exceed MAX_FILE_BYTES.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda weight: itemsize * math.prod(weight.shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )


def _write_tensors(decoder: Decoder, folder: pathlib.Path, dtype: np.dtype) -> None:
    """Write the safetensors files, one after the other, and an index if there are several."""
    weights = dict(_table(decoder.config).names())
    files = _files(weights, dtype.itemsize)
    for file_name, names in files.filename_to_tensors.items():
        tensors = {name: _exported(decoder, weights[name], name).astype(dtype) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        _write_json(index, folder / INDEX_FILE)


def _write_configs(config: DecoderConfig, folder: pathlib.Path, dtype: np.dtype) -> None:
    """Write `config.json` and `generation_config.json`."""
    fields = to_hugging_face(config)
    fields["torch_dtype"] = dtype.name
    _write_json(fields, folder / "config.json")

    generation_fields = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    _write_json(generation_fields, folder / "generation_config.json")


def _write_json(fields: Mapping[str, Any], file: pathlib.Path) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n")


def _exported(decoder: Decoder, weight: Weight, name: str) -> np.ndarray:
    """Return the tensor of this name on the host, with the shape that it has in transformers."""
    layer = LAYER.match(name)
    if layer is None:
        values = getattr(decoder, weight.name)[...]
    else:
        values = getattr(decoder.layers, weight.name)[int(layer[1])]

    host_values = on_host(values).astype(np.float32, copy=False)
    shape = weight.hugging_face_shape
    if weight.inputs:
        # transformers stores a kernel as a matrix [outputs, inputs].
        host_values = host_values.reshape(shape[::-1]).T
    else:
        host_values = host_values.reshape(shape)
    return np.ascontiguousarray(host_values)
