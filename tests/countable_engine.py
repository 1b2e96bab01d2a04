"""An engine whose completions can be computed by hand: its cache holds the tokens themselves, and the next one is their checksum.

A wrong slot, a stale or unwritten position, or a token fed twice changes every token that follows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from flax import nnx
from tiny_engine import MODEL

from mujica_jax.inference.engine import Engine, PrefillRow, SlotState
from mujica_jax.inference.generator import SamplingParams

UNWRITTEN = -1


def next_token(tokens: Sequence[int], temperature: float, seed: int, vocabulary: int) -> tuple[int, float]:
    """(token, log-probability) after these tokens; the seed counts unless the temperature is 0."""
    assert UNWRITTEN not in tokens, "a position was read that nobody had written"
    checksum = seed % 2**32 if temperature > 0 else 0
    for token in tokens:
        checksum = (31 * checksum + token + 1) % 1_000_003
    return checksum % vocabulary, -float(checksum % 97) / 8


class CountableEngine(Engine):
    def __init__(self, *, slots: int = 3, positions: int = 64, decode_steps: int = 3, vocabulary: int = 20) -> None:
        self.config = dataclasses.replace(MODEL, vocab_size=vocabulary)
        self.slots, self.positions, self.decode_steps, self.prefill_tokens = slots, positions, decode_steps, 64
        self.stop_token_ids = frozenset({0})
        self.cache = np.full((slots, positions), UNWRITTEN)
        self.decode_calls = 0
        self.fails_at_call = -1
        self._programs = set()
        self._weights = nnx.State({})

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        count, padded = self.prefill_shape(max(len(row.tokens) for row in rows))
        assert len(rows) <= count and len({row.slot for row in rows}) == len(rows)
        assert all(0 < len(row.tokens) <= padded for row in rows)
        for row in rows:
            self.cache[row.slot, row.start : row.start + len(row.tokens)] = row.tokens

    def decode(self, state: SlotState) -> tuple[SlotState, np.ndarray, np.ndarray, np.ndarray]:
        self.decode_calls += 1
        if self.decode_calls == self.fails_at_call:
            raise RuntimeError("the device is gone")
        state = SlotState(*(np.array(part) for part in state))
        shape = (self.decode_steps, self.slots)
        tokens, logprobs, valid = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, bool)
        for step, slot in np.ndindex(shape):
            if state.remaining[slot] == 0:
                continue
            position = state.position[slot]
            self.cache[slot, position] = state.token[slot]
            token, logprob = next_token(
                self.cache[slot, : position + 1].tolist(),
                state.temperature[slot],
                int(state.seed[slot]),
                self.config.vocab_size,
            )
            tokens[step, slot], logprobs[step, slot], valid[step, slot] = token, logprob, True
            state.token[slot] = token
            state.position[slot] += 1
            state.remaining[slot] = 0 if token in self.stop_token_ids else state.remaining[slot] - 1
        return state, tokens, logprobs, valid

    def by_hand(self, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], list[float]]:
        """What a request alone is answered with."""
        tokens, logprobs = [], []
        while len(tokens) < params.max_new_tokens and not (tokens and tokens[-1] in self.stop_token_ids):
            token, logprob = next_token([*prompt, *tokens], params.temperature, params.seed, self.config.vocab_size)
            tokens.append(token)
            logprobs.append(logprob)
        return tokens, logprobs
