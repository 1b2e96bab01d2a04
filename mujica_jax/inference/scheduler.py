"""Continuous batching: schedule the requests of one engine.

Requests are token ids; completions are token ids and log-probabilities. A request of
`BatchedGenerator` goes through these stages:

1. It waits in a priority queue.
2. Admission: it gets a slot and a block table, with the pages of its prompt that are in the prefix
   cache. Of two requests that arrive together with a common prefix, the second waits for the pages
   of the first.
3. Prefill: the rest of its prompt is computed in chunks, between the decode calls of the requests
   that run already.
4. Decode: tokens are generated, several in each call.
5. It ends, and its pages go to the prefix cache.

Submission, deadlines and cancellation are those of `queueing.QueuedGenerator`.
"""

import heapq
import time
from collections.abc import Callable, Sequence

import numpy as np
from flax import nnx

from mujica_jax.inference.engine.base import Decoded, Engine, FlushRow, SlotState
from mujica_jax.inference.generator import Capabilities, GeneratorStatistics
from mujica_jax.inference.paging import BlockAllocator
from mujica_jax.inference.queueing import QueuedGenerator, RequestLimits
from mujica_jax.inference.requests import PolicyError, RequestError, SamplingParams
from mujica_jax.inference.sequence import (
    SequenceState,
    fill_slot,
    next_flush,
    next_prefill,
    padded_tokens,
)

# Prefill goes on until this share of the running requests decodes. In a batch a decode call should
# be full, because it costs the same for few requests. The lower share holds while a request is
# watched, that is streamed or under a deadline.
DECODING_SHARE_WATCHED = 1 / 2
DECODING_SHARE = 7 / 8
# A prompt of a batch waits at most this many decode calls for others that fill its prefill call.
MAX_DEFERRED_CALLS = 2


