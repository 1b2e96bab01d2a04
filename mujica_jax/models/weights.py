"""Hugging Face checkpoints in and out: `config.json` and safetensors. Pickled weights are never opened.

The names, shapes and transpositions come from the weight tables in `layers`; `tensors` says what is refused.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import FAMILIES, DecoderConfig, from_hugging_face, to_hugging_face, token_ids
from mujica_jax.models.layers import Weight, block_weights, model_weights
from mujica_jax.models.tensors import INDEX_FILE, SINGLE_FILE, Tensors, read_json
from mujica_jax.models.tokenizer import Tokenizer

MAX_FILE_BYTES = 5 * 10**9  # the size at which transformers splits a checkpoint, too
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old exports carry; we compute it
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of a checkpoint, with the stop tokens of `generation_config.json` where that file names
    some."""
    folder = pathlib.Path(directory)
    config = from_hugging_face(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    stops = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
    return dataclasses.replace(config, eos_token_ids=stops) if stops else config


def load_checkpoint(
    directory: str | os.PathLike[str], *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Decoder:
    """A decoder with float32 parameters that computes in `dtype`, laid out over `mesh` if one is given."""
    folder = pathlib.Path(directory)
    config = load_config(folder)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    mapped = _mapped_names(config)
    tensors = Tensors(
        folder,
        {name for name, _ in _names(config)},
        is_mapped=lambda name: LAYER.sub("", name) in mapped,
        wanted=f"a checkpoint of one of {', '.join(FAMILIES)}, adapters merged",
        ignored=IGNORED,
        tied=("lm_head.weight", "model.embed_tokens.weight") if config.tie_word_embeddings else None,
    )
    loaded: dict[str, Any] = {
        weight.name: tensors.load(weight, weight.hugging_face, mesh) for weight in model_weights(config)
    }
    loaded["layers"] = {}
    for weight in block_weights(config):
        names = [_layer_name(weight, layer) for layer in range(config.num_layers)]
        loaded["layers"][weight.name] = tensors.load_stacked(weight, names, "layers", mesh)
    nnx.update(decoder, loaded)
    return decoder


def save_checkpoint(decoder: Decoder, directory: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None) -> None:
    """Write a directory that transformers loads. It appears whole or not at all; an existing one is not overwritten.

    Where the decoder lies on the devices of several processes, the others call `gather_checkpoint` meanwhile.
    """
    target = pathlib.Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: choose another directory, or remove this one")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_tensors(decoder, partial)
        config = decoder.config
        generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
        for name, fields in (("config", to_hugging_face(config)), ("generation_config", generation)):
            (partial / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def gather_checkpoint(decoder: Decoder) -> None:
    """What the other processes do while one saves a decoder that lies on the devices of all: they take part in
    gathering each tensor, and keep none.
    """
    weights = dict(_names(decoder.config))
    for name in weights:
        _exported(decoder, weights[name], name)


def _names(config: DecoderConfig) -> Iterator[tuple[str, Weight]]:
    """Every tensor of a checkpoint with the weight it belongs to."""
    for weight in model_weights(config):
        yield weight.hugging_face, weight
    for layer in range(config.num_layers):
        for weight in block_weights(config):
            yield _layer_name(weight, layer), weight


def _mapped_names(config: DecoderConfig) -> set[str]:
    """Tensor names of all families, without their layer: what lies outside is foreign, what lies inside may be
    unexpected."""
    mapped = set()
    for family, traits in FAMILIES.items():
        member = dataclasses.replace(
            config,
            family=family,
            attention_bias=traits.attention_bias,
            qk_norm=traits.qk_norm,
            tie_word_embeddings=False,
        )
        mapped |= {weight.hugging_face for weight in (*model_weights(member), *block_weights(member))}
    return mapped


def _layer_name(weight: Weight, layer: int) -> str:
    return f"model.layers.{layer}.{weight.hugging_face}"


def _write_tensors(decoder: Decoder, folder: pathlib.Path) -> None:
    """One safetensors file, or several with an index where one would exceed MAX_FILE_BYTES."""
    files: list[list[str]] = [[]]
    file_bytes = 0
    for name, weight in _names(decoder.config):
        tensor_bytes = 4 * int(np.prod(weight.shape))
        if files[-1] and file_bytes + tensor_bytes > MAX_FILE_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(name)
        file_bytes += tensor_bytes
    weights, weight_map, total_bytes = dict(_names(decoder.config)), {}, 0
    for number, names in enumerate(files, start=1):
        file_name = SINGLE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _exported(decoder, weights[name], name) for name in names}
        total_bytes += sum(values.nbytes for values in tensors.values())
        weight_map |= dict.fromkeys(names, file_name)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _exported(decoder: Decoder, weight: Weight, name: str) -> np.ndarray:
    """One tensor in the layout of transformers."""
    layer = LAYER.match(name)
    values = (
        getattr(decoder, weight.name)[...] if layer is None else getattr(decoder.layers, weight.name)[int(layer[1])]
    )
    if not values.is_fully_addressable:
        from jax.experimental import multihost_utils

        values = multihost_utils.process_allgather(values, tiled=True)
    host = np.asarray(values, dtype=np.float32)
    theirs = weight.hugging_face_shape
    return np.ascontiguousarray(host.reshape(theirs[::-1]).T if weight.inputs else host.reshape(theirs))
