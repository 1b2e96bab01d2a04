"""Make the generator of `engine.kind jetstream`.

It drives our engine behind JetStream's interface, or an engine that the user names.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jetstream.engine import engine_api

from mujica_jax.config.named_objects import named_object
from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.factory import check_context, make_engine
from mujica_jax.inference.generator import Capabilities
from mujica_jax.inference.jetstream.contract import EngineRequest
from mujica_jax.inference.jetstream.engine import JetStreamEngine
from mujica_jax.inference.jetstream.generator import (
    PLAIN_CAPABILITIES,
    JetStreamGenerator,
    describe_error,
)
from mujica_jax.inference.queueing import RequestLimits
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import export_tensors

OWN_ENGINE = "the engine behind JetStream's interface"


def make_jetstream_generator(
    decoder: Decoder,
    engine_config: EngineConfig,
    tokenizer: Tokenizer,
    *,
    positions: int,
    queue_size: int,
    reserved_bytes: int = 0,
) -> JetStreamGenerator:
    """Return a generator that drives the engine of `engine_config` through JetStream's interface.

    Requests have up to `positions` tokens. A decoder with arrays is the first policy; one without
    (`nnx.eval_shape`) gives shapes, and `set_weights` brings the policy. Raises UserError for an
    engine that cannot be used.
    """
    check_context(decoder.config, positions)
    stop_token_ids = frozenset(tokenizer.stop_token_ids)
    if engine_config.factory is None:
        name = OWN_ENGINE
        engine = _own_engine(
            decoder, engine_config, tokenizer, positions=positions, reserved_bytes=reserved_bytes
        )
        load_params = engine.load_params
    else:
        name = f"engine.factory {engine_config.factory}"
        request = EngineRequest(
            model=decoder.config,
            tokenizer=tokenizer,
            slots=engine_config.max_num_seqs,
            positions=positions,
            stop_token_ids=stop_token_ids,
            dtype=jnp.dtype(decoder.dtype).name,
            engine=engine_config,
            reserved_bytes=reserved_bytes,
        )
        engine = _foreign_engine(name, engine_config, request)
        load_params = _loader(name, engine, nnx.split(decoder)[0])
    _check_engine(name, engine, slots=engine_config.max_num_seqs, positions=positions)
    limits = RequestLimits(
        slots=engine_config.max_num_seqs,
        positions=positions,
        vocabulary=decoder.config.vocab_size,
        queue_size=queue_size,
    )
    generator = JetStreamGenerator(
        engine,
        limits,
        name=name,
        stop_token_ids=stop_token_ids,
        token_bytes=tokenizer.token_bytes,
        load_params=load_params,
    )
    weights = nnx.state(decoder, nnx.Param)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights)):
        generator.set_weights(weights, 0)
    return generator


def without_arrays(decoder: Decoder) -> Decoder:
    """Return a decoder of the same shapes without its weights."""
    graph, weights = nnx.split(decoder)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    return nnx.merge(graph, shapes)


def _own_engine(
    decoder: Decoder,
    engine_config: EngineConfig,
    tokenizer: Tokenizer,
    *,
    positions: int,
    reserved_bytes: int,
) -> JetStreamEngine:
    """Return our own engine behind JetStream's interface."""
    engine = make_engine(
        without_arrays(decoder),
        engine_config,
        positions=positions,
        stop_token_ids=tokenizer.stop_token_ids,
        reserved_bytes=reserved_bytes,
    )
    return JetStreamEngine(engine, tokenizer=tokenizer, prefix_reuse=engine_config.prefix_reuse)


def _foreign_engine(name: str, engine_config: EngineConfig, request: EngineRequest) -> Any:
    """Call the user's factory."""
    if engine_config.weights != "compute":
        raise UserError(
            f"engine.weights is {engine_config.weights} and {name} gets its weights in float32: "
            "use engine.weights compute, and let the factory choose what its engine holds"
        )
    assert engine_config.factory is not None, "asked by the caller"
    try:
        make_foreign_engine = named_object(engine_config.factory, setting="engine.factory")
        engine = make_foreign_engine(request)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} failed ({describe_error(error)}): it is called with one EngineRequest and "
            "returns an engine"
        ) from error
    if not isinstance(engine, engine_api.Engine):
        raise UserError(
            f"{name} returned a {type(engine).__name__}: it must return a "
            "jetstream.engine.engine_api.Engine"
        )
    return engine


