"""The decoder: embedding, layers, final norm and output head.

    hidden = embedding[tokens]
    hidden = block(layer, hidden)    for each layer
    hidden = rms_norm(hidden)
    logits = hidden @ head.T

Attention is a callback, `attend(layer_index, query, key, value)`, and the decoder has no KV cache
of its own. So training and scoring on packed rows share one forward pass with the engine, whose
callback reads and writes its KV cache.

All layers are one `Block`, whose weights have a leading `layers` axis. The layers run in one of two
ways. A `jax.lax.scan` keeps compile time and program size independent of depth. A Python loop lets
the engine update the cache of each layer in place.

`models.layers` explains the dimensions in shapes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mujica_jax import kernels
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import (
    Attend,
    Block,
    LayerIndex,
    OutputMajor,
    model_weights,
    output_major_product,
    projections,
    rms_norm,
    rotary_angles,
)
from mujica_jax.models.sharding import constrain

Remat = Literal["none", "dots", "full"]
Memory = TypeVar("Memory")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLayer:
    """A weight as one array per layer, in place of one stacked array (`unstacked`)."""

    # Arrays, or what JAX puts in their place while it traces or maps over them.
    layers: tuple[Any, ...]

    def __getitem__(self, layer: int) -> Array:
        return self.layers[layer]


class Decoder(nnx.Module):
    """A causal language model.

    Fresh parameters are float32. Products with kernels are computed in `dtype`, and norms, softmax
    and logits in float32.
    """

    embedding: nnx.Param
    final_norm: nnx.Param
    # Absent in a model with tied embeddings.
    head: nnx.Param

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.config = config
        self.dtype = dtype
        for weight in model_weights(config):
            drawn = weight.draw(rngs.params(), config.initializer_range)
            setattr(self, weight.name, nnx.Param(drawn, logical_axes=weight.axes))
        self.layers = Block(config, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        attend: Attend,
        *,
        scan: bool = True,
        remat: Remat = "none",
    ) -> Float[Array, "batch time hidden"]:
        """Return the hidden states after the final norm.

        With `scan` the layers run in `jax.lax.scan`. `layer_index` is then a traced array, and
        `attend` must not keep state between calls. Without `scan` the layers run in a Python loop,
        and `layer_index` is an int.

        `remat` says what the backward pass computes again instead of storing it:

        - "none": nothing
        - "dots": everything except the products with weights and the results of
          `kernels.packed_attention`
        - "full": whole layers
        """

        def without_memory(
            index: LayerIndex, query: Array, key: Array, value: Array, memory: None
        ) -> tuple:
            return attend(index, query, key, value), memory

        hidden, _ = self.with_memory(
            tokens, positions, without_memory, None, scan=scan, remat=remat
        )
        return hidden

    def with_memory(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        attend: Callable[[LayerIndex, Array, Array, Array, Memory], tuple[Array, Memory]],
        memory: Memory,
        *,
        scan: bool = True,
        remat: Remat = "none",
    ) -> tuple[Float[Array, "batch time hidden"], Memory]:
        """Return the hidden states as `__call__`, and the memory after all layers.

        The memory is a pytree that goes from layer to layer, such as a KV cache. `attend` takes it
        as its last argument and returns (mixed values, new memory). In a scan, XLA updates the
        memory in place.
        """
        rotation = rotary_angles(positions, self.config)
        graph, weights = nnx.split(self.layers)

        def run_layer(
            carry: tuple[Array, Memory], index_and_weights: tuple
        ) -> tuple[tuple[Array, Memory], None]:
            hidden, memory = carry
            index, layer_weights = index_and_weights
            block = nnx.merge(graph, layer_weights)
            attend_once = _AttendOnce(attend, memory)
            hidden = block(index, hidden, rotation, attend_once)
            return (hidden, attend_once.memory), None

        if remat != "none":
            # `prevent_cse` keeps XLA from merging the forward computation of a layer with its
            # repetition in the backward pass. In a scan XLA cannot merge them anyway.
            run_layer = jax.checkpoint(run_layer, policy=_kept_values(remat), prevent_cse=not scan)

        carry = (self.embed(tokens), memory)
        if scan:
            layers = (jnp.arange(self.config.num_layers), weights)
            carry, _ = jax.lax.scan(run_layer, carry, layers)
        else:
            for index in range(self.config.num_layers):
                layer_weights = _weights_of_layer(weights, index)
                carry, _ = run_layer(carry, (index, layer_weights))

        hidden, memory = carry
        return rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps), memory

    def embed(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time hidden"]:
        """Return the embeddings of the tokens, in `dtype`."""
        embeddings = self.embedding[...][tokens].astype(self.dtype)
        return constrain(embeddings, ("batch", None, None))

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of the next token in float32.

        `hidden` is the output of `__call__`, or any selection of its positions.
        """
        return scores(self.head_table().astype(self.dtype), hidden)

    def head_table(self) -> Float[Array, "vocab hidden"]:
        """Return the output head, in the type of the parameters.

        With tied embeddings this is the embedding.
        """
        table = self.embedding if self.config.tie_word_embeddings else self.head
        return table[...]


