"""Continuous batching: requests of token ids in, completions of token ids and log-probabilities out.

`BatchedGenerator` schedules one engine. A request waits in a priority queue, gets a block table (with the pages of the
prefix that earlier sequences share with its prompt), takes a slot, has the rest of its prompt computed in chunks
between the decode calls of those that run already, and decodes. When it ends, its pages go to the prefix cache. Of two
requests that arrive together with a common prefix, the second waits for the first's pages.

Everything runs in the event loop's own thread and in submission order, so a run is a function of its requests: the same
program with the same seeds gives the same completions. Deadlines alone depend on the clock.
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from flax import nnx

from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, PrefillRow, SlotState
from mujica_jax.inference.generator import Capabilities, GeneratorStatistics
from mujica_jax.inference.paging import BlockAllocator
from mujica_jax.inference.requests import (
    Completion,
    OverloadError,
    PolicyError,
    RequestError,
    SamplingParams,
    check_params,
    check_prompt,
)
from mujica_jax.inference.sequence import SequenceState

FLOAT32 = np.finfo(np.float32)
# Prompts are computed first until this share of the running requests decodes, where one is waited for (it is streamed
# or has a deadline) and where all is one batch: there a decode call should be full, for it costs the same for few.
DECODING_SHARE_WATCHED, DECODING_SHARE = 1 / 2, 7 / 8
MAX_DEFERRED_CALLS = 2  # decode calls that a prompt of a batch waits for others to fill a call with
EVENT_LOOP_TURNS = 6  # a finished worker wakes its episode through a gather: what it asks next joins the next call


class BatchedGenerator:
    """The `Generator` of one engine. Use from one event loop at a time."""

    capabilities = Capabilities(sampling_per_request=True, log_probabilities=True)

    def __init__(
        self,
        engine: Engine,
        *,
        prefix_reuse: bool,
        queue_size: int,
        token_bytes: Callable[[int], bytes] | None = None,
        policy_version: int = 0,
    ) -> None:
        """`queue_size` bounds how many may wait before a stream is refused; `generate` waits in any case. `token_bytes`
        gives a token's text, which stop strings are looked for in.
        """
        self._engine, self._reuse, self._token_bytes = engine, prefix_reuse, token_bytes
        self._queue_size = queue_size
        self.policy_version = policy_version
        self._waiting: list[tuple[int, int, SequenceState]] = []
        self._running: dict[int, SequenceState] = {}
        self._submitted = 0
        self._driver: asyncio.Task | None = None
        counted = ("requests", "prompt_tokens", "prefilled_tokens", "generated_tokens", "refused")
        self._counts = dict.fromkeys(counted, 0)
        self._seconds = 0.0
        self._evicted = self._deferred_calls = 0
        self._allocate_slots()

    def reset_cache(self) -> None:
        """Drop all cached prefixes. Called when weights change, and between units of work so that each is a function of
        its own requests alone.
        """
        assert not self._running, "the cache is reset only while nothing runs"
        self._engine.reset_cache()
        self._evicted += self._blocks.evicted
        self._allocate_slots()

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy while nothing runs."""
        self.reset_cache()
        self._engine.set_weights(weights)
        self.policy_version = policy_version

    def release_weights(self) -> None:
        """Give the policy's memory back while nothing runs; `set_weights` brings the next one."""
        self._engine.release_weights()

    @property
    def capacity(self) -> int:
        """Requests that can run and wait at a time before a stream is refused."""
        return self._engine.slots + self._queue_size

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._engine.stop_token_ids

    @property
    def statistics(self) -> GeneratorStatistics:
        return GeneratorStatistics(
            **self._counts,
            seconds=self._seconds,
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=self._blocks.free,
            evicted_pages=self._evicted + self._blocks.evicted,
            compiled_programs=self._engine.compiled_programs,
        )

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False) -> Completion:
        return await self._submit(self._request(prompt, params, continues, shown=None))

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, continues: bool = False
    ) -> AsyncIterator[Sequence[int]]:
        """Tokens as they are decoded, at least one at a time. Raises OverloadError where the queue is full."""
        sequence = self._request(prompt, params, continues, shown=asyncio.Queue())
        self._drop_given_up()
        waiting = len(self._waiting)  # slots may be free all the same: memory is short, or a call is due
        if len(self._running) + waiting >= self.capacity:
            self._counts["refused"] += 1
            raise OverloadError(
                f"{len(self._running)} requests run and {waiting} wait already, and there is room for {self.capacity}: "
                "come back later"
            )
        future = self._submit(sequence)
        assert sequence.shown is not None, "made above"
        try:
            while (tokens := await sequence.shown.get()) is not None:
                yield tokens
            await future
        finally:
            future.cancel()

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, continues: bool, *, shown: asyncio.Queue | None
    ) -> SequenceState:
        try:
            self._check(prompt, params)
        except RequestError:
            self._counts["refused"] += 1
            raise
        future = asyncio.get_running_loop().create_future()
        return SequenceState(np.asarray(prompt, np.int32), params, continues, future, shown, self._token_bytes)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_params(params)
        check_prompt(prompt, self._engine.config.vocab_size)
        room = self._engine.positions
        if params.stop_strings and self._token_bytes is None:
            raise RequestError("stop strings need a tokenizer and this generator has none: send stop_token_ids")
        if len(prompt) + params.max_new_tokens > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones do not fit the engine's {room} "
                "positions: shorten the prompt or raise agent.max_trajectory_tokens (of serve: --max-tokens)"
            )
        needed = self._blocks.needed(len(prompt) + params.max_new_tokens)
        if needed > self._blocks.count:
            raise RequestError(
                f"the request needs {needed} pages of KV memory and the engine has {self._blocks.count}: give it more "
                "memory"
            )

    def _submit(self, sequence: SequenceState) -> asyncio.Future:
        """Enqueue; the deadline runs from now."""
        if sequence.params.deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(sequence.params.deadline_seconds, self._expire, sequence)
            sequence.future.add_done_callback(lambda _: timer.cancel())
        sequence.future.add_done_callback(lambda _: sequence.close())
        self._submitted += 1
        heapq.heappush(self._waiting, (0 if sequence.continues else 1, self._submitted, sequence))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return sequence.future

    def _expire(self, sequence: SequenceState) -> None:
        if not sequence.future.done():
            self._fail(sequence, sequence.deadline_error())

    def _fail(self, sequence: SequenceState, error: RequestError) -> None:
        self._counts["refused"] += 1
        sequence.future.set_exception(error)

    async def _drive(self) -> None:
        try:
            while self._waiting or self._running:
                self._free_given_up()
                self._admit()
                self._prefill()
                while self._admit():  # those who waited for pages that were just computed
                    self._prefill()
                self._decode()
                for _ in range(EVENT_LOOP_TURNS):
                    await asyncio.sleep(0)
        except Exception as error:
            # A fault of the engine concerns everyone who waits: they get it instead of waiting for ever.
            for future in self._abandon():
                future.set_exception(error)
            self.reset_cache()  # last: an engine that has failed may fail here again
        except asyncio.CancelledError:
            # The event loop ends; another one may begin. What is in memory stays, unless requests were under way.
            if self._waiting or self._running:
                for future in self._abandon():
                    future.cancel()
                self.reset_cache()
            raise

    def _abandon(self) -> list[asyncio.Future]:
        """Give up every sequence. Returns the futures that still wait; the cache must be reset."""
        futures = [sequence.future for _, _, sequence in self._waiting]
        futures += [sequence.future for sequence in self._running.values()]
        self._waiting.clear()
        self._running.clear()
        return [future for future in futures if not future.done()]

    def _allocate_slots(self) -> None:
        self._blocks = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
        self._state = SlotState.idle(self._engine.slots)

    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or have expired, and their places in the queue."""
        for slot, sequence in list(self._running.items()):
            if sequence.future.done():  # nobody waits for it: its pages go back as they were found
                # Before its first log-probability nobody knows whether what it computed is finite.
                broken = () if sequence.tokens else self._blocks.evict(sequence.block_table)
                self._engine.free_slot(slot, broken_pages=broken)
                self._drop(slot, sequence, held=0)
        self._drop_given_up()

    def _drop_given_up(self) -> None:
        if any(sequence.future.done() for _, _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].future.done()]
            heapq.heapify(self._waiting)

    def _admit(self) -> bool:
        """Move waiting requests into free slots, as long as there are pages for them; True if any moved."""
        already = len(self._running)
        free = [slot for slot in range(self._engine.slots) if slot not in self._running]
        being_computed = {
            block
            for sequence in self._running.values()
            if not sequence.prefilled
            for block in self._block_names(sequence)[len(sequence.block_table.shared) :]
        }
        later, copies = [], []
        while self._waiting and free:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            prompt = sequence.prompt
            blocks = self._block_names(sequence)[self._blocks.cached_pages(prompt) :] if self._reuse else []
            if blocks and blocks[0] in being_computed:  # it waits for what another one computes
                later.append(entry)
                continue
            block_table = self._blocks.allocate(prompt, len(prompt) + sequence.params.max_new_tokens, reuse=self._reuse)
            if block_table is None:  # memory is short: what runs gives some back
                later.append(entry)
                break
            sequence.block_table = block_table
            being_computed.update(blocks)
            sequence.computed = sequence.flushed = block_table.cached_tokens
            slot = self._engine.choose_slot(free, block_table.pages, block_table.cached_tokens)
            free.remove(slot)
            self._place(slot, sequence)
            if block_table.copied is not None:
                copies.append(block_table.copied)
        for entry in later:
            heapq.heappush(self._waiting, entry)
        if copies:
            self._engine.copy_pages(copies)
        return len(self._running) > already

    def _block_names(self, sequence: SequenceState) -> list[int]:
        """A name for every full page of the prompt, which stands for all tokens up to its end."""
        if sequence.blocks is None:
            size, prompt, name, sequence.blocks = self._engine.page_tokens, sequence.prompt, 0, []
            for start in range(0, (len(prompt) - 1) // size * size, size):
                name = hash((name, prompt[start : start + size].tobytes()))
                sequence.blocks.append(name)
        return sequence.blocks

    def _place(self, slot: int, sequence: SequenceState) -> None:
        params, state = sequence.params, self._state
        self._running[slot] = sequence
        state.token[slot] = sequence.prompt[-1]
        state.position[slot] = len(sequence.prompt) - 1
        state.remaining[slot] = 0  # until its prompt is computed
        # What an array cannot hold comes as close as it can: an overflow here would fail everyone who waits.
        state.temperature[slot] = params.temperature and np.clip(params.temperature, FLOAT32.tiny, FLOAT32.max)
        state.seed[slot] = params.seed % 2**32
        state.top_k[slot] = min(params.top_k, self._engine.config.vocab_size)
        state.top_p[slot], state.min_p[slot] = params.top_p, params.min_p
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(sequence.prompt)

    def _prefill(self) -> None:
        """Compute prompts: one chunk of `prefill_tokens` if most running requests decode, else until they do. In a
        batch that nobody watches, what would not fill a call of the engine waits for more.
        """
        began = time.monotonic()
        while pending := [item for item in self._running.items() if not self._state.remaining[item[0]]]:
            budget = self._engine.prefill_tokens
            watched = any(sequence.watched for sequence in self._running.values())
            most = self._most_decode(watched)
            if most and not watched and self._deferred_calls < MAX_DEFERRED_CALLS:
                waiting = sum(self._padded(len(sequence.prompt) - 1 - sequence.computed) for _, sequence in pending)
                budget = min(budget, waiting - waiting % self._engine.min_call_tokens)
            self._deferred_calls = 0 if budget else self._deferred_calls + 1
            self._prefill_chunk(pending, budget)
            if most or self._most_decode(watched):
                break
        self._seconds += time.monotonic() - began

    def _most_decode(self, watched: bool) -> bool:
        share = DECODING_SHARE_WATCHED if watched else DECODING_SHARE
        return int(np.count_nonzero(self._state.remaining)) >= share * len(self._running)

    def _padded(self, tokens: int) -> int:
        """Tokens that the engine computes for so many of one request."""
        tile = self._engine.tile_tokens
        return -(-tokens // tile) * tile

    def _prefill_chunk(self, pending: Sequence[tuple[int, SequenceState]], budget: int) -> None:
        rows, ready = [], []
        for slot, sequence in pending:
            tokens = sequence.prompt[sequence.computed : -1][:budget]
            if len(tokens) or sequence.prefilled:
                rows.append(PrefillRow(slot, sequence.block_table.pages, sequence.computed, tokens))
                sequence.computed += len(tokens)
                budget -= min(budget, self._padded(len(tokens)))
                if sequence.prefilled:
                    ready.append((slot, sequence))
        if not rows:
            return
        self._engine.prefill(rows)
        self._counts["prefilled_tokens"] += sum(len(row.tokens) for row in rows)
        for slot, sequence in ready:
            self._state.remaining[slot] = sequence.params.max_new_tokens
        if self._reuse and self._waiting:
            self._share(ready)

    def _share(self, ready: Sequence[tuple[int, SequenceState]]) -> None:
        """Let those who wait find the prompts that were just computed."""
        size, rows = self._engine.page_tokens, []
        for slot, sequence in ready:
            whole = (len(sequence.prompt) - 1) // size * size
            if whole > sequence.flushed:
                rows.append(FlushRow(slot, sequence.block_table.pages, sequence.flushed, whole))
                sequence.flushed = whole
        self._engine.flush(rows)
        for row in rows:
            sequence = self._running[row.slot]
            self._blocks.share(sequence.block_table, sequence.prompt[: row.stop])

    def _decode(self) -> None:
        if not self._state.remaining.any():
            return
        began = time.monotonic()
        decoding = [(slot, sequence) for slot, sequence in self._running.items() if self._state.remaining[slot]]
        self._state, decoded = self._engine.decode(self._state)
        ended = [(slot, sequence) for slot, sequence in decoding if self._take(slot, sequence, decoded)]
        self._return(ended)
        self._seconds += time.monotonic() - began

    def _take(self, slot: int, sequence: SequenceState, decoded: Decoded) -> bool:
        """Hand a request what was generated for it; True if it ends."""
        new = sequence.take(decoded, slot)
        self._counts["generated_tokens"] += len(new)
        if sequence.future.done() or not sequence.finite:
            return True
        ending = sequence.ending(new, self._engine.stop_token_ids)
        if ending is None and self._state.remaining[slot] == 0:
            ending = len(sequence.tokens), "length"
        if ending is None:
            sequence.show()
            return False
        length, reason = ending
        self._counts["generated_tokens"] -= len(sequence.tokens) - length  # beyond the end: nobody gets them
        sequence.complete(length, reason, self.policy_version)
        return True

    def _return(self, ended: Sequence[tuple[int, SequenceState]]) -> None:
        """Free the slots of requests that ended, and leave what they computed in their pages."""
        flushed = []
        for slot, sequence in ended:
            if not sequence.finite:
                if not sequence.future.done():
                    when = f"after {len(sequence.tokens)} tokens: check its weights"
                    self._fail(sequence, PolicyError(f"the policy gave a log-probability that is not finite {when}"))
                self._engine.free_slot(slot, broken_pages=self._blocks.evict(sequence.block_table))
                self._drop(slot, sequence, held=0)
                continue
            if self._reuse:
                flushed.append(FlushRow(slot, sequence.block_table.pages, sequence.flushed, sequence.held_tokens))
        self._engine.flush([row for row in flushed if row.stop > row.start])
        for slot, sequence in ended:
            if slot in self._running:
                self._engine.free_slot(slot)
                self._drop(slot, sequence, held=sequence.held_tokens if self._reuse else 0)

    def _drop(self, slot: int, sequence: SequenceState, *, held: int) -> None:
        tokens = np.concatenate([sequence.prompt, np.asarray(sequence.tokens, np.int32)])[:held]
        self._blocks.release(sequence.block_table, tokens)
        del self._running[slot]
        self._state.remaining[slot] = 0
