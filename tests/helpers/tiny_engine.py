"""A small decoder behind an engine, and the same numbers by the decoder's full forward pass."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mujica_jax import kernels
from mujica_jax.inference.engine import contiguous
from mujica_jax.inference.engine.base import Engine, EngineOptions, SlotState
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from tests.helpers.packed_rows import MODEL as ONE_LAYER
from tests.helpers.tiny_models import filled_decoder

MODEL = dataclasses.replace(ONE_LAYER, vocab_size=70, num_layers=2, num_heads=4, num_kv_heads=2)
NO_STOP = MODEL.vocab_size  # an id that no token has: requests end at max_new_tokens
SLOTS = 4
POSITIONS = 192
PREFILL_TOKENS = 128
DECODE_STEPS = 4
PAGE_TOKENS = 8
PAGES_A_SLOT = POSITIONS // PAGE_TOKENS


@functools.cache
def decoder(config: DecoderConfig = MODEL) -> Decoder:
    return filled_decoder(config)


def make_engine(
    model: Decoder | None = None,
    *,
    slots: int = SLOTS,
    decode_steps: int = DECODE_STEPS,
    stop: int = NO_STOP,
    pages: int = SLOTS * PAGES_A_SLOT,
    cache_dtype: Any = None,
) -> Engine:
    # Read once, by the constructor. With rows read by XLA, of 128 tokens at least, 192 positions
    # have two widths.
    with mock.patch.object(contiguous, "MIN_WIDTH_TOKENS", 128):
        options = EngineOptions(
            slots=slots,
            positions=POSITIONS,
            page_tokens=PAGE_TOKENS,
            num_pages=pages,
            prefill_tokens=PREFILL_TOKENS,
            decode_steps=decode_steps,
            stop_token_ids=[stop],
            cache_dtype=cache_dtype,
        )
        return contiguous.ContiguousEngine(decoder() if model is None else model, options)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let XLA read the rows, as on a GPU, so that their number and width change."""
    monkeypatch.setattr(kernels, "paged_attention", lambda **_: None)


def pages_of_slot(slot: int) -> range:
    """Return the pages that belong to a slot where no tree hands them out."""
    return range(slot * PAGES_A_SLOT, (slot + 1) * PAGES_A_SLOT)


def decoded(engine: Engine, state: SlotState) -> dict[int, tuple[list[int], list[float]]]:
    """Decode until no slot runs. Return the tokens and log-probabilities of each slot."""
    outputs = {int(slot): ([], []) for slot in np.flatnonzero(state.remaining)}
    while state.remaining.any():
        state, call = engine.decode(state)
        for slot, (of_slot, log_probs) in outputs.items():
            valid = call.valid[:, slot]
            of_slot += call.tokens[valid, slot].tolist()
            log_probs += call.logprobs[valid, slot].tolist()
    return outputs


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, count).tolist()


def next_token_logits(model: Decoder, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits [time, vocab] of the token after each position, from one pass over the
    whole sequence.
    """
    padded = np.zeros((1, POSITIONS), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(*nnx.split(model), padded))[0, : len(tokens)]


def log_probs_of(model: Decoder, tokens: Sequence[int], last: int) -> np.ndarray:
    """Return log p of the `last` tokens of a sequence, each given all tokens before it."""
    logits = next_token_logits(model, tokens).astype(np.float64)[-last - 1 : -1]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_probs[np.arange(last), list(tokens[-last:])]


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef, weights: nnx.State, tokens: jax.Array) -> jax.Array:
    whole = nnx.merge(graph, weights)
    positions = jnp.arange(tokens.shape[1])[None]
    return whole.logits(whole(tokens, positions, causal_self_attention(jnp.ones_like(positions))))
