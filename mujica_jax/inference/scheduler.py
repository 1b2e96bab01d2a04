"""Continuous batching: requests of token ids in, completions of token ids and log-probabilities
out.

`BatchedGenerator` schedules one engine. A request waits in a priority queue, gets a block table
(with the pages of the prefix that earlier sequences share with its prompt), takes a slot, has the
rest of its prompt computed in chunks between the decode calls of those that run already, and
decodes. When it ends, its pages go to the prefix cache. Of two requests that arrive together with a
common prefix, the second waits for the first's pages.

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
from mujica_jax.inference.queueing import QueuedGenerator
from mujica_jax.inference.requests import PolicyError, RequestError, SamplingParams
from mujica_jax.inference.sequence import (
    SequenceState,
    fill_slot,
    next_flush,
    next_prefill,
    padded_tokens,
)

# Prompts are computed first until this share of the running requests decodes, where one is waited
# for (it is streamed or has a deadline) and where all is one batch: there a decode call should be
# full, for it costs the same for few.
DECODING_SHARE_WATCHED, DECODING_SHARE = 1 / 2, 7 / 8
MAX_DEFERRED_CALLS = 2  # decode calls that a prompt of a batch waits for others to fill a call with


class BatchedGenerator(QueuedGenerator):
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
        """See `QueuedGenerator`."""
        super().__init__(
            slots=engine.slots,
            positions=engine.positions,
            vocabulary=engine.config.vocab_size,
            queue_size=queue_size,
            token_bytes=token_bytes,
            policy_version=policy_version,
        )
        self._engine, self._reuse = engine, prefix_reuse
        self._evicted = self._deferred_calls = 0
        self._allocate_slots()

    def reset_cache(self) -> None:
        """Drop all cached prefixes. Called when weights change, and between units of work so that
        each is a function of its own requests alone.
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
        while self._admit():  # those who waited for pages that were just computed
            self._prefill()
        self._decode()

    def _allocate_slots(self) -> None:
        self._blocks = BlockAllocator(self._engine.num_pages, self._engine.page_tokens)
        self._state = SlotState.idle(self._engine.slots)

    def _free_given_up(self) -> None:
        for slot, sequence in list(self._running.items()):
            if sequence.future.done():  # nobody waits for it: its pages go back as they were found
                # Before its first log-probability nobody knows whether what it computed is finite.
                broken = () if sequence.tokens else self._blocks.evict(sequence.block_table)
                self._engine.free_slot(slot, broken_pages=broken)
                self._drop(slot, sequence, held=0)
        self._drop_given_up()

    def _admit(self) -> bool:
        """Move waiting requests into free slots, as long as there are pages for them; True if any
        moved."""
        already, page_tokens = len(self._running), self._engine.page_tokens
        free = [slot for slot in range(self._engine.slots) if slot not in self._running]
        being_computed = {
            block
            for sequence in self._running.values()
            if not sequence.prefilled
            for block in sequence.block_names(page_tokens)[len(sequence.block_table.shared) :]
        }
        later, copies = [], []
        while self._waiting and free:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            prompt = sequence.prompt
            blocks = (
                sequence.block_names(page_tokens)[self._blocks.cached_pages(prompt) :]
                if self._reuse
                else []
            )
            if blocks and blocks[0] in being_computed:  # it waits for what another one computes
                later.append(entry)
                continue
            block_table = self._blocks.allocate(
                prompt, len(prompt) + sequence.params.max_new_tokens, reuse=self._reuse
            )
            if block_table is None:  # memory is short: what runs gives some back
                later.append(entry)
                break
            sequence.use_pages(block_table)
            being_computed.update(blocks)
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

    def _place(self, slot: int, sequence: SequenceState) -> None:
        self._running[slot] = sequence
        vocabulary = self._engine.config.vocab_size
        fill_slot(
            self._state, slot, prompt=sequence.prompt, params=sequence.params, vocabulary=vocabulary
        )
        self._count_started(sequence)

    def _prefill(self) -> None:
        """Compute prompts: one chunk of `prefill_tokens` if most running requests decode, else
        until they do. In a batch that nobody watches, what would not fill a call of the engine
        waits for more.
        """
        began = time.monotonic()
        while pending := [
            item for item in self._running.items() if not self._state.remaining[item[0]]
        ]:
            budget = self._engine.prefill_tokens
            watched = any(sequence.watched for sequence in self._running.values())
            most = self._most_decode(watched)
            if most and not watched and self._deferred_calls < MAX_DEFERRED_CALLS:
                waiting = sum(
                    padded_tokens(self._engine, len(sequence.prompt) - 1 - sequence.computed)
                    for _, sequence in pending
                )
                budget = min(budget, waiting - waiting % self._engine.min_call_tokens)
            self._deferred_calls = 0 if budget else self._deferred_calls + 1
            self._prefill_chunk(pending, budget)
            if most or self._most_decode(watched):
                break
        self._seconds += time.monotonic() - began

    def _most_decode(self, watched: bool) -> bool:
        share = DECODING_SHARE_WATCHED if watched else DECODING_SHARE
        return int(np.count_nonzero(self._state.remaining)) >= share * len(self._running)

    def _prefill_chunk(self, pending: Sequence[tuple[int, SequenceState]], budget: int) -> None:
        rows, ready = next_prefill(self._engine, pending, budget)
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
        rows = next_flush(self._blocks, ready)
        self._engine.flush(rows)
        for row in rows:
            sequence = self._running[row.slot]
            self._blocks.share(sequence.block_table, sequence.prompt[: row.stop])

    def _decode(self) -> None:
        if not self._state.remaining.any():
            return
        began = time.monotonic()
        decoding = [
            (slot, sequence)
            for slot, sequence in self._running.items()
            if self._state.remaining[slot]
        ]
        self._state, decoded = self._engine.decode(self._state)
        ended = [
            (slot, sequence) for slot, sequence in decoding if self._take(slot, sequence, decoded)
        ]
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
        self._counts["generated_tokens"] -= (
            len(sequence.tokens) - length
        )  # beyond the end: nobody gets them
        sequence.complete(length, reason, self.policy_version)
        return True

    def _return(self, ended: Sequence[tuple[int, SequenceState]]) -> None:
        """Free the slots of requests that ended, and leave what they computed in their pages."""
        flushed = []
        for slot, sequence in ended:
            if not sequence.finite:
                if not sequence.future.done():
                    when = f"after {len(sequence.tokens)} tokens: check its weights"
                    self._fail(
                        sequence,
                        PolicyError(f"the policy gave a log-probability that is not finite {when}"),
                    )
                self._engine.free_slot(slot, broken_pages=self._blocks.evict(sequence.block_table))
                self._drop(slot, sequence, held=0)
                continue
            if self._reuse:
                flushed.append(
                    FlushRow(
                        slot, sequence.block_table.pages, sequence.flushed, sequence.held_tokens
                    )
                )
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