class _AttendOnce:
    """The callback `attend` for the call of one layer.

    It passes the memory to the caller's function and stores the memory that the function returns.
    """

    def __init__(
        self,
        attend: Callable[[LayerIndex, Array, Array, Array, Any], tuple[Array, Any]],
        memory: Any,
    ) -> None:
        self._attend = attend
        self.memory = memory

    def __call__(self, layer_index: LayerIndex, query: Array, key: Array, value: Array) -> Array:
        mixed, self.memory = self._attend(layer_index, query, key, value, self.memory)
        return mixed


def _kept_values(remat: Literal["dots", "full"]) -> Callable[..., Any] | None:
    """Return the policy of `jax.checkpoint`: which values are stored for the backward pass.

    None stores only the inputs of a layer.
    """
    if remat == "full":
        return None
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(kernels.PACKED_ATTENTION_RESULTS),
    )


def _weights_of_layer(weights: nnx.State, index: int) -> nnx.State:
    """Return the weights of one layer, from stacked or `PerLayer` weights."""
    return jax.tree.map(lambda stacked: stacked[index], weights, is_leaf=_is_per_layer)


@functools.partial(jax.jit, static_argnames=("config", "output_major"))
def unstacked(
    weights: nnx.State, config: DecoderConfig, *, output_major: frozenset[str]
) -> nnx.State:
    """Return the weights of a decoder with one array per layer, for calls without scan.

    A compiled loop of decode steps would otherwise slice each layer from the stacked arrays, and
    XLA on CPU copies each slice. Every step would copy all weights of the model.

    Kernels whose names are in `output_major` are transposed to [outputs, inputs]
    (`kernels.prefers_output_major`).
    """
    transposed = {
        weight.name: weight for weight in projections(config) if weight.name in output_major
    }

    def unstack(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        kernel = variable.get_value()
        weight = transposed.get(path[0])
        if weight is None or not isinstance(kernel, jax.Array):
            return jax.tree.map(lambda stacked: PerLayer(tuple(stacked)), variable)
        inputs, outputs = weight.sides
        layers = tuple(layer.reshape(inputs, outputs).T for layer in kernel)
        return variable.replace(OutputMajor(PerLayer(layers), weight.shape))

    return nnx.State({**weights, "layers": nnx.map_state(unstack, weights["layers"])})


def _is_per_layer(value: object) -> bool:
    return isinstance(value, PerLayer)


def scores(
    table: Float[Array, "vocab hidden"], hidden: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch vocab"]:
    """Return the logits hidden @ table.T in float32.

    `table` is the output head. Rows of `table` are tokens of the vocabulary.
    """
    products = output_major_product(hidden.reshape(-1, hidden.shape[-1]), table)
    return products.reshape(*hidden.shape[:-1], -1)
