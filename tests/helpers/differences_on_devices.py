"""Measure how far eight virtual devices are from one, kernel by kernel; print JSON.

Started by `test_devices.py`.
"""

import asyncio
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mujica_jax.inference.engine.base import EngineOptions
from mujica_jax.inference.engine.contiguous import ContiguousEngine
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.learning.packing import pack
from mujica_jax.learning.trainer import Trainer, fit
from mujica_jax.models import attention
from mujica_jax.models.quantization import Storage, engine_weights
from mujica_jax.models.sharding import make_mesh, shardings_of
from mujica_jax.retrieval.embedding.embedder import _embed
from mujica_jax.retrieval.embedding.encoder import Encoder, EncoderConfig
from tests.helpers.packed_rows import (
    MODEL,
    SHORT_SCHEDULE,
    TRAINER,
    random_conversations,
    tiny_decoder,
)

# Sizes that fsdp 8 and tensor 4 divide, but for the key heads: those are then whole on every
# device.
WIDE = dataclasses.replace(MODEL, num_heads=4, num_kv_heads=2, num_layers=2)
LORA = {"lora_rank": 3, "lora_alpha": 6.0}  # a rank that no mesh divides
ENCODER = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    max_positions=20,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
)


def trained(**changes) -> tuple[list[np.ndarray], np.ndarray]:
    """Return parameters and moments after two steps, and every token's log-probability."""
    trainer = Trainer(WIDE, dataclasses.replace(TRAINER, **changes))
    rows = pack(random_conversations(36), sequence_length=TRAINER.sequence_length, seed=0)
    state = fit(
        trainer,
        trainer.initial_state(tiny_decoder(WIDE)),
        trainer.batches(rows, seed=0),
        schedule=SHORT_SCHEDULE,
        steps=2,
    ).state
    seen = state.params, state.opt_state, trainer.policy(state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(seen)], trainer.score(state, rows)


def splash(axes: tuple[int, int, int]) -> np.ndarray:
    draw = np.random.default_rng(0)
    states = [
        jnp.asarray(draw.normal(size=(8, 128, count, 64)), jnp.float32) for count in (4, 2, 2)
    ]
    segments = jnp.asarray(np.tile(1 + (np.arange(128) >= 50), (8, 1)), jnp.int32)
    with jax.set_mesh(make_mesh(*axes)):
        return np.asarray(jax.jit(attention._splash)(*states, segments))


def embedded(data: int) -> np.ndarray:
    mesh = make_mesh(data, 1, 1)
    encoder = nnx.jit(lambda: Encoder(ENCODER, rngs=nnx.Rngs(0)))()
    graph, weights = nnx.split(encoder)
    weights = jax.device_put(weights, shardings_of(weights, mesh))
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, 50, (16, 20)).astype(np.int32)
    mask = np.arange(20) < draw.integers(3, 20, (16, 1))
    batch = jax.device_put((tokens, mask), NamedSharding(mesh, PartitionSpec("data")))
    return np.asarray(_embed(graph, weights, *batch, pooling="mean", normalised=True))


def sampled(tensor: int, storage: Storage = "compute") -> np.ndarray:
    """Return tokens and log-probabilities of six conversations with a common beginning.

    The heads of the engine are split over `tensor` devices.
    """
    decoder = tiny_decoder(WIDE)
    options = EngineOptions(
        slots=6,
        positions=128,
        page_tokens=8,
        num_pages=96,
        prefill_tokens=64,
        decode_steps=4,
        stop_token_ids=[WIDE.vocab_size],
        mesh=make_mesh(1, 1, tensor) if tensor > 1 else None,
    )
    engine = ContiguousEngine(decoder, options)
    engine.set_weights(engine_weights(nnx.state(decoder), WIDE, storage, decoder.dtype))
    generator = BatchedGenerator(engine, prefix_reuse=True)
    shared = [token % WIDE.vocab_size for token in range(3, 73)]

    async def converse(number: int) -> list[float]:
        params = SamplingParams(max_new_tokens=9 + number, temperature=1.0, seed=number)
        completion = await generator.generate([*shared, number, 2, 1], params)
        assert completion.logprobs is not None
        return [*completion.token_ids, *completion.logprobs]

    async def main() -> list[list[float]]:
        return await asyncio.gather(*map(converse, range(6)))

    outputs = asyncio.run(main())
    assert engine._prefix_lengths().max() == 64, "what they begin with is held once"
    if tensor > 1:
        assert len(engine._memory.rows.keys[0].sharding.device_set) == tensor
    return np.concatenate([np.asarray(values) for values in outputs])


def apart(ours: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(ours - other)))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    attention._splash = functools.partial(attention._splash, interpret=True)
    differences = {}
    states, scores = trained()
    for axes in (
        {"fsdp": 8},
        {"fsdp": 4, "tensor_parallel_size": 2},
        {"data_parallel_size": 2, "tensor_parallel_size": 4},
    ):
        name = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        others, other_scores = trained(**axes)
        differences[f"{name}: state"] = max(map(apart, states, others))
        differences[f"{name}: log-probabilities"] = apart(scores, other_scores)
    states, scores = trained(**LORA)
    others, other_scores = trained(**LORA, data_parallel_size=2, fsdp=2, tensor_parallel_size=2)
    differences["LoRA, data 2 x fsdp 2 x tensor 2: state"] = max(map(apart, states, others))
    differences["LoRA, data 2 x fsdp 2 x tensor 2: log-probabilities"] = apart(scores, other_scores)
    states, scores = trained(optimizer="muon")
    others, other_scores = trained(
        optimizer="muon", data_parallel_size=2, fsdp=2, tensor_parallel_size=2
    )
    differences["Muon, data 2 x fsdp 2 x tensor 2: state"] = max(map(apart, states, others))
    states, scores = trained(z_loss=0.1)
    others, other_scores = trained(z_loss=0.1, accumulation_steps=2, data_parallel_size=2, fsdp=2)
    differences["z-loss, in two parts, data 2 x fsdp 2: state"] = max(map(apart, states, others))
    differences["z-loss, in two parts, data 2 x fsdp 2: log-probabilities"] = apart(
        scores, other_scores
    )
    on_one_device = splash((1, 1, 1))
    for axes in ((2, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2)):
        differences[f"splash {axes}"] = apart(on_one_device, splash(axes))
    differences["engine tensor 2"] = apart(sampled(1), sampled(2))
    differences["engine tensor 2, int8"] = apart(sampled(1, "int8"), sampled(2, "int8"))
    differences["encoder data 8"] = apart(embedded(1), embedded(8))
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
