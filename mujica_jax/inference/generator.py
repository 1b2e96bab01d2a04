"""Continuous batching: requests of token ids in, completions of token ids and log-probabilities out.

Agents see the `Generator` protocol and nothing else. `BatchedGenerator` schedules one engine: it keeps the tokens every slot holds, puts
a request into the free slot that shares its longest prefix (a planner that comes back after its workers pays only for the new
observation), prefills in groups of one padded length, and refills slots as soon as their request ends.

Everything runs in the event loop's own thread and in submission order, so a run is a function of its requests: the same program with
the same seeds gives the same completions.
"""

import asyncio
import dataclasses
import heapq
import time
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.engine import Engine, PrefillRow, SlotState


class RequestError(UserError):
    """A request the engine cannot serve. It concerns that request alone; the engine goes on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float  # 0 means greedy
    seed: int  # the same request with the same seed gives the same tokens whatever else is in the batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]  # includes the stop token where finish_reason is "stop"
    logprobs: tuple[float, ...]  # one a token, float32, under the unmodified policy
    finish_reason: Literal["stop", "length"]
    policy_version: int


class Generator(Protocol):
    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        """Complete one prompt. `continues` says that the conversation will come back with this prompt as its beginning:
        such requests overtake others, and their slot is kept as long as others are free. Raises RequestError."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorStatistics:
    """Counted since the generator was made."""

    requests: int
    prompt_tokens: int
    prefilled_tokens: int  # prompt tokens computed; the rest was found in the cache
    generated_tokens: int
    seconds: float  # inside prefill and decode calls
    compiled_programs: int


@dataclasses.dataclass(eq=False)
class _Request:
    prompt: np.ndarray  # int32
    params: SamplingParams
    continues: bool
    future: asyncio.Future
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


