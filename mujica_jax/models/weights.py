"""Hugging Face checkpoints in and out: `config.json` and safetensors. Pickled weights are never
opened.

The names, shapes and transpositions come from the weight tables in `layers`; `tensors` says what is
refused.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
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

MAX_FILE_BYTES = 5 * 10**9  # the size at which transformers splits a checkpoint, too
IGNORED = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"
)  # a buffer that old exports carry; we compute it
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_config(directory: Folder) -> DecoderConfig:
    """Read the configuration of a checkpoint, with the stop tokens of `generation_config.json` if
    it names some."""
    folder = pathlib.Path(directory)
    config = from_hugging_face(read_json(folder / "config.json"))
    stops = stop_tokens(folder)
    return dataclasses.replace(config, eos_token_ids=stops) if stops else config


def load_checkpoint(
    directory: Folder, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Decoder:
    """A decoder with float32 parameters that computes in `dtype`, laid out over `mesh` if one is
    given."""
    return open_checkpoint(directory, dtype=dtype)[1](mesh)


def open_checkpoint(
    directory: Folder, *, dtype: DTypeLike = jnp.float32
) -> tuple[Decoder, Callable[..., Decoder]]:
    """The decoder without its arrays, and what reads them: `load(mesh, parameter_dtype)`. What the
    files lack is refused here, before the first tensor is read."""
    folder = pathlib.Path(directory)
    config = load_config(folder)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    tensors = Tensors(
        folder,
        _table(config),
        wanted=f"a checkpoint of one of {', '.join(FAMILIES)}, adapters merged",
        ignored=IGNORED,
        tied=("lm_head.weight", "model.embed_tokens.weight")
        if config.tie_word_embeddings
        else None,
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
    """Write a directory that transformers loads, its tensors in `dtype`. It appears whole or not at
    all; an existing one is not overwritten.

    Where the decoder lies on the devices of several processes, the others call `gather_checkpoint`
    meanwhile."""
    target = pathlib.Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and is not empty: choose another directory, or remove this one"
        )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")

    def write(folder: pathlib.Path) -> None:
        _write_tensors(decoder, folder, jnp.dtype(dtype))
        config = decoder.config
        generation = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids) or None,
        }
        named = to_hugging_face(config) | {"torch_dtype": jnp.dtype(dtype).name}
        for name, fields in (("config", named), ("generation_config", generation)):
            (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(folder)

    write_folder(partial, write)
    partial.rename(target)


def gather_checkpoint(decoder: Decoder) -> None:
    """What the other processes do while one saves a decoder that lies on the devices of all: they
    take part in gathering each tensor, and keep none."""
    for name, weight in _table(decoder.config).names():
        _exported(decoder, weight, name)


def export_tensors(decoder: Decoder) -> dict[str, np.ndarray]:
    """Return the tensors of a Hugging Face checkpoint by name, float32, in the layout that
    transformers has."""
    return {
        name: _exported(decoder, weight, name) for name, weight in _table(decoder.config).names()
    }


def _table(config: DecoderConfig) -> WeightTable:
    return WeightTable(
        outer=model_weights(config),
        inner=block_weights(config),
        num_layers=config.num_layers,
        layer="model.layers.{}.",
        stacked="layers",
    )


def _files(weights: dict[str, Weight], itemsize: int) -> Any:
    """Which tensors each safetensors file holds: one, or several where one would exceed
    MAX_FILE_BYTES."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda weight: itemsize * math.prod(weight.shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )


def _write_tensors(decoder: Decoder, folder: pathlib.Path, dtype: np.dtype) -> None:
    weights = dict(_table(decoder.config).names())
    files = _files(weights, dtype.itemsize)
    for file_name, names in files.filename_to_tensors.items():
        tensors = {name: _exported(decoder, weights[name], name).astype(dtype) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _exported(decoder: Decoder, weight: Weight, name: str) -> np.ndarray:
    """One tensor in the layout of transformers."""
    layer = LAYER.match(name)
    module, index = (decoder, ...) if layer is None else (decoder.layers, int(layer[1]))
    values = getattr(module, weight.name)[index]
    host = on_host(values).astype(np.float32, copy=False)
    theirs = weight.hugging_face_shape
    return np.ascontiguousarray(
        host.reshape(theirs[::-1]).T if weight.inputs else host.reshape(theirs)
    )
