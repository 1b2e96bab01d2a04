"""The memory of the contiguous engine, and the programs that move what is in it. No model, no policy; the layout
stands in `contiguous.py`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


class KeysValues(NamedTuple):
    """One array a layer."""

    keys: tuple[Num[Array, "rows kv_heads head_dim tokens"], ...]
    values: tuple[Num[Array, "rows kv_heads tokens head_dim"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens in each)."""
        return self.values[0].shape[0], self.values[0].shape[2]


class Memory(NamedTuple):
    pages: KeysValues
    rows: KeysValues
    prefixes: KeysValues  # length 0 where nothing is shared


@functools.partial(jax.jit, donate_argnames=("memory",))
def copy_pages(memory: Memory, sources: Int[Array, " moves"], targets: Int[Array, " moves"]) -> Memory:
    pages = jax.tree.map(lambda layer: layer.at[targets].set(layer[sources]), memory.pages)
    return memory._replace(pages=pages)


@functools.partial(jax.jit, donate_argnames=("memory",))
def load_pages(
    memory: Memory, places: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def load(axis: int, rows: Array, layer: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis]), _page_of_row(places, indices, axis)
        return paged.at[index].set(layer[pages]).reshape(rows.shape)

    return memory._replace(rows=_both(load, memory.rows, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def store_pages(
    memory: Memory, places: Int[Array, " moves"], indices: Int[Array, " moves"], pages: Int[Array, " moves"]
) -> Memory:
    def store(axis: int, layer: Array, rows: Array) -> Array:
        paged, index = _paged(rows, axis, layer.shape[axis]), _page_of_row(places, indices, axis)
        return layer.at[pages].set(paged[index])

    return memory._replace(pages=_both(store, memory.pages, memory.rows))


@functools.partial(jax.jit, donate_argnames=("memory",))
def store_prefix(memory: Memory, place: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    def hold(axis: int, prefixes: Array, layer: Array) -> Array:
        found = jnp.moveaxis(layer[pages], 0, axis - 1)  # the pages beside the tokens of each
        found = found.reshape(1, *found.shape[: axis - 1], -1, *found.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice(prefixes, found, (place, 0, 0, 0))

    return memory._replace(prefixes=_both(hold, memory.prefixes, memory.pages))


@functools.partial(jax.jit, donate_argnames=("memory",))
def shift_row(memory: Memory, place: Int[Array, ""], tokens: Int[Array, ""]) -> Memory:
    def shift(axis: int, rows: Array) -> Array:
        return rows.at[place].set(jnp.roll(rows[place], -tokens, axis=axis - 1))

    return memory._replace(rows=_both(shift, memory.rows))


@functools.partial(jax.jit, donate_argnames=("memory",))
def clear(memory: Memory, place: Int[Array, ""], pages: Int[Array, " pages"]) -> Memory:
    return memory._replace(
        rows=jax.tree.map(lambda layer: layer.at[place].set(0, mode="drop"), memory.rows),
        pages=jax.tree.map(lambda layer: layer.at[pages].set(0), memory.pages),
    )


@jax.jit
def select_rows(rows: KeysValues, places: Int[Array, " rows"]) -> KeysValues:
    return jax.tree.map(lambda layer: layer[places], rows)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def grow(rows: KeysValues, count: int, tokens: int) -> KeysValues:
    def pad(axis: int, layer: Array) -> Array:
        filling = [(0, 0)] * 4
        filling[0], filling[axis] = (0, count - layer.shape[0]), (0, tokens - layer.shape[axis])
        return jnp.pad(layer, filling)

    return _both(pad, rows)


@functools.partial(jax.jit, static_argnames=("tokens",))
def shrink(rows: KeysValues, tokens: int) -> KeysValues:
    return _both(lambda axis, layer: jax.lax.slice_in_dim(layer, 0, tokens, axis=axis), rows)


def _both(function: Callable[..., Array], *memories: KeysValues) -> KeysValues:
    """`function(axis of the tokens, layer of each memory)` for the keys and for the values of every layer."""
    keys = (function(3, *layers) for layers in zip(*(memory.keys for memory in memories), strict=True))
    values = (function(2, *layers) for layers in zip(*(memory.values for memory in memories), strict=True))
    return KeysValues(tuple(keys), tuple(values))


def _paged(rows: Array, axis: int, page_tokens: int) -> Array:
    """The tokens of a row as pages of tokens."""
    return rows.reshape(*rows.shape[:axis], -1, page_tokens, *rows.shape[axis + 1 :])


def _page_of_row(places: Array, indices: Array, axis: int) -> tuple:
    return (places, *[slice(None)] * (axis - 1), indices)
