"""Make the generator for `engine.kind jetstream`.

The generator uses either the project's own engine behind JetStream's interface, or the engine that
the function named by `engine.factory` returns.
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
    reserved_bytes: int = 0,
) -> JetStreamGenerator:
    """Make a generator that uses the engine of `engine_config` through JetStream's interface.

    Requests may have up to `positions` tokens, prompt and completion together. `reserved_bytes` of
    each device stay free for the rest of the program.

    The weights of `decoder` become the first policy. If `decoder` holds shapes instead of arrays
    (`nnx.eval_shape`), call `set_weights` before the first prompt. Raises UserError if the engine
    cannot be made or is not suitable.
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
    """Return a copy of a decoder that holds the shapes of the weights instead of the arrays."""
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
    """Make the project's own engine behind JetStream's interface."""
    engine = make_engine(
        without_arrays(decoder),
        engine_config,
        positions=positions,
        stop_token_ids=tokenizer.stop_token_ids,
        reserved_bytes=reserved_bytes,
    )
    return JetStreamEngine(engine, tokenizer=tokenizer, prefix_reuse=engine_config.prefix_reuse)


def _foreign_engine(name: str, engine_config: EngineConfig, request: EngineRequest) -> Any:
    """Call the user's factory and return its engine. Raises UserError if it fails."""
    if engine_config.weights != "compute":
        raise UserError(
            f"engine.weights is {engine_config.weights}, but {name} gets its weights in float32: "
            "use engine.weights compute, and let the factory choose the type of the weights"
        )
    assert engine_config.factory is not None, "checked by the caller"
    try:
        make_foreign_engine = named_object(engine_config.factory, setting="engine.factory")
        engine = make_foreign_engine(request)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} failed ({describe_error(error)}): it is called with one EngineRequest and "
            "must return an engine"
        ) from error
    if not isinstance(engine, engine_api.Engine):
        raise UserError(
            f"{name} returned a {type(engine).__name__}: it must return a "
            "jetstream.engine.engine_api.Engine"
        )
    return engine


def _loader(name: str, engine: Any, graph: nnx.GraphDef) -> Callable[[nnx.State], Any]:
    """Return a function that passes a policy to the engine of a user's factory.

    The function converts the weights to a dictionary of Hugging Face tensors and calls the engine's
    `load_params`. `graph` is the structure of the decoder. Raises UserError if `load_params` has no
    named parameter for the weights.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(engine.load_params).parameters.values()
    if not any(parameter.kind in positional for parameter in parameters):
        raise UserError(
            f"{name} returned an engine whose load_params has no parameter for weights, so it would "
            "never get a new policy: define load_params(self, weights)"
        )

    def load_params(weights: nnx.State) -> Any:
        tensors = export_tensors(nnx.merge(graph, weights))
        try:
            return engine.load_params(tensors)
        except Exception as error:
            raise UserError(
                f"{name} made an engine that cannot load the weights of this model "
                f"({describe_error(error)}): make the engine for EngineRequest.model"
            ) from error

    return load_params


def _check_engine(name: str, engine: Any, *, slots: int, positions: int) -> None:
    """Check the capabilities and the size of an engine. Raises UserError if it is not suitable."""
    try:
        _check_capabilities(name, engine)
        _check_size(name, engine, slots=slots, positions=positions)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} made an engine that does not say how large it is ({describe_error(error)}): "
            "define samples_per_slot, max_concurrent_decodes and max_prefill_length"
        ) from error


def _check_capabilities(name: str, engine: Any) -> None:
    """Check that an engine's methods match its `capabilities`. Raises UserError otherwise."""
    capabilities = getattr(engine, "capabilities", PLAIN_CAPABILITIES)
    if not isinstance(capabilities, Capabilities):
        raise UserError(
            f"{name} made an engine whose attribute capabilities is a "
            f"{type(capabilities).__name__}: it must be a "
            "mujica_jax.inference.generator.Capabilities"
        )
    if capabilities.log_probabilities:
        raise UserError(
            f"{name} made an engine that declares log_probabilities, but JetStream's interface "
            "passes none on: declare log_probabilities=False"
        )
    if capabilities.sampling_per_request:
        insert_parameters = inspect.signature(engine.insert).parameters
        if "sampling" not in insert_parameters:
            raise UserError(
                f"{name} made an engine that declares sampling_per_request, but its insert has no "
                "parameter sampling: define insert(self, prefix, decode_state, slot, *, sampling)"
            )


def _check_size(name: str, engine: Any, *, slots: int, positions: int) -> None:
    """Check that an engine has enough slots and long enough prompts. Raises UserError otherwise."""
    if engine.samples_per_slot != 1:
        raise UserError(
            f"{name} made an engine with {engine.samples_per_slot} samples per slot, but each "
            "request needs exactly one: make the engine with 1"
        )
    if engine.max_concurrent_decodes < slots:
        raise UserError(
            f"{name} made an engine with {engine.max_concurrent_decodes} slots, but "
            f"engine.max_num_seqs is {slots}: lower engine.max_num_seqs to "
            f"{engine.max_concurrent_decodes} or make the engine with more slots"
        )
    if engine.max_prefill_length < positions - 1:
        raise UserError(
            f"{name} made an engine for prompts of at most {engine.max_prefill_length} tokens, but "
            f"conversations may have {positions} (agent.max_trajectory_tokens, or --max-tokens of "
            "serve): lower that setting or raise the engine's max_prefill_length"
        )
    capabilities = getattr(engine, "capabilities", PLAIN_CAPABILITIES)
    if capabilities.positions is not None and capabilities.positions < positions:
        raise UserError(
            f"{name} made an engine whose cache holds {capabilities.positions} tokens per slot, but "
            f"conversations may have {positions} (agent.max_trajectory_tokens, or --max-tokens of "
            "serve): lower that setting or make the engine with a longer cache"
        )
