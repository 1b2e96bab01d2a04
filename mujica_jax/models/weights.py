"""Hugging Face checkpoints in and out: `config.json` and safetensors. Pickled weights are never opened.

The names, shapes and transpositions come from the weight tables in `layers`. Reading has three refusals: a tensor that no weight
is mapped to, one that this configuration does not expect, and one that is set twice; a weight that nothing sets is the fourth.

    python -m mujica_jax.models.weights check DIRECTORY
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mujica_jax.errors import UserError
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import FAMILIES, DecoderConfig, from_hugging_face, to_hugging_face, token_ids
from mujica_jax.models.layers import Weight, block_weights, causal_self_attention, model_weights
from mujica_jax.models.sharding import partition_spec
from mujica_jax.models.tokenizer import Tokenizer

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # the size at which transformers splits a checkpoint, too
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old exports carry; we compute it
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of a checkpoint, with the stop tokens of `generation_config.json` where that file names some."""
    folder = pathlib.Path(directory)
    config = from_hugging_face(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    stops = token_ids(_read_json(generation).get("eos_token_id")) if generation.exists() else ()
    return dataclasses.replace(config, eos_token_ids=stops) if stops else config


def load_checkpoint(
    directory: str | os.PathLike[str], *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Decoder:
    """A decoder with float32 parameters that computes in `dtype`, laid out over `mesh` if one is given."""
    folder = pathlib.Path(directory)
    config = load_config(folder)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(folder, config, stack)
        loaded: dict[str, Any] = {
            weight.name: _put(tensors.read(weight, weight.hugging_face), weight.axes, mesh)
            for weight in model_weights(config)
        }
        loaded["layers"] = {}
        for weight in block_weights(config):
            layers = [tensors.read(weight, _layer_name(weight, layer)) for layer in range(config.num_layers)]
            loaded["layers"][weight.name] = _put(np.stack(layers), ("layers", *weight.axes), mesh)
    nnx.update(decoder, loaded)
    return decoder


def save_checkpoint(decoder: Decoder, directory: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None) -> None:
    """Write a directory that transformers loads. It appears whole or not at all; an existing one is not overwritten."""
    target = pathlib.Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: choose another directory, or remove this one")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    writes = jax.process_index() == 0  # the others only help to gather arrays that are spread over hosts
    if writes:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    try:
        _write_tensors(decoder, partial if writes else None)
        if writes:
            config = decoder.config
            generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
            for name, fields in (("config", to_hugging_face(config)), ("generation_config", generation)):
                (partial / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
            if tokenizer is not None:
                tokenizer.save(partial)
            partial.rename(target)
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)


def _put(values: np.ndarray, logical_axes: tuple[str, ...], mesh: Mesh | None) -> jax.Array:
    """On the default device, or each process's part on its devices of the mesh."""
    if mesh is None:
        return jnp.asarray(values)
    sharding = NamedSharding(mesh, partition_spec(logical_axes, values.shape, mesh))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


class _Tensors:
    """The tensors of a checkpoint directory, opened lazily and checked by name before the first one is read."""

    def __init__(self, folder: pathlib.Path, config: DecoderConfig, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        expected, mapped = {name for name, _ in _names(config)}, _mapped_names(config)
        for path in _safetensors_files(folder):
            opened = stack.enter_context(_open(path))
            for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if IGNORED.search(name):
                    continue
                if LAYER.sub("", name) not in mapped:
                    raise UserError(
                        f"{path} has a tensor {name} and none of our weights is mapped to it: "
                        f"give a checkpoint of one of {', '.join(FAMILIES)}, adapters merged"
                    )
                if name in self.files:
                    raise UserError(f"tensor {name} is set twice in {folder}: remove one of its files")
                self.files[name] = opened
        self._drop_tied_head(config)
        for name in sorted(self.files.keys() - expected):
            raise UserError(
                f"{folder} has a tensor {name} that its config.json does not expect: which of the two is right?"
            )
        for name in sorted(expected - self.files.keys()):
            raise UserError(f"{folder} lacks the tensor {name} that its config.json asks for: download it again")

    def read(self, weight: Weight, name: str) -> np.ndarray:
        """A tensor in our layout, float32."""
        values = self.files[name].get_tensor(name)
        if values.shape != weight.hugging_face_shape:
            raise UserError(
                f"tensor {name} in {self.folder} has shape {values.shape} and config.json asks for "
                f"{weight.hugging_face_shape}: the two files do not belong together"
            )
        values = values.astype(np.float32)
        return (values.T if weight.inputs else values).reshape(weight.shape)

    def _drop_tied_head(self, config: DecoderConfig) -> None:
        """Some exports of tied models store the embedding a second time as head; a head that differs would be lost."""
        if not config.tie_word_embeddings or not {"lm_head.weight", "model.embed_tokens.weight"} <= self.files.keys():
            return
        head, embedding = (self.files[n].get_tensor(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if np.array_equal(head, embedding):
            del self.files["lm_head.weight"]


def _names(config: DecoderConfig) -> Iterator[tuple[str, Weight]]:
    """Every tensor of a checkpoint with the weight it belongs to."""
    for weight in model_weights(config):
        yield weight.hugging_face, weight
    for layer in range(config.num_layers):
        for weight in block_weights(config):
            yield _layer_name(weight, layer), weight


def _mapped_names(config: DecoderConfig) -> set[str]:
    """Tensor names of all families, without their layer: what lies outside is foreign, what lies inside may be unexpected."""
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


def _safetensors_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map") or {}
        return [folder / name for name in sorted(set(weight_map.values()))]
    pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickled:
        raise UserError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when opened: convert them to safetensors first"
        )
    raise UserError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the directory of a Hugging Face checkpoint"
    )


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise UserError(f"{path} is named by {INDEX_FILE} but missing: download it again") from None
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give the directory of a Hugging Face checkpoint") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): download it again") from None


def _write_tensors(decoder: Decoder, folder: pathlib.Path | None) -> None:
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
        if folder is not None:
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if folder is not None and len(files) > 1:
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


def check(directory: str) -> str:
    """A sentence or two about a checkpoint; where torch is installed, with the difference to transformers."""
    decoder = load_checkpoint(directory)
    config = decoder.config
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param)))
    with _open(_safetensors_files(pathlib.Path(directory))[0]) as opened:
        stored = opened.get_slice(next(iter(opened.keys()))).get_dtype()
    lines = [f"family {config.family}, {count:,} parameters, stored as {stored}, stop tokens {config.eos_token_ids}"]
    try:
        import torch
        import transformers
    except ImportError:
        return "\n".join([*lines, "torch is not installed: logits are not compared with transformers"])
    prompt = np.arange(1, 33)[None] * 7 % config.vocab_size
    positions = jnp.arange(prompt.shape[1])[None]
    ours = decoder.logits(decoder(jnp.asarray(prompt), positions, causal_self_attention(jnp.ones_like(positions))))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        difference = np.abs(np.asarray(ours) - theirs(torch.asarray(prompt)).logits.numpy()).max()
    return "\n".join([*lines, f"largest logit difference to transformers over {prompt.size} tokens: {difference:.2e}"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Inspect a Hugging Face checkpoint")
    parser.add_argument("command", choices=["check"])
    parser.add_argument("directory")
    arguments = parser.parse_args()
    try:
        print(check(arguments.directory))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