def _loader(name: str, engine: Any, graph: nnx.GraphDef) -> Callable[[nnx.State], Any]:
    """Return a function that gives a policy to a foreign engine, as Hugging Face tensors by name.

    Raises UserError if `load_params` has no parameter for them.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(engine.load_params).parameters.values()
    if not any(parameter.kind in positional for parameter in parameters):
        raise UserError(
            f"{name} returned an engine whose load_params has no parameter for weights, so that it "
            "would never see a new policy: define load_params(self, weights)"
        )

    def load_params(weights: nnx.State) -> Any:
        tensors = export_tensors(nnx.merge(graph, weights))
        try:
            return engine.load_params(tensors)
        except Exception as error:
            raise UserError(
                f"{name} made an engine that does not take the weights of this model "
                f"({describe_error(error)}): make it for EngineRequest.model"
            ) from error

    return load_params


def _check_engine(name: str, engine: Any, *, slots: int, positions: int) -> None:
    """Check that an engine is large enough, and can do what it declares. Raises UserError."""
    try:
        _check_capabilities(name, engine)
        _check_size(name, engine, slots=slots, positions=positions)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} made an engine that does not say how large it is ({describe_error(error)}): "
            "it needs samples_per_slot, max_concurrent_decodes and max_prefill_length"
        ) from error


def _check_capabilities(name: str, engine: Any) -> None:
    """Check that an engine's methods can do what it declares. Raises UserError."""
    capabilities = getattr(engine, "capabilities", PLAIN_CAPABILITIES)
    if not isinstance(capabilities, Capabilities):
        raise UserError(
            f"{name} made an engine whose attribute capabilities is a "
            f"{type(capabilities).__name__}: it must be a "
            "mujica_jax.inference.generator.Capabilities"
        )
    if capabilities.log_probabilities:
        raise UserError(
            f"{name} made an engine that declares log_probabilities and JetStream's interface "
            "passes none: declare log_probabilities=False"
        )
    if capabilities.sampling_per_request:
        insert_parameters = inspect.signature(engine.insert).parameters
        if "sampling" not in insert_parameters:
            raise UserError(
                f"{name} made an engine that declares sampling_per_request and its insert has no "
                "parameter sampling: define insert(self, prefix, decode_state, slot, *, sampling)"
            )


def _check_size(name: str, engine: Any, *, slots: int, positions: int) -> None:
    """Check that an engine is large enough. Raises UserError."""
    if engine.samples_per_slot != 1:
        raise UserError(
            f"{name} made an engine with {engine.samples_per_slot} samples a slot and each request "
            "gets one: make it with 1"
        )
    if engine.max_concurrent_decodes < slots:
        raise UserError(
            f"{name} made an engine with {engine.max_concurrent_decodes} slots and "
            f"engine.max_num_seqs is {slots}: lower engine.max_num_seqs to "
            f"{engine.max_concurrent_decodes} or make it with more"
        )
    if engine.max_prefill_length < positions - 1:
        raise UserError(
            f"{name} made an engine for prompts of at most {engine.max_prefill_length} tokens and "
            f"conversations may have {positions} (agent.max_trajectory_tokens; of serve: "
            "--max-tokens): lower that or raise its max_prefill_length"
        )
    capabilities = getattr(engine, "capabilities", PLAIN_CAPABILITIES)
    if capabilities.positions is not None and capabilities.positions < positions:
        raise UserError(
            f"{name} made an engine whose cache holds {capabilities.positions} tokens a slot and "
            f"conversations may have {positions} (agent.max_trajectory_tokens; of serve: "
            "--max-tokens): lower that or make it with a longer cache"
        )
