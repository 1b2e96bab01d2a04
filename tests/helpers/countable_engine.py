"""An engine whose completions can be computed by hand: its cache holds the tokens themselves, and
the next one is their checksum.

A wrong page, a stale or unwritten position, or a token fed twice changes every token that follows.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from flax import nnx

from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.requests import SamplingParams
from tests.helpers.tiny_engine import MODEL

UNWRITTEN = -1


def next_token(
    tokens: Sequence[int], temperature: float, seed: int, vocabulary: int, policy: int = 0
) -> tuple[int, float]:
    """Return the token that follows these tokens and its log-probability.

    The seed counts unless the temperature is 0.
    """
    assert UNWRITTEN not in tokens, "a position was read that nobody had written"
    checksum = (seed % 2**32 if temperature > 0 else 0) + 7919 * policy
    for token in tokens:
        checksum = (31 * checksum + token + 1) % 1_000_003
    return checksum % vocabulary, -float(checksum % 97) / 8


class CountableEngine(Engine):
    """An engine whose memory is pages of tokens. Slots only hold tables of pages, as on a TPU."""

    def __init__(
        self,
        *,
        slots: int = 3,
        positions: int = 64,
        decode_steps: int = 3,
        vocabulary: int = 20,
        page_tokens: int = 4,
        pages: int | None = None,
        prefill_tokens: int = 64,
    ) -> None:
        self.config = dataclasses.replace(MODEL, vocab_size=vocabulary)
        self.slots = slots
        self.positions = positions
        self.decode_steps = decode_steps
        self.page_tokens = page_tokens
        self.prefill_tokens = prefill_tokens
        self.num_pages = slots * -(-positions // page_tokens) if pages is None else pages
        self.stop_token_ids = frozenset({0})
        self.mesh = None
        self.memory = np.full((self.num_pages, page_tokens), UNWRITTEN)
        self.tables: dict[int, list[int]] = {}
        self.decode_calls = 0
        self.fails_at_call = -1
        self.broken_seed = -1  # requests with this seed get log-probabilities that are not finite
        self._programs = set()
        self._dtype = np.dtype(np.float32)
        self._weights = nnx.State({})
        self.policy = 0  # another one gives other tokens

    def set_weights(self, weights: nnx.State) -> None:
        super().set_weights(weights)
        self.policy = int(weights.get("policy", 0))

    def reset_cache(self) -> None:
        self.memory[:] = UNWRITTEN
        self.tables.clear()

    def choose_slot(self, free: Sequence[int], pages: Sequence[int], cached_tokens: int) -> int:
        return free[0]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        assert len(set(targets)) == len(targets), "a page is copied to once"
        self.memory[list(targets)] = self.memory[list(sources)]

    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        assert len({row.slot for row in rows}) == len(rows)
        assert sum(len(row.tokens) for row in rows) <= self.prefill_tokens
        for row in rows:
            self.tables[row.slot] = list(row.pages)
            for position, token in enumerate(row.tokens, start=row.start):
                self._write(row.slot, position, token)
            self._read(row.slot, row.start + len(row.tokens))

    def decode(self, state: SlotState) -> tuple[SlotState, Decoded]:
        self.decode_calls += 1
        if self.decode_calls == self.fails_at_call:
            raise RuntimeError("the device is gone")
        state = SlotState(*(np.array(part) for part in state))
        shape = (self.decode_steps, self.slots)
        decoded = Decoded(
            np.zeros(shape, np.int32),
            *(np.zeros(shape, np.float32) for _ in range(2)),
            np.zeros(shape, bool),
        )
        for step, slot in np.ndindex(shape):
            if state.remaining[slot] == 0:
                continue
            position = int(state.position[slot])
            seed = int(state.seed[slot])
            self._write(slot, position, state.token[slot])
            token, logprob = next_token(
                self._read(slot, position + 1),
                state.temperature[slot],
                seed,
                self.config.vocab_size,
                self.policy,
            )
            decoded.tokens[step, slot] = token
            decoded.valid[step, slot] = True
            decoded.logprobs[step, slot] = math.nan if seed == self.broken_seed else logprob
            decoded.sampling_logprobs[step, slot] = 2 * logprob
            state.token[slot] = token
            state.position[slot] += 1
            state.remaining[slot] = 0 if token in self.stop_token_ids else state.remaining[slot] - 1
        return state, decoded

    def flush(self, rows: Sequence[FlushRow]) -> None:
        for row in rows:
            assert 0 <= row.start < row.stop
            assert len(row.pages) * self.page_tokens >= row.stop

    def free_slot(self, slot: int, *, broken_pages: Sequence[int] = ()) -> None:
        self.tables.pop(slot, None)
        self.memory[list(broken_pages)] = UNWRITTEN

    def _write(self, slot: int, position: int, token: int) -> None:
        page = self.tables[slot][position // self.page_tokens]
        users = [other for other, table in self.tables.items() if page in table]
        assert users == [slot], f"slots {users} read page {page} while {slot} writes it"
        self.memory[page, position % self.page_tokens] = token

    def _read(self, slot: int, tokens: int) -> list[int]:
        return self.memory[self.tables[slot]].reshape(-1)[:tokens].tolist()

    def by_hand(
        self, prompt: Sequence[int], params: SamplingParams, policy: int | None = None
    ) -> tuple[list[int], list[float]]:
        """Return the tokens and log-probabilities that answer a request alone, if it has no stop
        strings.
        """
        tokens = []
        logprobs = []
        stops = self.stop_token_ids.union(params.stop_token_ids)
        policy = self.policy if policy is None else policy
        while len(tokens) < params.max_new_tokens and not (tokens and tokens[-1] in stops):
            token, logprob = next_token(
                [*prompt, *tokens], params.temperature, params.seed, self.config.vocab_size, policy
            )
            tokens.append(token)
            logprobs.append(logprob)
        return tokens, logprobs
