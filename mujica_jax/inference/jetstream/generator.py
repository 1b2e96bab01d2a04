"""A generator for any engine with JetStream's interface.

`JetStreamGenerator` replaces JetStream's orchestrator. It calls the engine's `load_params`,
`prefill`, `insert` and `generate` from the thread of the event loop, in the order of submission. So
the same requests always give the same results. Each request has its own stop strings, deadline and
token limit, and it can be cancelled. An error in one request ends only this request. `contract.py`
lists the methods that an engine must have.

To fill a free slot, the generator calls `prefill` and `insert` once. Then it calls `generate` for
all slots together. JetStream's interface returns no log-probabilities, so the completions have
none.
"""

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mujica_jax.errors import UserError
from mujica_jax.inference.generator import Capabilities, GeneratorStatistics, check_sampling
from mujica_jax.inference.jetstream.contract import NoRoomError
from mujica_jax.inference.queueing import QueuedGenerator, RequestLimits
from mujica_jax.inference.requests import EngineError, PolicyError, RequestError, SamplingParams
from mujica_jax.inference.sequence import SequenceState

logger = logging.getLogger(__name__)

# Shortest padded prompt, in tokens. JetStream pads prompts to powers of two from this length on.
SMALLEST_PREFILL = 16
# The capabilities of an engine that has only JetStream's interface.
PLAIN_CAPABILITIES = Capabilities(sampling_per_request=False, log_probabilities=False)


class _SlotResult(NamedTuple):
    """The tokens that one call of `generate` or `prefill` returned for one slot."""

    # The valid token ids.
    tokens: list[int]
    # False if the call returned an invalid token, or no token at all.
    is_complete: bool


