"""Continuous batching: requests of token ids in, completions of token ids and log-probabilities out.

`BatchedGenerator` schedules one engine. A request waits in a bounded queue, leases its pages (finding there what its prompt shares with
earlier sequences), takes a slot, has the rest of its prompt computed in chunks between the decode calls of those that run already, and
decodes. What it computed goes back to the pages when it ends, for whoever begins alike. Two requests that arrive together and begin
alike are not computed twice: the second waits for the first's pages.

Everything runs in the event loop's own thread and in submission order, so a run is a function of its requests: the same program with
the same seeds gives the same completions. Deadlines alone depend on the clock.
"""

import asyncio
import collections
import dataclasses
import heapq
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.paging import Pages
from mujica_jax.inference.requests import (
    Completion,
    OverloadError,
    PolicyError,
    RequestError,
    SamplingParams,
    check_params,
    check_prompt,
)
from mujica_jax.inference.sequence import LiveRequest

FLOAT32 = np.finfo(np.float32)
TURNS_OF_THE_LOOP = 6  # a finished worker wakes its episode through a gather: what it asks next joins the next call


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorStatistics:
    """Counted since the generator was made; `running` and `waiting` are now."""

    requests: int
    prompt_tokens: int
    prefilled_tokens: int  # prompt tokens computed; the rest was found in memory
    generated_tokens: int
    refused: int  # requests that were answered with an error
    seconds: float  # inside prefill and decode calls
    running: int
    waiting: int
    free_pages: int
    evicted_pages: int
    compiled_programs: int

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that was not computed."""
        return 1.0 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class BatchedGenerator:
    """The `Generator` of one engine. Use from one event loop at a time."""

    def __init__(
        self,
        engine: Engine,
        *,
        prefix_reuse: bool,
        queue_size: int,
        token_bytes: Callable[[int], bytes] | None = None,
        policy_version: int = 0,
    ) -> None:
        """`token_bytes` gives a token's text, which stop strings are looked for in."""
        if queue_size < 1:  # whoever waits before the queue would never enter it
            raise UserError(f"queue_size is {queue_size}: give the queue at least 1 place")
        self._engine, self._reuse, self._token_bytes = engine, prefix_reuse, token_bytes
        self._queue_size = queue_size
        self.policy_version = policy_version
        self._waiting: list[tuple[int, int, LiveRequest]] = []
        self._gate: collections.deque[LiveRequest] = collections.deque()  # those that wait for room in the queue
        self._running: dict[int, LiveRequest] = {}
        self._submitted = 0
        self._driver: asyncio.Task | None = None
        self._swap: tuple[nnx.State, int, asyncio.Future] | None = None
        self._counts = dict.fromkeys(
            ("requests", "prompt_tokens", "prefilled_tokens", "generated_tokens", "refused"), 0
        )
        self._seconds = 0.0
        self._evicted = 0
        self._start_empty()

    def forget(self) -> None:
        """Drop what is in memory. Called when weights change, and between units of work so that each is a function of its own
        requests alone."""
        assert not self._running, "memory is forgotten only while nothing runs"
        self._engine.forget()
        self._evicted += self._pages.evicted
        self._start_empty()

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy while nothing runs."""
        self.forget()
        self._engine.set_weights(weights)
        self.policy_version = policy_version

    async def swap_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy under traffic: what runs ends with the old one, what waits begins with the new one."""
        assert self._swap is None, "one swap at a time"
        if not self._running:
            self.set_weights(weights, policy_version)
            return
        swapped = asyncio.get_running_loop().create_future()
        self._swap = (weights, policy_version, swapped)
        await swapped

    @property
    def capacity(self) -> int:
        """Requests that can run and wait at a time."""
        return self._engine.slots + self._queue_size

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._engine.stop_token_ids

    @property
    def full(self) -> bool:
        """The queue has no room."""
        return len(self._waiting) >= self._queue_size

    @property
    def statistics(self) -> GeneratorStatistics:
        return GeneratorStatistics(
            **self._counts,
            seconds=self._seconds,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._gate),
            free_pages=self._pages.free,
            evicted_pages=self._evicted + self._pages.evicted,
            compiled_programs=self._engine.compiled_programs,
        )

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        return await self._submit(self._request(prompt, params, continues, shown=None))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Tokens as they become final, at least one at a time. Raises OverloadError instead of waiting for room in the queue."""
        request = self._request(prompt, params, continues, shown=asyncio.Queue())
        self._leave_queue()
        # Slots may be free although all these wait: memory is short, or a call is due.
        waiting = len(self._waiting) + len(self._gate)
        if len(self._running) + waiting >= self.capacity:
            self._counts["refused"] += 1
            raise OverloadError(
                f"{len(self._running)} requests run and {waiting} wait already, and there is room for {self.capacity}: come back later"
            )
        future = self._submit(request)
        assert request.shown is not None, "made above"
        try:
            while (tokens := await request.shown.get()) is not None:
                yield tokens
            await future
        finally:
            future.cancel()

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, continues: bool, *, shown: asyncio.Queue | None
    ) -> LiveRequest:
        try:
            self._check(prompt, params)
        except RequestError:
            self._counts["refused"] += 1
            raise
        future = asyncio.get_running_loop().create_future()
        return LiveRequest(np.asarray(prompt, np.int32), params, continues, future, shown, self._token_bytes)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_params(params)
        check_prompt(prompt, self._engine.config.vocab_size)
        room = self._engine.positions
        if params.stop_strings and self._token_bytes is None:
            raise RequestError("stop strings need a tokenizer and this generator has none: send stop_token_ids")
        if len(prompt) + params.max_new_tokens > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones do not fit the engine's {room} positions: "
                "shorten the prompt or raise agent.max_trajectory_tokens"
            )
        needed = self._pages.needed(len(prompt) + params.max_new_tokens)
        if needed > self._pages.count:
            raise RequestError(
                f"the request needs {needed} pages of KV memory and the engine has {self._pages.count}: give it more memory"
            )

    def _submit(self, request: LiveRequest) -> asyncio.Future:
        """Back-pressure: where the queue is full a request waits before it, first come first served. Its deadline runs from now."""
        if request.params.deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.params.deadline_seconds, self._expire, request)
            request.future.add_done_callback(lambda _: timer.cancel())
        request.future.add_done_callback(lambda _: request.close())
        if self.full:
            self._gate.append(request)
        else:
            self._enqueue(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return request.future

    def _enqueue(self, request: LiveRequest) -> None:
        self._submitted += 1
        heapq.heappush(self._waiting, (0 if request.continues else 1, self._submitted, request))

    def _expire(self, request: LiveRequest) -> None:
        if not request.future.done():
            self._fail(request, request.deadline_error())

    def _fail(self, request: LiveRequest, error: RequestError) -> None:
        self._counts["refused"] += 1
        request.fail(error)

    async def _drive(self) -> None:
        try:
            while self._waiting or self._running or self._swap:
                self._retire_abandoned()
                self._swap_if_idle()
                self._admit()
                self._prefill()
                while self._admit():  # those who waited for pages that were just computed
                    self._prefill()
                self._decode()
                for _ in range(TURNS_OF_THE_LOOP):
                    await asyncio.sleep(0)
        except Exception as error:
            # A fault of the engine concerns everyone who waits: they get it instead of waiting for ever.
            for future in self._abandon():
                future.set_exception(error)
            self.forget()  # last: an engine that has failed may fail here again
        except asyncio.CancelledError:
            # The event loop ends; another one may begin. What is in memory stays, unless requests were under way.
            if self._waiting or self._running:
                for future in self._abandon():
                    future.cancel()
                self.forget()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Give up every request. Returns the futures that still wait; what is in memory is not known any more and must be forgotten."""
        futures = [request.future for _, _, request in self._waiting]
        futures += [request.future for request in (*self._running.values(), *self._gate)]
        if self._swap is not None:
            futures.append(self._swap[2])
        self._swap = None
        self._waiting.clear()
        self._gate.clear()
        self._running.clear()
        return [future for future in futures if not future.done()]

    def _start_empty(self) -> None:
        self._pages = Pages(self._engine.num_pages, self._engine.page_tokens)
        self._state = SlotState.idle(self._engine.slots)

    def _swap_if_idle(self) -> None:
        if self._swap is not None and not self._running:
            weights, version, swapped = self._swap
            self.set_weights(weights, version)
            self._swap = None  # only now: whoever waits for a swap that fails is told
            if not swapped.done():
                swapped.set_result(None)

    def _retire_abandoned(self) -> None:
        """Free the slots of requests that were cancelled or have expired, and their places in the queue."""
        for slot, request in list(self._running.items()):
            if request.future.done():
                self._leave(slot, request)
        self._leave_queue()

    def _leave_queue(self) -> None:
        """Whoever was cancelled or has expired while waiting makes room for others."""
        self._gate = collections.deque(request for request in self._gate if not request.future.done())
        if any(request.future.done() for _, _, request in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].future.done()]
            heapq.heapify(self._waiting)
            self._open_gate()

    def _admit(self) -> bool:
        """Move waiting requests into free slots, as long as there are pages for them; True if any moved."""
        already = len(self._running)
        free = [slot for slot in range(self._engine.slots) if slot not in self._running]
        being_computed = {
            block
            for request in self._running.values()
            if not request.prefilled
            for block in self._uncached_blocks(request)
        }
        later, copies = [], []
        while self._waiting and free and self._swap is None:
            entry = heapq.heappop(self._waiting)
            request = entry[2]
            prompt = request.prompt
            blocks = self._uncached_blocks(request) if self._reuse else []
            if blocks and blocks[0] in being_computed:  # it waits for what another one computes
                later.append(entry)
                continue
            lease = self._pages.lease(prompt, len(prompt) + request.params.max_new_tokens, reuse=self._reuse)
            if lease is None:  # memory is short: what runs gives some back
                later.append(entry)
                break
            request.lease = lease
            being_computed.update(blocks)
            request.computed = request.flushed = lease.cached_tokens
            slot = self._engine.choose(free, lease.pages, lease.cached_tokens)
            free.remove(slot)
            self._place(slot, request)
            if lease.copied is not None:
                copies.append(lease.copied)
            self._open_gate(len(later))
        for entry in later:
            heapq.heappush(self._waiting, entry)
        if copies:
            self._engine.copy_pages(copies)
        return len(self._running) > already

    def _uncached_blocks(self, request: LiveRequest) -> list[int]:
        """A name for every full page of the prompt that is not in memory, which stands for all tokens up to its end."""
        if request.blocks is None:
            size, prompt, name, request.blocks = self._engine.page_tokens, request.prompt, 0, []
            for start in range(0, (len(prompt) - 1) // size * size, size):
                name = hash((name, prompt[start : start + size].tobytes()))
                request.blocks.append(name)
        cached = self._pages.cached_pages(request.prompt) if request.lease is None else len(request.lease.shared)
        return request.blocks[cached:]

    def _open_gate(self, held_back: int = 0) -> None:
        """Fill the queue; so many of its places belong to requests that are held in hand."""
        while self._gate and len(self._waiting) + held_back < self._queue_size:
            request = self._gate.popleft()
            if not request.future.done():
                self._enqueue(request)

    def _place(self, slot: int, request: LiveRequest) -> None:
        params, state = request.params, self._state
        self._running[slot] = request
        state.token[slot] = request.prompt[-1]
        state.position[slot] = len(request.prompt) - 1
        state.remaining[slot] = 0  # until its prompt is computed
        # What an array cannot hold comes as close as it can: an overflow here would fail everyone who waits.
        state.temperature[slot] = params.temperature and np.clip(params.temperature, FLOAT32.tiny, FLOAT32.max)
        state.seed[slot] = params.seed % 2**32
        state.top_k[slot] = min(params.top_k, self._engine.config.vocab_size)
        state.top_p[slot], state.min_p[slot] = params.top_p, params.min_p
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(request.prompt)

    def _prefill(self) -> None:
        """Compute prompts: one chunk of `prefill_tokens` if most slots decode, else until half of them can."""
        began = time.monotonic()
        while pending := [
            (slot, request) for slot, request in self._running.items() if not self._state.remaining[slot]
        ]:
            self._prefill_chunk(pending)
            decoding = int(np.count_nonzero(self._state.remaining))
            if 2 * decoding >= min(self._engine.slots, len(self._running)):
                break
        self._seconds += time.monotonic() - began

    def _prefill_chunk(self, pending: Sequence[tuple[int, LiveRequest]]) -> None:
        budget, rows, ready = self._engine.prefill_tokens, [], []
        for slot, request in pending:
            tokens = request.prompt[request.computed : -1][:budget]
            assert request.lease is not None, "an admitted request has a lease"
            if budget or not len(request.prompt[request.computed : -1]):
                rows.append(PrefillRow(slot, request.lease.pages, request.computed, tokens))
                request.computed += len(tokens)
                budget -= len(tokens)
                if request.prefilled:
                    ready.append((slot, request))
        self._engine.prefill(rows)
        self._counts["prefilled_tokens"] += sum(len(row.tokens) for row in rows)
        for slot, request in ready:
            self._state.remaining[slot] = request.params.max_new_tokens
        if self._reuse and self._waiting:
            self._share(ready)

    def _share(self, ready: Sequence[tuple[int, LiveRequest]]) -> None:
        """Let those who wait find the prompts that were just computed."""
        size, rows = self._engine.page_tokens, []
        for slot, request in ready:
            whole = (len(request.prompt) - 1) // size * size
            if request.lease is not None and whole > request.flushed:
                rows.append(FlushRow(slot, request.lease.pages, request.flushed, whole))
                request.flushed = whole
        self._engine.flush(rows)
        for row in rows:
            request = self._running[row.slot]
            assert request.lease is not None, "an admitted request has a lease"
            self._pages.share(request.lease, request.prompt[: row.stop])

    def _decode(self) -> None:
        if not self._state.remaining.any():
            return
        began = time.monotonic()
        decoding = [(slot, request) for slot, request in self._running.items() if self._state.remaining[slot]]
        self._state, decoded = self._engine.decode(self._state)
        ended = [(slot, request) for slot, request in decoding if self._take(slot, request, decoded)]
        self._return(ended)
        self._seconds += time.monotonic() - began

    def _take(self, slot: int, request: LiveRequest, decoded: Decoded) -> bool:
        """Hand a request what was generated for it; True if it ends."""
        new = request.take(decoded, slot)
        self._counts["generated_tokens"] += len(new)
        if request.future.done() or not request.finite:
            return True
        ending = request.ending(new, self._engine.stop_token_ids)
        if ending is None and self._state.remaining[slot] == 0:
            ending = len(request.tokens), "length"
        if ending is None:
            request.show()
            return False
        length, reason = ending
        self._counts["generated_tokens"] -= len(request.tokens) - length  # beyond the end: nobody gets them
        request.complete(length, reason, self.policy_version)
        return True

    def _return(self, ended: Sequence[tuple[int, LiveRequest]]) -> None:
        """Free the slots of requests that ended, and leave what they computed in their pages."""
        flushed = []
        for slot, request in ended:
            assert request.lease is not None, "an admitted request has a lease"
            if not request.finite:
                if not request.future.done():
                    after = len(request.tokens)
                    message = (
                        f"the policy gave a log-probability that is not finite after {after} tokens: check its weights"
                    )
                    self._fail(request, PolicyError(message))
                self._engine.retire(slot, broken_pages=self._pages.withdraw(request.lease))
                self._drop(slot, request, held=0)
                continue
            if self._reuse:
                flushed.append(FlushRow(slot, request.lease.pages, request.flushed, request.held_tokens))
        self._engine.flush([row for row in flushed if row.stop > row.start])
        for slot, request in ended:
            if slot in self._running:
                self._engine.retire(slot)
                self._drop(slot, request, held=request.held_tokens if self._reuse else 0)

    def _leave(self, slot: int, request: LiveRequest) -> None:
        """A request that nobody waits for: its pages go back as they were found."""
        assert request.lease is not None, "an admitted request has a lease"
        # Before its first log-probability nobody knows whether what it computed is finite.
        self._engine.retire(slot, broken_pages=() if request.tokens else self._pages.withdraw(request.lease))
        self._drop(slot, request, held=0)

    def _drop(self, slot: int, request: LiveRequest, *, held: int) -> None:
        assert request.lease is not None, "an admitted request has a lease"
        sequence = np.concatenate([request.prompt, np.asarray(request.tokens, np.int32)])[:held]
        self._pages.release(request.lease, sequence)
        request.lease = None
        del self._running[slot]
        self._state.remaining[slot] = 0
