"""An engine of somebody else behind JetStream's interface, in the style of MaxText's MaxEngine.

Its decode state is one padded cache of keys and values for all slots. `prefill` computes one padded
prompt and gives `(prefix, ResultTokens)` with the first token, as later versions of JetStream have
it. It marks every result as valid, and it knows no limits and no stop tokens. It reads its weights
by the names of Hugging Face tensors.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from jetstream.engine import engine_api
from safetensors.numpy import save_file

from mujica_jax.inference.generator import Capabilities
from mujica_jax.inference.jetstream.contract import EngineRequest
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.inference.sampling import sample, uniforms
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig, to_hugging_face
from mujica_jax.models.weights import load_checkpoint

COLUMNS = {"tokens_idx": (0, 1), "valid_idx": (1, 2), "length_idx": (2, 3), "samples_per_slot": 1}


class ForeignEngine(engine_api.Engine):
    """A greedy engine.

    The "cache" of a slot is its tokens, and every step reads all of them again: slow and plain.
    """

    def __init__(
        self,
        model: DecoderConfig,
        *,
        slots: int,
        positions: int,
        max_prefill_length: int | None = None,
    ):
        self.model = model
        self.slots = slots
        self.positions = positions
        self._max_prefill_length = positions if max_prefill_length is None else max_prefill_length
        self._graph, self._shapes = nnx.split(
            nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
        )
        self.freed: list[int] = []
        self.prefill_lengths: list[int] = []
        self.loaded = 0

    def load_params(self, weights: dict[str, np.ndarray]) -> nnx.State:
        """Read a `model.safetensors` with these tensors, as transformers would."""
        self.loaded += 1
        with tempfile.TemporaryDirectory() as folder:
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            (Path(folder) / "config.json").write_text(json.dumps(to_hugging_face(self.model)))
            return nnx.state(load_checkpoint(folder), nnx.Param)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            "tokens": jnp.zeros((self.slots, self.positions), jnp.int32),
            "lengths": jnp.ones(self.slots, jnp.int32),
            "generated": jnp.zeros(self.slots, jnp.int32),
        }

    def prefill(
        self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> tuple[Any, Any]:
        assert existing_prefix is None
        self.prefill_lengths.append(len(padded_tokens))
        row = np.zeros((1, self.positions), np.int32)
        row[0, :true_length] = padded_tokens[:true_length]
        logits = _next_logits(self._graph, params, row, np.asarray([true_length], np.int32))
        token = int(np.asarray(logits)[0].argmax())
        prefix = {"tokens": row[0], "length": true_length, "first": token}
        return prefix, engine_api.ResultTokens(data=jnp.asarray([[token, 1, 0]]), **COLUMNS)

    def insert(self, prefix: Any, decode_state: dict[str, Any], slot: int) -> dict[str, Any]:
        tokens = prefix["tokens"].copy()
        length = prefix["length"]
        if length < self.positions:
            tokens[length] = prefix["first"]
        return decode_state | {
            "tokens": decode_state["tokens"].at[slot].set(tokens),
            "lengths": decode_state["lengths"].at[slot].set(length + 1),
            "generated": decode_state["generated"].at[slot].set(1),
        }

    def generate(
        self, params: Any, decode_state: dict[str, Any]
    ) -> tuple[dict[str, Any], engine_api.ResultTokens]:
        # a slot goes on until it is used again
        lengths = jnp.minimum(decode_state["lengths"], self.positions - 1)
        logits = _next_logits(self._graph, params, decode_state["tokens"], lengths)
        token = self._draw(logits, decode_state, lengths)
        rows = jnp.arange(self.slots)
        state = decode_state | {
            "tokens": decode_state["tokens"].at[rows, lengths].set(token),
            "lengths": lengths + 1,
            "generated": decode_state["generated"] + 1,
        }
        data = jnp.stack([token, jnp.ones_like(token), state["generated"]], axis=1)
        return state, engine_api.ResultTokens(data=data, **COLUMNS)

    def _draw(
        self, logits: Float[Array, "slots vocab"], state: dict[str, Any], lengths: Any
    ) -> Int[Array, " slots"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def free_resource(self, slot: int) -> None:
        self.freed.append(slot)

    def get_prefix_destination_sharding(self) -> Any:
        return None

    def get_tokenizer(self) -> Any:
        raise NotImplementedError

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        raise NotImplementedError

    @property
    def colocated_cpus(self) -> None:
        raise NotImplementedError


class SamplingEngine(ForeignEngine):
    """An engine in which each request has its own temperature and seed.

    The first token comes from `generate`.
    """

    capabilities = Capabilities(sampling_per_request=True, log_probabilities=False)

    def prefill(self, **arguments: Any) -> Any:
        return super().prefill(**arguments)[0]

    def init_decode_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().init_decode_state() | {
            "temperature": np.zeros(self.slots, np.float32),
            "seed": np.zeros(self.slots, np.uint32),
        }

    def insert(
        self, prefix: Any, decode_state: dict[str, Any], slot: int, *, sampling: SamplingParams
    ) -> dict[str, Any]:
        state = super().insert(prefix, decode_state, slot)
        # the first token is still to be drawn
        state["lengths"] = state["lengths"].at[slot].set(prefix["length"])
        state["generated"] = state["generated"].at[slot].set(0)
        state["temperature"][slot] = sampling.temperature
        state["seed"][slot] = sampling.seed
        return state

    def _draw(
        self, logits: Float[Array, "slots vocab"], state: dict[str, Any], lengths: Any
    ) -> Int[Array, " slots"]:
        uniform = uniforms(jnp.asarray(state["seed"]), lengths - 1)
        return sample(logits, jnp.asarray(state["temperature"]), uniform).token


@functools.partial(jax.jit, static_argnums=0)
def _next_logits(
    graph: nnx.GraphDef,
    weights: nnx.State,
    tokens: Int[Array, "rows time"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    decoder = nnx.merge(graph, weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = decoder(tokens, positions, causal_self_attention(jnp.ones_like(positions)))
    return decoder.logits(jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0])


def make_engine(request: EngineRequest) -> ForeignEngine:
    return ForeignEngine(request.model, slots=request.slots, positions=request.positions)


def make_sampling_engine(request: EngineRequest) -> ForeignEngine:
    return SamplingEngine(request.model, slots=request.slots, positions=request.positions)


def make_small_engine(request: EngineRequest) -> ForeignEngine:
    return ForeignEngine(request.model, slots=request.slots - 1, positions=request.positions)


def make_short_engine(request: EngineRequest) -> ForeignEngine:
    return ForeignEngine(
        request.model,
        slots=request.slots,
        positions=request.positions,
        max_prefill_length=request.positions // 2,
    )


def make_short_cache(request: EngineRequest) -> ForeignEngine:
    shorter = request.positions - 1
    return _declaring(
        request,
        Capabilities(sampling_per_request=False, log_probabilities=False, positions=shorter),
    )


def make_engine_of_another_model(request: EngineRequest) -> ForeignEngine:
    wider = dataclasses.replace(
        request.model, intermediate_size=2 * request.model.intermediate_size
    )
    return ForeignEngine(wider, slots=request.slots, positions=request.positions)


def _declaring(request: EngineRequest, capabilities: Any) -> ForeignEngine:
    engine: Any = make_engine(request)
    engine.capabilities = capabilities
    return engine


def make_log_probabilities(request: EngineRequest) -> ForeignEngine:
    return _declaring(request, Capabilities(sampling_per_request=False, log_probabilities=True))


def make_alike(request: EngineRequest) -> ForeignEngine:
    return _declaring(request, Capabilities(sampling_per_request=True, log_probabilities=False))


def make_without_record(request: EngineRequest) -> ForeignEngine:
    return _declaring(request, {"sampling_per_request": True})


def make_without_memory(request: EngineRequest) -> ForeignEngine:
    def init_decode_state() -> Any:
        raise MemoryError("no room")

    engine: Any = make_engine(request)
    engine.init_decode_state = init_decode_state
    return engine


class _TwoSamples(ForeignEngine):
    samples_per_slot = 2  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]


class _Deaf(ForeignEngine):
    def load_params(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().load_params(*args)


class _Silent(ForeignEngine):
    @property
    def max_prefill_length(self) -> int:
        raise NotImplementedError


def make_silent_engine(request: EngineRequest) -> ForeignEngine:
    return _Silent(request.model, slots=request.slots, positions=request.positions)


def make_two_samples(request: EngineRequest) -> ForeignEngine:
    return _TwoSamples(request.model, slots=request.slots, positions=request.positions)


def make_deaf_engine(request: EngineRequest) -> ForeignEngine:
    return _Deaf(request.model, slots=request.slots, positions=request.positions)


def make_nothing(request: EngineRequest) -> str:
    return "an engine"


def fail(request: EngineRequest) -> ForeignEngine:
    raise RuntimeError("no such\nchip")


not_a_function = 3
