"""Compile programs of one model for a TPU topology that is not attached; print JSON.

Started by `test_tpu_compile.py`.

python -m tests.helpers.tpu_programs train MODEL TOPOLOGY CONFIG [LORA_RANK [SLICES]]
    with the loss of the configuration's method, over so many slices of the topology, each with its rows
python -m tests.helpers.tpu_programs engine MODEL TOPOLOGY TENSOR GIGABYTES [CACHE_DTYPE [WEIGHTS [FILTERED]]]
    with so much memory for keys and values on each chip
python -m tests.helpers.tpu_programs plan MODEL TOPOLOGY CONFIG STEP CALLS
    bytes by phase and part, where the step and the engine's programs have so many bytes of temporaries
python -m tests.helpers.tpu_programs search ROWS DIMENSION TOPOLOGY STORAGE [RECALL_TARGET]
    of a corpus's embeddings, split over all chips
"""

import dataclasses
import functools
import json
import math
import os
import sys
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from mujica_jax.config.files import load_config
from mujica_jax.config.methods import DapoConfig, DecexTreeConfig, GrpoConfig
from mujica_jax.inference.engine import ragged
from mujica_jax.inference.engine.base import SlotState, page_bytes
from mujica_jax.inference.engine.factory import CACHE_DTYPES
from mujica_jax.inference.engine.kv_quantization import calibrate_scales
from mujica_jax.learning.losses.preference import DPO
from mujica_jax.learning.trainer import Trainer
from mujica_jax.methods.grpo import loss_of
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import from_hugging_face
from mujica_jax.models.layers import projections
from mujica_jax.models.quantization import engine_weights
from mujica_jax.models.sharding import make_mesh, shardings_of
from mujica_jax.retrieval.text.exact import MAX_QUERIES, ROWS, layout, rows_mesh, search_program
from mujica_jax.runs.memory import phases
from tests.helpers.collectives_of_programs import collectives
from tests.models.test_families import PUBLISHED

EMBEDDER_BYTES = 670_000_000  # bge-large-en-v1.5, 335 million numbers in bfloat16; on every chip
SLOTS = 128
POSITIONS = 4096
PAGE_TOKENS = 32
PREFILL_TOKENS = 4096
DECODE_STEPS = 16


def train(name: str, topology: str, config: str, lora_rank: str = "0", slices: str = "1") -> dict:
    """Compile a training step.

    Return bytes on each chip, kernels, and the collectives beside the sizes of the arrays that they
    may move.
    """
    method = load_config(config).method
    configured = dataclasses.replace(
        load_config(config).trainer, lora_rank=int(lora_rank), data_parallel_size=int(slices)
    )
    configured = dataclasses.replace(configured, batch_size=int(slices) * configured.batch_size)
    model = from_hugging_face(PUBLISHED[name])
    loss = None
    if isinstance(method, GrpoConfig | DapoConfig):
        loss = loss_of(method)
    elif isinstance(method, DecexTreeConfig):
        loss = DPO(beta=method.beta)
    trainer = Trainer(model, configured, loss=loss, devices=devices_of(topology, int(slices)))
    lowered = trainer.lower_step()
    text = lowered.as_text()
    compiled = lowered.compile()
    return {
        **sizes(compiled),
        "splash": "splash" in text,
        "kernels": text.count("tpu_custom_call"),
        "fsdp": configured.fsdp,
        "hidden_size": model.hidden_size,
        "head": model.vocab_size * model.hidden_size,
        "layer_matrices": {weight.name: math.prod(weight.shape) for weight in projections(model)},
        "layer_vector": max(model.hidden_size, model.num_heads * model.head_dim),
        "optimizer_bytes": sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(trainer.abstract_state().opt_state)
        ),
        "collectives": [
            dataclasses.asdict(collective) for collective in collectives(compiled.as_text())
        ],
    }


