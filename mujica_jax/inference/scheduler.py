"""Continuous batching: the scheduler of one engine.

`BatchedGenerator` takes prompts (token ids) and returns completions (token ids and
log-probabilities). Each request goes through these stages:

1. Wait: the request stays in a priority queue until a slot is free.
2. Admission: the request gets a slot and a block table. The block table reuses the pages of its
   prompt that are already in the prefix cache. If two waiting requests share a prefix that is not
   cached yet, the second one waits until the first one has computed it.
3. Prefill: the engine computes the rest of the prompt in chunks. Decode calls of other requests run
   between the chunks (chunked prefill).
4. Decode: the engine generates up to `decode_steps` tokens for all running requests in each call.
5. End: the slot is freed, and the pages go to the prefix cache.

Pages for the whole request (prompt and `max_new_tokens`) are allocated at admission. So a running
request never runs out of memory, and it is never preempted.

The base class `queueing.QueuedGenerator` handles submission, deadlines and cancellation.
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

# Prefill continues until this share of the running requests is ready to decode. A decode call costs
# the same for few requests as for many, so it should be full. The lower share applies while a
# request is streamed or has a deadline, because its client waits for the next token.
DECODING_SHARE_WATCHED = 1 / 2
DECODING_SHARE = 7 / 8
# A short prompt waits for more prompts to fill its prefill call, for at most this many decode
# calls.
MAX_DEFERRED_CALLS = 2


class BatchedGenerator(QueuedGenerator):
    """A `Generator` that schedules requests on one engine. Use it from one event loop at a time."""

    capabilities = Capabilities(sampling_per_request=True, log_probabilities=True)

    def __init__(
        self,
        engine: Engine,
        *,
        prefix_reuse: bool,
        token_bytes: Callable[[int], bytes] | None = None,
        policy_version: int = 0,
    ) -> None:
        """Make a scheduler with an empty queue.

        `prefix_reuse` turns the prefix cache on. `token_bytes` returns the bytes of a token's text;
        without it requests cannot have stop strings. `policy_version` is the version of the
        engine's weights.
        """
        limits = RequestLimits(
            slots=engine.slots,
            positions=engine.positions,
            vocabulary=engine.config.vocab_size,
        )
        super().__init__(limits, token_bytes=token_bytes, policy_version=policy_version)
        self._engine = engine
        self._prefix_reuse = prefix_reuse
        # Pages that were evicted before the last reset of the cache.
        self._evicted_pages = 0
        # Prefill calls in a row that were postponed because they would not have been full.
        self._deferred_calls = 0
        self._allocate_slots()

    def reset_cache(self) -> None:
        """Drop all cached prefixes. Call it only while no request runs.

        Callers reset the cache when the weights change. They also reset it before each unit of
        work, so that the results of a unit do not depend on earlier requests.
        """
        assert not self._running, "the cache is reset only while nothing runs"
        self._engine.reset_cache()
        self._evicted_pages += self._blocks.evicted
        self._allocate_slots()

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy's weights and empty the cache. Call it only while no request runs."""
        self.reset_cache()
        self._engine.set_weights(weights)
        self.policy_version = policy_version

    def release_weights(self) -> None:
        """Free the memory of the weights. Call it only while no request runs.

        The generator cannot run again before `set_weights`.
        """
        self._engine.release_weights()

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that end every completion."""
        return self._engine.stop_token_ids

    @property
    def statistics(self) -> GeneratorStatistics:
        """The counters of this generator and its engine."""
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
        """Check that a request can be served, and that all pages together are enough for it."""
        super()._check(prompt, params)
        needed = self._blocks.needed(len(prompt) + params.max_new_tokens)
        if needed > self._blocks.count:
            raise RequestError(
                f"the request needs {needed} pages of KV cache, but the engine has "
                f"{self._blocks.count}: shorten the prompt, lower max_new_tokens or raise "
                "engine.cache_gigabytes"
            )

    def _turn(self) -> None:
        """Run one turn of the scheduler: free, admit, prefill, then one decode call."""
        self._free_given_up()
        self._admit()
        self._prefill()
        # Admit requests that waited for the prefix that was just computed.
        while self._admit():
            self._prefill()
        self._decode()

    def _allocate_slots(self) -> None:
        """Make an empty prefix cache and idle slots."""
        self._blocks = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
        self._state = SlotState.idle(self._engine.slots)

    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or whose deadline passed."""
        for slot, sequence in list(self._running.items()):
            if not sequence.future.done():
                continue
            # Until the first token is decoded, it is unknown whether the computed keys and values
            # are finite. So take these pages out of the prefix cache.
            broken_pages = ()
            if not sequence.tokens:
                broken_pages = self._blocks.evict(sequence.block_table)
            self._engine.free_slot(slot, broken_pages=broken_pages)
            self._drop(slot, sequence, cached_tokens=0)
        self._drop_given_up()

    def _admit(self) -> bool:
        """Move waiting requests into free slots while there are enough pages.

        Returns whether at least one request was admitted.
        """
        running_before = len(self._running)
        free_slots = [slot for slot in range(self._engine.slots) if slot not in self._running]
        being_computed = self._blocks_being_computed()
        postponed = []
        copies = []
        while self._waiting and free_slots:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]

            # If a running request is computing the same pages, wait for them.
            missing_blocks = self._missing_blocks(sequence)
            if missing_blocks and missing_blocks[0] in being_computed:
                postponed.append(entry)
                continue

            # If there are too few pages, wait until running requests end.
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
        """Return the hashes of the full pages that running requests have not computed yet."""
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
        """Assign a request to a slot. It decodes there once its prompt is computed."""
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
        """Compute prompts in chunks of at most `prefill_tokens` tokens.

        If most running requests already decode, compute one chunk. Otherwise compute chunks until
        most of them decode. While no request is streamed or has a deadline, tokens that would not
        fill a prefill call may be postponed, for at most MAX_DEFERRED_CALLS decode calls.
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
        """Return (slot, request) for every running request whose prompt is not fully computed."""
        return [
            (slot, sequence)
            for slot, sequence in self._running.items()
            if not self._state.remaining[slot]
        ]

    def _tokens_in_full_calls(self, pending: Sequence[tuple[int, SequenceState]]) -> int:
        """Return how many of the pending prompt tokens fit into full prefill calls.

        The result is the number of pending tokens, rounded down to a multiple of the engine's
        `min_call_tokens`.
        """
        tokens = 0
        for _, sequence in pending:
            missing_tokens = len(sequence.prompt) - 1 - sequence.prefilled_tokens
            tokens += padded_tokens(self._engine, missing_tokens)
        return tokens - tokens % self._engine.min_call_tokens

    def _most_decode(self, is_watched: bool) -> bool:
        """Return whether enough running requests are ready to decode for a decode call."""
        share = DECODING_SHARE_WATCHED if is_watched else DECODING_SHARE
        return int(np.count_nonzero(self._state.remaining)) >= share * len(self._running)

    def _prefill_chunk(self, pending: Sequence[tuple[int, SequenceState]], budget: int) -> None:
        """Compute up to `budget` tokens of the pending prompts in one prefill call."""
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
        """Put prompts that were just computed into the prefix cache, so that others can use them."""
        rows = next_flush(self._blocks, ready)
        self._engine.flush(rows)
        for row in rows:
            sequence = self._running[row.slot]
            self._blocks.share(sequence.block_table, sequence.prompt[: row.stop])

    def _decode(self) -> None:
        """Run one decode call for all requests that are ready, and free those that end."""
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
        """Append the tokens that were decoded in a request's slot. Return whether it ends."""
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
        # Tokens that were decoded after the end of the completion.
        surplus_tokens = len(sequence.tokens) - length
        self._counts["generated_tokens"] -= surplus_tokens
        sequence.complete(length, reason, self.policy_version)
        return True

    def _free_ended(self, ended: Sequence[tuple[int, SequenceState]]) -> None:
        """Free the slots of requests that ended, and put their pages into the prefix cache."""
        # If the numbers of a request are not finite, set its pages to zero and cache nothing.
        finite = []
        for slot, sequence in ended:
            if sequence.is_finite:
                finite.append((slot, sequence))
                continue
            if not sequence.future.done():
                error = PolicyError(
                    "the policy computed a log-probability that is not finite after "
                    f"{len(sequence.tokens)} tokens: check its weights"
                )
                self._fail(sequence, error)
            broken_pages = self._blocks.evict(sequence.block_table)
            self._engine.free_slot(slot, broken_pages=broken_pages)
            self._drop(slot, sequence, cached_tokens=0)

        # For the other requests, write the computed keys and values to their pages, then put the
        # pages into the prefix cache.
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
        """Free the slot and the pages of a request.

        The pages of its first `cached_tokens` tokens stay in the prefix cache.
        """
        tokens = np.concatenate([sequence.prompt, np.asarray(sequence.tokens, np.int32)])
        self._blocks.release(sequence.block_table, tokens[:cached_tokens])
        del self._running[slot]
        self._state.remaining[slot] = 0