class BatchedGenerator:
    """The `Generator` of one engine. Use from one event loop at a time."""

    def __init__(self, engine: Engine, *, prefix_reuse: bool, policy_version: int = 0) -> None:
        self._engine = engine
        self._reuse = prefix_reuse
        self.policy_version = policy_version
        self._waiting: list[tuple[int, int, _Request]] = []
        self._running: dict[int, _Request] = {}
        self._submitted = 0
        self._driver: asyncio.Task | None = None
        self._counts = dict.fromkeys(("requests", "prompt_tokens", "prefilled_tokens", "generated_tokens"), 0)
        self._seconds = 0.0
        self.forget()

    def forget(self) -> None:
        """Drop what the slots hold. Called when weights change, and between units of work so that each is a function of its own
        requests alone."""
        assert not self._running, "slots are forgotten only while nothing runs"
        slots, positions = self._engine.slots, self._engine.positions
        self._held = np.full((slots, positions), -1, np.int32)  # tokens whose keys and values a slot holds
        self._kept = np.zeros(slots, bool)
        self._last_used = np.zeros(slots, np.int64)
        self._state = SlotState(
            token=np.zeros(slots, np.int32),
            position=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            temperature=np.zeros(slots, np.float32),
            seed=np.zeros(slots, np.uint32),
        )

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        self.forget()
        self._engine.set_weights(weights)
        self.policy_version = policy_version

    @property
    def statistics(self) -> GeneratorStatistics:
        return GeneratorStatistics(
            **self._counts, seconds=self._seconds, compiled_programs=self._engine.compiled_programs
        )

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        self._check(prompt, params)
        request = _Request(np.asarray(prompt, np.int32), params, continues, asyncio.get_running_loop().create_future())
        self._submitted += 1
        heapq.heappush(self._waiting, (0 if continues else 1, self._submitted, request))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await request.future

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        room, vocabulary = self._engine.positions, self._engine.config.vocab_size
        if len(prompt) == 0:
            raise RequestError("the prompt is empty: send at least one token")
        if params.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {params.max_new_tokens}: ask for at least 1")
        if not params.temperature >= 0:  # NaN is refused too
            raise RequestError(f"temperature is {params.temperature}: use 0 for greedy or a positive number")
        if len(prompt) + params.max_new_tokens > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones do not fit the engine's {room} positions: "
                "shorten the prompt or raise agent.max_trajectory_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise RequestError(f"token ids {min(prompt)}..{max(prompt)} leave the vocabulary of {vocabulary}")

    async def _drive(self) -> None:
        try:
            while self._waiting or self._running:
                self._admit()
                self._decode()
                # A finished worker wakes its episode through a gather: give such chains a few turns of the loop, so that
                # what they ask next joins the next call.
                for _ in range(6):
                    await asyncio.sleep(0)
        except Exception as error:
            # A fault of the engine concerns everyone who waits: they get it instead of waiting for ever.
            for future in self._abandon():
                future.set_exception(error)
        except asyncio.CancelledError:
            # The event loop ends with requests under way; another one may begin.
            for future in self._abandon():
                future.cancel()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Give up every request; what the slots hold is not known any more. Returns the futures that still wait."""
        requests = [request for _, _, request in self._waiting] + list(self._running.values())
        self._waiting.clear()
        self._running.clear()
        self.forget()
        return [request.future for request in requests if not request.future.done()]

    def _admit(self) -> None:
        """Move waiting requests into free slots and prefill what their slots do not hold."""
        rows: list[PrefillRow] = []
        free = [slot for slot in range(self._engine.slots) if slot not in self._running]
        while self._waiting and free:
            _, _, request = heapq.heappop(self._waiting)
            if request.future.done():  # cancelled while it waited
                continue
            slot, held = self._choose(np.asarray(free), request.prompt)
            free.remove(slot)
            self._place(slot, request)
            if held < len(request.prompt) - 1:
                rows.append(PrefillRow(slot, held, request.prompt[held:-1]))
        self._prefill(rows)

    def _choose(self, free: np.ndarray, prompt: np.ndarray) -> tuple[int, int]:
        """(slot, how many of the prompt's tokens it holds already). The last prompt token is always computed."""
        if not self._reuse:
            return int(free[np.argmin(self._last_used[free])]), 0
        held = self._held[free]
        length = len(prompt) - 1
        same = np.logical_and.accumulate(held[:, :length] == prompt[:length], axis=1)
        shared = same.sum(axis=1)
        # Overwriting a kept conversation costs what it would have to prefill again.
        lost = np.where(self._kept[free], (held >= 0).sum(axis=1) - shared, 0)
        best = np.lexsort((self._last_used[free], lost - shared))[0]
        return int(free[best]), int(shared[best])

    def _place(self, slot: int, request: _Request) -> None:
        prompt, params = request.prompt, request.params
        self._running[slot] = request
        self._held[slot] = -1
        self._held[slot, : len(prompt) - 1] = prompt[:-1]
        self._kept[slot] = request.continues
        self._state.token[slot] = prompt[-1]
        self._state.position[slot] = len(prompt) - 1
        self._state.remaining[slot] = params.max_new_tokens
        self._state.temperature[slot] = params.temperature
        self._state.seed[slot] = params.seed % 2**32
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(prompt)

    def _prefill(self, rows: list[PrefillRow]) -> None:
        began = time.monotonic()
        rows.sort(key=lambda row: len(row.tokens))  # like lengths together; the sort is stable
        while rows:
            count, padded = self._engine.prefill_shape(len(rows[0].tokens))
            fitting = sum(len(row.tokens) <= padded for row in rows[:count])
            self._engine.prefill(rows[:fitting])
            self._counts["prefilled_tokens"] += sum(len(row.tokens) for row in rows[:fitting])
            rows = rows[fitting:]
        self._seconds += time.monotonic() - began

    def _decode(self) -> None:
        if not self._running:
            return
        began = time.monotonic()
        before = self._state.token.copy(), self._state.position.copy()
        state, tokens, logprobs, valid = self._engine.decode(self._state)
        self._state = SlotState(*(np.array(part) for part in state))
        for slot, request in list(self._running.items()):
            steps = int(valid[:, slot].sum())
            new = tokens[:steps, slot]
            position = before[1][slot]
            self._held[slot, position] = before[0][slot]
            self._held[slot, position + 1 : position + steps] = new[:-1]
            request.tokens.extend(new.tolist())
            request.logprobs.extend(logprobs[:steps, slot].tolist())
            self._counts["generated_tokens"] += steps
            if self._state.remaining[slot] == 0 or request.future.done():
                self._finish(slot, request)
        self._seconds += time.monotonic() - began

    def _finish(self, slot: int, request: _Request) -> None:
        finite = np.isfinite(request.logprobs).all()
        if not finite:
            self._engine.clear(slot)
            self._held[slot] = -1
        del self._running[slot]
        self._state.remaining[slot] = 0
        self._last_used[slot] = self._submitted
        self._kept[slot] &= finite and not request.future.done()
        if request.future.done():  # cancelled
            return
        if not finite:
            request.future.set_exception(
                RequestError(f"the policy gave a log-probability that is not finite after {len(request.tokens)} tokens")
            )
            return
        stopped = request.tokens[-1] in self._engine.stop_token_ids
        request.future.set_result(
            Completion(
                token_ids=tuple(request.tokens),
                logprobs=tuple(request.logprobs),
                finish_reason="stop" if stopped else "length",
                policy_version=self.policy_version,
            )
        )