def engine(
    name: str,
    topology: str,
    tensor: str,
    gigabytes: str,
    cache: str = "compute",
    storage: Any = "compute",
    filtered: str = "",
) -> dict:
    """Compile one engine for the first chips.

    A topology with more chips has as many engines as fit.
    """
    model = from_hugging_face(PUBLISHED[name])
    mesh = make_mesh(1, 1, int(tensor), devices_of(topology)[: int(tensor)])
    abstract_decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, weights = nnx.split(abstract_decoder)
    weights = jax.eval_shape(
        lambda weights: engine_weights(weights, model, storage, jnp.bfloat16), weights
    )

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    weights = jax.tree.map(placed, weights, shardings_of(weights, mesh))
    dtype = CACHE_DTYPES.get(cache, jnp.bfloat16)
    size = page_bytes(model, PAGE_TOKENS, dtype) // int(tensor)
    layout = ragged.Layout(int(float(gigabytes) * 1e9) // size, PAGE_TOKENS, mesh)

    def whole(shape: tuple[int, ...], kind: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, PartitionSpec()))

    pages: Any = jax.ShapeDtypeStruct(
        ragged.pages_shape(model, layout), dtype, sharding=NamedSharding(mesh, ragged.PAGES_SPEC)
    )
    tables = whole((SLOTS, POSITIONS // PAGE_TOKENS))
    tokens = whole((PREFILL_TOKENS,))
    sequences = ragged.Sequences(whole((SLOTS,)), tables, whole((SLOTS + 1,)), whole((1,)))
    state = jax.tree.map(lambda leaf: whole(leaf.shape, leaf.dtype), SlotState.idle(SLOTS))
    report: dict[str, Any] = {"page_bytes": layout.num_pages * size}
    with jax.set_mesh(mesh):
        scales = None
        if cache == "int8":
            scales = jax.eval_shape(functools.partial(calibrate_scales, graph), weights)
        inputs = (graph, weights, scales, pages)
        decode = ragged._decode.lower(
            *inputs,
            ragged.DecodeCall(state, tables, whole((1,))),
            program=ragged.DecodeProgram(layout, DECODE_STEPS, bool(filtered)),
        )
        new_tokens = ragged.NewTokens(tokens, tokens, tokens)
        prefill = ragged._prefill.lower(*inputs, new_tokens, sequences, layout=layout)
    for kind, lowered in (("decode", decode), ("prefill", prefill)):
        kernels = lowered.as_text().count("tpu_custom_call")
        report[kind] = sizes(lowered.compile()) | {"kernels": kernels}
    return report


def plan(name: str, topology: str, config: str, step: str, calls: str) -> dict:
    configured = load_config(config)
    model = from_hugging_face(PUBLISHED[name])
    devices = devices_of(topology)
    trainer = Trainer(model, configured.trainer, devices=devices)
    planned = phases(
        configured, model, trainer, step=int(step), calls=int(calls), retrieval=EMBEDDER_BYTES
    )
    hosts = {device.process_index for device in devices}
    return {
        "phases": {phase.name: dict(phase.parts) for phase in planned},
        "chips_a_host": len(devices) // len(hosts),
        "tensor": configured.engine.tensor_parallel_size,
        "cache": str(configured.engine.cache_gigabytes),
    }


def search(rows: str, dimension: str, topology: str, storage: str, recall_target: str = "") -> dict:
    mesh = rows_mesh(devices_of(topology))
    block, padded = layout(int(rows), mesh.size)
    program = search_program(mesh, block, 20, float(recall_target) if recall_target else None)
    split = NamedSharding(mesh, PartitionSpec(ROWS))
    everywhere = NamedSharding(mesh, PartitionSpec(None))
    vectors = jax.ShapeDtypeStruct((padded, int(dimension)), storage, sharding=split)
    scales = None
    if storage == "int8":
        scales = jax.ShapeDtypeStruct((padded,), jnp.float32, sharding=split)
    queries = jax.ShapeDtypeStruct((MAX_QUERIES, int(dimension)), jnp.float32, sharding=everywhere)
    report = sizes(program.lower(vectors, scales, queries, int(rows)).compile())
    return report | {
        "chips": mesh.size,
        "embedding_bytes": padded // mesh.size * int(dimension) * vectors.dtype.itemsize,
    }


def devices_of(topology: str, slices: int = 1) -> list:
    return topologies.get_topology_desc(
        topology_name=topology, platform="tpu", num_slices=slices
    ).devices


def sizes(compiled: Any) -> dict[str, int]:
    """Return the bytes of a program on each chip."""
    memory = compiled.memory_analysis()
    used = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    # what is donated is written in its own place
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "bytes": used,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {"train": train, "engine": engine, "plan": plan, "search": search}[sys.argv[1]](
                *sys.argv[2:]
            )
        )
    )
