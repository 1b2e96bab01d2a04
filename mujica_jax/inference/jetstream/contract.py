"""The interface that a user's own engine must implement (`engine.factory`).

The setting `engine.factory` names a function. The function is called once with an `EngineRequest`
and must return a `jetstream.engine.engine_api.Engine`. The generator then calls these methods of
the engine, all from one thread:

- `load_params(weights)` loads a policy. It is called before the first prompt, and again for every
  new policy while no request runs. `weights` maps the names of Hugging Face tensors, as in
  `model.safetensors`, to float32 numpy arrays. The result is passed to `prefill` and `generate` as
  `params`. The method must name its parameter. A method with only `*args` is rejected, because it
  might ignore a new policy.
- `init_decode_state()` returns the state of an idle engine with an empty cache. It is called after
  `load_params`, and again before each unit of work.
- `prefill(params=, padded_tokens=, true_length=)` computes one prompt. `padded_tokens` is the
  prompt, padded with 0 to a power of two or to `max_prefill_length`, whichever is shorter. No
  begin-of-sequence token is added. The result is the prefix, or a pair `(prefix, ResultTokens)`
  with the first generated token, as in later versions of JetStream and in MaxText's MaxEngine.
- `insert(prefix, decode_state, slot=)` puts a prefix into a slot and returns the new decode state.
- `generate(params, decode_state)` generates one or more tokens for each slot. The tokens of a slot
  are invalid if the policy's numbers were not finite or the engine's cache is full. Without a stop
  token before them, the generator ends the request with an error.
- `free_resource(slot)` is called when the request of a slot has ended, if the engine has this
  method.

An engine may also offer these members, which are not part of JetStream's interface:

- An attribute `capabilities` of type `Capabilities`. Without it, the engine decodes all requests
  greedily.
- If `capabilities.sampling_per_request` is True, `insert` also takes `sampling=SamplingParams`.
  Then `prefill` must return the prefix alone, because the first token is sampled with the settings
  of the request too.
- `insert` may raise `NoRoomError` if memory is short. The generator tries again when another
  request has ended.
- A method `counters()` that returns `EngineCounters`.
- A method `release_params()` that frees the engine's own copy of the weights.
"""

import dataclasses

from mujica_jax.config.schema import EngineConfig
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The engine that the factory should make. The weights follow later, through `load_params`."""

    model: DecoderConfig
    tokenizer: Tokenizer
    # Number of requests that run at the same time. `max_concurrent_decodes` must be at least this.
    slots: int
    # Largest number of tokens of a request, prompt and completion together. A prompt may have up to
    # positions - 1 tokens.
    positions: int
    # Token ids that end a completion.
    stop_token_ids: frozenset[int]
    # Compute type, such as "bfloat16".
    dtype: str
    # All settings of the section `engine`. The factory may use any of them.
    engine: EngineConfig
    # Bytes of each device that the engine must leave free for the rest of the program.
    reserved_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Counters of an engine since it was made. JetStream's interface has no such counters."""

    # Prompt tokens that were computed. The others were found in the prefix cache.
    prefilled_tokens: int
    # Pages of the KV cache that are empty now.
    free_pages: int
    # Pages that were evicted from the prefix cache.
    evicted_pages: int
    # Programs that the engine compiled.
    compiled_programs: int


class NoRoomError(Exception):
    """The memory is too small for one more request, until another request ends."""