class JetStreamGenerator(QueuedGenerator):
    """A generator that uses one engine. Call `set_weights` before the first prompt."""

    def __init__(
        self,
        engine: Any,
        limits: RequestLimits,
        *,
        name: str,
        stop_token_ids: frozenset[int],
        token_bytes: Callable[[int], bytes] | None = None,
        load_params: Callable[[nnx.State], Any] | None = None,
        policy_version: int = 0,
    ) -> None:
        """Make a generator with an empty queue.

        `engine` is a `jetstream.engine.engine_api.Engine`. (This module does not import that class,
        because the import loads TensorFlow.) `name` is the engine's name in error messages.
        `stop_token_ids` end every completion. `load_params` passes a policy to the engine; the
        default is the engine's own method. For `token_bytes` and `policy_version` see
        `QueuedGenerator`.
        """
        super().__init__(limits, token_bytes=token_bytes, policy_version=policy_version)
        self._engine = engine
        self._name = name
        self._stop_token_ids = stop_token_ids
        self._load_params = engine.load_params if load_params is None else load_params
        self._params: Any = None
        self._decode_state: Any = None
        # False after the engine raised NoRoomError, until a request ends.
        self._has_room = True

    @property
    def capabilities(self) -> Capabilities:
        """The features of the engine."""
        return getattr(self._engine, "capabilities", PLAIN_CAPABILITIES)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that end every completion."""
        return self._stop_token_ids

    @property
    def statistics(self) -> GeneratorStatistics:
        """The counters of the generator, and those of the engine if it has any.

        If the engine has no counters, all prompt tokens count as computed, and the numbers of pages
        and programs are None.
        """
        counts = dict(self._counts)
        counters = self._engine.counters() if hasattr(self._engine, "counters") else None
        if counters is not None:
            counts["prefilled_tokens"] = counters.prefilled_tokens
        return GeneratorStatistics(
            **counts,
            seconds=self._seconds,
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=None if counters is None else counters.free_pages,
            evicted_pages=None if counters is None else counters.evicted_pages,
            compiled_programs=None if counters is None else counters.compiled_programs,
        )

    def reset_cache(self) -> None:
        """Make an empty decode state. Call it only while no request runs.

        Without weights, the state is made later, by `set_weights`.
        """
        assert not self._running, "the cache is reset only while nothing runs"
        # Free the memory of the old state before the new state is made.
        self._decode_state = None
        self._has_room = True
        if self._params is not None:
            self._decode_state = self._engine.init_decode_state()

    def set_weights(self, weights: nnx.State, policy_version: int) -> None:
        """Replace the policy's weights and empty the cache. Call it only while no request runs.

        Raises UserError if the engine cannot make its decode state, for example because memory is
        short.
        """
        assert not self._running, "a policy is replaced only while nothing runs"
        self.release_weights()
        self._params = self._load_params(weights)
        try:
            self.reset_cache()
        except Exception as error:
            raise UserError(
                f"{self._name} cannot start with {self._slots} slots of {self._positions} tokens "
                f"({describe_error(error)}): lower engine.max_num_seqs or "
                "agent.max_trajectory_tokens"
            ) from error
        self.policy_version = policy_version

    def release_weights(self) -> None:
        """Free the memory of the weights. Call it only while no request runs.

        The generator cannot run again before `set_weights`.
        """
        self._params = None
        self._decode_state = None
        release = getattr(self._engine, "release_params", None)
        if release is not None:
            release()

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Check that the engine can serve a request. Raises RequestError otherwise."""
        super()._check(prompt, params)
        check_sampling(self.capabilities, params, self._name)
        if len(prompt) > self._engine.max_prefill_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but {self._name} takes at most "
                f"{self._engine.max_prefill_length}: shorten the prompt"
            )

    def _turn(self) -> None:
        """Run one turn: free slots, fill free slots, then call the engine's `generate` once."""
        start_time = time.monotonic()
        self._free_given_up()
        self._admit()
        self._generate()
        self._seconds += time.monotonic() - start_time

    def _free_given_up(self) -> None:
        """Free the slots of requests that were cancelled or whose deadline passed."""
        for slot, sequence in list(self._running.items()):
            if sequence.future.done():
                self._free_slot(slot)
        self._drop_given_up()

    def _admit(self) -> None:
        """Move waiting requests into free slots while the engine has room."""
        free_slots = [slot for slot in range(self._slots) if slot not in self._running]
        while self._waiting and free_slots and self._has_room:
            slot = free_slots[0]
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            try:
                self._start(slot, sequence)
            except NoRoomError as error:
                # Wait for a running request to end. If none runs, the request can never fit.
                if self._running:
                    heapq.heappush(self._waiting, entry)
                    self._has_room = False
                else:
                    sentence = (
                        f"{self._name} has no room for this request, although no other request runs "
                        f"({error}): shorten the prompt or lower max_new_tokens"
                    )
                    self._fail(sequence, EngineError(sentence))
            except EngineError as error:
                self._fail(sequence, error)
            except Exception as error:
                logger.warning("the engine failed at one request", exc_info=error)
                sentence = f"{self._name} failed at this request ({describe_error(error)})"
                self._fail(sequence, EngineError(sentence))
            if slot in self._running:
                del free_slots[0]

    def _start(self, slot: int, sequence: SequenceState) -> None:
        """Prefill a prompt, and insert it into a slot."""
        prefix, first_token = self._prefill(sequence)
        if self.capabilities.sampling_per_request:
            if first_token is not None:
                raise EngineError(
                    f"{self._name} declares sampling_per_request, but its prefill returns a first "
                    "token, which ignores the request's settings: let prefill return the prefix "
                    "alone"
                )
            self._decode_state = self._engine.insert(
                prefix, self._decode_state, slot=slot, sampling=sequence.params
            )
        else:
            self._decode_state = self._engine.insert(prefix, self._decode_state, slot=slot)
        self._running[slot] = sequence
        self._count_started(sequence)
        self._counts["prefilled_tokens"] += len(sequence.prompt)
        if first_token is not None and self._take(sequence, first_token):
            self._free_slot(slot)

    def _prefill(self, sequence: SequenceState) -> tuple[Any, "_SlotResult | None"]:
        """Prefill a prompt. Return (prefix, first token).

        The first token is None if the engine samples it in `generate`.
        """
        length = len(sequence.prompt)
        padded_length = min(prefill_length(length), self._engine.max_prefill_length)
        padded_tokens = np.zeros(padded_length, np.int32)
        padded_tokens[:length] = sequence.prompt
        result = self._engine.prefill(
            params=self._params, padded_tokens=padded_tokens, true_length=length
        )

        # The result is either a prefix, or a pair of a prefix and `ResultTokens`.
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair and hasattr(result[1], "get_result_at_slot"):
            prefix, result_tokens = result
            return prefix, _read(result_tokens.convert_to_numpy().get_result_at_slot(0))
        return result, None

    def _generate(self) -> None:
        """Call the engine's `generate` once, and hand out the tokens of all slots.

        If the engine fails, all running requests end with EngineError. Waiting requests continue
        with a new decode state.
        """
        if not self._running:
            return
        try:
            self._decode_state, result = self._engine.generate(self._params, self._decode_state)
            on_host = result.convert_to_numpy()
            results = {slot: _read(on_host.get_result_at_slot(slot)) for slot in self._running}
        except Exception as error:
            logger.warning("the engine failed, so all running requests fail", exc_info=error)
            sentence = f"{self._name} failed while this request ran ({describe_error(error)})"
            failed = list(self._running.values())
            self._running.clear()
            for sequence in failed:
                if not sequence.future.done():
                    self._fail(sequence, EngineError(sentence))
            self.reset_cache()
            return
        for slot, sequence in list(self._running.items()):
            if sequence.future.done() or self._take(sequence, results[slot]):
                self._free_slot(slot)

    def _take(self, sequence: SequenceState, result: "_SlotResult") -> bool:
        """Append the tokens that were generated for a request. Return whether it ends."""
        room = sequence.params.max_new_tokens - len(sequence.tokens)
        new = result.tokens[:room]
        unknown = [token for token in new if not 0 <= token < self._vocabulary]
        if unknown:
            sentence = (
                f"{self._name} generated token {unknown[0]}, but the model has only "
                f"{self._vocabulary} tokens"
            )
            self._fail(sequence, EngineError(sentence))
            return True
        sequence.tokens += new
        ending = sequence.ending(new, self._stop_token_ids)
        if ending is None and len(sequence.tokens) == sequence.params.max_new_tokens:
            ending = len(sequence.tokens), "length"
        if ending is not None:
            length, reason = ending
            # Tokens that were generated after the end of the completion.
            surplus_tokens = len(sequence.tokens) - length
            self._counts["generated_tokens"] += len(new) - surplus_tokens
            sequence.complete(length, reason, self.policy_version)
            return True
        self._counts["generated_tokens"] += len(new)
        if not result.is_complete:
            sentence = (
                f"{self._name} ended this request after {len(sequence.tokens)} tokens without a "
                "stop token: the policy gave a number that is not finite (check its weights), or "
                "the engine's cache is full"
            )
            self._fail(sequence, PolicyError(sentence))
            return True
        sequence.send_to_stream()
        return False

    def _free_slot(self, slot: int) -> None:
        """Free the slot of a request that has ended."""
        del self._running[slot]
        self._has_room = True
        free_resource = getattr(self._engine, "free_resource", None)
        if free_resource is not None:
            free_resource(slot)


def _read(data: Any) -> _SlotResult:
    """Read a `jetstream.engine.engine_api.SlotData` with one sample.

    The result holds the tokens before the first invalid one.
    """
    valid = np.asarray(data.valid)[0].astype(bool)
    steps = len(valid) if valid.all() else int(valid.argmin())
    tokens = np.asarray(data.tokens)[0, :steps].astype(int).tolist()
    return _SlotResult(tokens, is_complete=0 < steps == len(valid))


def prefill_length(tokens: int) -> int:
    """Return the length, a power of two, to which JetStream pads a prompt of `tokens` tokens."""
    return max(SMALLEST_PREFILL, 1 << (tokens - 1).bit_length())


def describe_error(error: Exception) -> str:
    """Return the class and the message of an error, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