class BatchedGenerator(QueuedGenerator):
    """The `Generator` of one engine. Use it from one event loop at a time."""

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
        """Schedule the requests of one engine.

        `prefix_reuse` turns the prefix cache on. For the others see `QueuedGenerator`.
        """
        limits = RequestLimits(
            slots=engine.slots,
            positions=engine.positions,
            vocabulary=engine.config.vocab_size,
            queue_size=queue_size,
        )
        super().__init__(limits, token_bytes=token_bytes, policy_version=policy_version)
        self._engine = engine
        self._prefix_reuse = prefix_reuse
        self._evicted_pages = 0  # before the last reset of the cache
        self._deferred_calls = 0
        self._allocate_slots()

    def reset_cache(self) -> None:
        """Drop all cached prefixes.

        Called when weights change, and between units of work, so that each unit is a function of
        its own requests alone.
        """
        assert not self._running, "the cache is reset only while nothing runs"
        self._engine.reset_cache()
        self._evicted_pages += self._blocks.evicted
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
            evicted_pages=self._evicted_pages + self._blocks.evicted,
            compiled_programs=self._engine.compiled_programs,
        )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        super()._check(prompt, params)
        needed = self._blocks.needed(len(prompt) + params.max_new_tokens)
        if needed > self._blocks.count:
            raise RequestError(
                f"the request needs {needed} pages of KV memory and the engine has "
                f"{self._blocks.count}: give it more memory"
            )

    def _turn(self) -> None:
        self._free_given_up()
        self._admit()
        self._prefill()
        # Requests that waited for the pages that were just computed.
        while self._admit():
            self._prefill()
        self._decode()

    def _allocate_slots(self) -> None:
        self._blocks = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
        self._state = SlotState.idle(self._engine.slots)

    def _free_given_up(self) -> None:
        for slot, sequence in list(self._running.items()):
            if not sequence.future.done():
                continue
            # Before the first log-probability it is not known whether what the request computed is
            # finite.
            broken_pages = ()
            if not sequence.tokens:
                broken_pages = self._blocks.evict(sequence.block_table)
            self._engine.free_slot(slot, broken_pages=broken_pages)
            self._drop(slot, sequence, cached_tokens=0)
        self._drop_given_up()

    def _admit(self) -> bool:
        """Move waiting requests into free slots, as long as there are pages for them.

        Returns whether any moved.
        """
        running_before = len(self._running)
        free_slots = [slot for slot in range(self._engine.slots) if slot not in self._running]
        being_computed = self._blocks_being_computed()
        postponed = []
        copies = []
        while self._waiting and free_slots:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]

            # If another request computes the same pages now, wait for them.
            missing_blocks = self._missing_blocks(sequence)
            if missing_blocks and missing_blocks[0] in being_computed:
                postponed.append(entry)
                continue

            # If memory is short, wait for the pages of running requests.
            capacity_tokens = len(sequence.prompt) + sequence.params.max_new_tokens
            block_table = self._blocks.allocate(
                sequence.prompt, capacity_tokens, reuse=self._prefix_reuse
            )
            if block_table is None:
                postponed.append(entry)
                break

            sequence.use_pages(block_table)
            being_computed.update(missing_blocks)
            if block_table.copied is not None:
                copies.append(block_table.copied)
            slot = self._engine.choose_slot(
                free_slots, block_table.pages, block_table.cached_tokens
            )
            free_slots.remove(slot)
            self._place(slot, sequence)

        for entry in postponed:
            heapq.heappush(self._waiting, entry)
        if copies:
            self._engine.copy_pages(copies)
        return len(self._running) > running_before

    def _blocks_being_computed(self) -> set[int]:
        """Return the hashes of the full pages that running requests have yet to compute."""
        hashes = set()
        for sequence in self._running.values():
            if not sequence.is_prefilled:
                shared_pages = len(sequence.block_table.shared)
                hashes.update(sequence.block_hashes(self._engine.page_tokens)[shared_pages:])
        return hashes

    def _missing_blocks(self, sequence: SequenceState) -> list[int]:
        """Return the hashes of the full pages of a prompt that are not in the prefix cache."""
        if not self._prefix_reuse:
            return []
        cached_pages = self._blocks.cached_pages(sequence.prompt)
        return sequence.block_hashes(self._engine.page_tokens)[cached_pages:]

    def _place(self, slot: int, sequence: SequenceState) -> None:
        """Let a request run in a slot. It decodes there when its prompt is computed."""
        self._running[slot] = sequence
        fill_slot(
            self._state,
            slot,
            prompt=sequence.prompt,
            params=sequence.params,
            vocabulary=self._engine.config.vocab_size,
        )
        self._count_started(sequence)

    def _prefill(self) -> None:
        """Compute prompts in chunks of `prefill_tokens`.

        If most running requests decode, this is one chunk, otherwise chunks until most of them do.
        In a batch, tokens that would not fill a call of the engine wait for more.
        """
        start_time = time.monotonic()
        while True:
            pending = self._running_in_prefill()
            if not pending:
                break
            is_watched = any(sequence.is_watched for sequence in self._running.values())
            most_decode = self._most_decode(is_watched)

            budget = self._engine.prefill_tokens
            if most_decode and not is_watched and self._deferred_calls < MAX_DEFERRED_CALLS:
                budget = min(budget, self._tokens_in_full_calls(pending))
            if budget:
                self._deferred_calls = 0
            else:
                self._deferred_calls += 1
            self._prefill_chunk(pending, budget)

            if most_decode or self._most_decode(is_watched):
                break
        self._seconds += time.monotonic() - start_time

    def _running_in_prefill(self) -> list[tuple[int, SequenceState]]:
        """Return the slots, and their requests, whose prompts are not all computed."""
        return [
            (slot, sequence)
            for slot, sequence in self._running.items()
            if not self._state.remaining[slot]
        ]

    def _tokens_in_full_calls(self, pending: Sequence[tuple[int, SequenceState]]) -> int:
        """Return how many of the tokens to prefill make full calls of the engine."""
        tokens = 0
        for _, sequence in pending:
            missing_tokens = len(sequence.prompt) - 1 - sequence.prefilled_tokens
            tokens += padded_tokens(self._engine, missing_tokens)
        return tokens - tokens % self._engine.min_call_tokens

    def _most_decode(self, is_watched: bool) -> bool:
        """Return whether so many running requests decode that a decode call is due."""
        share = DECODING_SHARE_WATCHED if is_watched else DECODING_SHARE
        return int(np.count_nonzero(self._state.remaining)) >= share * len(self._running)

    def _prefill_chunk(self, pending: Sequence[tuple[int, SequenceState]], budget: int) -> None:
        """Compute up to `budget` tokens of these prompts in one call."""
        rows, ready = next_prefill(self._engine, pending, budget)
        if not rows:
            return
        self._engine.prefill(rows)
        self._counts["prefilled_tokens"] += sum(len(row.tokens) for row in rows)
        for slot, sequence in ready:
            self._state.remaining[slot] = sequence.params.max_new_tokens
        if self._prefix_reuse and self._waiting:
            self._share_prompts(ready)

    def _share_prompts(self, ready: Sequence[tuple[int, SequenceState]]) -> None:
        """Put prompts that were just computed into the prefix cache, for requests that wait."""
        rows = next_flush(self._blocks, ready)
        self._engine.flush(rows)
        for row in rows:
            sequence = self._running[row.slot]
            self._blocks.share(sequence.block_table, sequence.prompt[: row.stop])

    def _decode(self) -> None:
        """Decode one call for all requests whose prompts are computed, and free those that end."""
        if not self._state.remaining.any():
            return
        start_time = time.monotonic()
        decoding = [
            (slot, sequence)
            for slot, sequence in self._running.items()
            if self._state.remaining[slot]
        ]
        self._state, decoded = self._engine.decode(self._state)
        ended = []
        for slot, sequence in decoding:
            if self._take(slot, sequence, decoded):
                ended.append((slot, sequence))
        self._free_ended(ended)
        self._seconds += time.monotonic() - start_time

    def _take(self, slot: int, sequence: SequenceState, decoded: Decoded) -> bool:
        """Give a request what was generated for it. Returns whether it ends."""
        new = sequence.take(decoded, slot)
        self._counts["generated_tokens"] += len(new)
        if sequence.future.done() or not sequence.is_finite:
            return True
        ending = sequence.ending(new, self._engine.stop_token_ids)
        if ending is None and self._state.remaining[slot] == 0:
            ending = len(sequence.tokens), "length"
        if ending is None:
            sequence.send_to_stream()
            return False
        length, reason = ending
        surplus_tokens = len(sequence.tokens) - length  # decoded beyond the end
        self._counts["generated_tokens"] -= surplus_tokens
        sequence.complete(length, reason, self.policy_version)
        return True

    def _free_ended(self, ended: Sequence[tuple[int, SequenceState]]) -> None:
        """Free the slots of requests that ended, and leave what they computed in their pages."""
        # Requests with numbers that are not finite: their pages are emptied.
        finite = []
        for slot, sequence in ended:
            if sequence.is_finite:
                finite.append((slot, sequence))
                continue
            if not sequence.future.done():
                error = PolicyError(
                    "the policy gave a log-probability that is not finite after "
                    f"{len(sequence.tokens)} tokens: check its weights"
                )
                self._fail(sequence, error)
            broken_pages = self._blocks.evict(sequence.block_table)
            self._engine.free_slot(slot, broken_pages=broken_pages)
            self._drop(slot, sequence, cached_tokens=0)

        # The others: what they computed goes to their pages, and the pages to the prefix cache.
        flush_rows = []
        for slot, sequence in finite:
            start = sequence.flushed_tokens
            stop = sequence.tokens_in_memory
            if self._prefix_reuse and stop > start:
                flush_rows.append(FlushRow(slot, sequence.block_table.pages, start, stop))
        self._engine.flush(flush_rows)
        for slot, sequence in finite:
            self._engine.free_slot(slot)
            cached_tokens = sequence.tokens_in_memory if self._prefix_reuse else 0
            self._drop(slot, sequence, cached_tokens=cached_tokens)

    def _drop(self, slot: int, sequence: SequenceState, *, cached_tokens: int) -> None:
        """Give back the slot and the pages of a request, and cache its first `cached_tokens`."""
        tokens = np.concatenate([sequence.prompt, np.asarray(sequence.tokens, np.int32)])
        self._blocks.release(sequence.block_table, tokens[:cached_tokens])
        del self._running[slot]
        self._state.remaining[slot] = 0
