"""The interface of foreign engines, which `engine.factory` names.

`engine.factory` names a function. It is called once with an `EngineRequest` and returns a
`jetstream.engine.engine_api.Engine`. The generator then calls, all from one thread:

- `load_params(weights)`, before the first prompt and again for every new policy, while nothing
  runs. `weights` maps the names of Hugging Face tensors, as in `model.safetensors`, to float32
  numpy arrays. The result is passed to `prefill` and `generate` as `params`. The parameter must
  have a name: with `*args` alone a new policy could be ignored.
- `init_decode_state()`, after `load_params`: nothing runs and nothing is cached. It is called again
  between units of work.
- `prefill(params=, padded_tokens=, true_length=)` for one prompt. The prompt is padded with 0 to a
  power of two, or to `max_prefill_length` if that is shorter. No token is put before it. The result
  is the prefix, or a pair `(prefix, ResultTokens)` with the first token, as in later versions of
  JetStream and in MaxText's MaxEngine.
- `insert(prefix, decode_state, slot=)`.
- `generate(params, decode_state)`, which gives one token or several for each slot. A slot whose
  tokens are not valid, without a stop token before them, has ended with numbers that are not
  finite.
- `free_resource(slot)`, if the engine has it, when a slot's request is over.

Optional, beyond JetStream's interface:

- An attribute `capabilities` of type `Capabilities`. Without it, all requests are sampled greedily
  and alike.
- With `capabilities.sampling_per_request`, `insert` takes `sampling=SamplingParams` too. Then
  `prefill` returns the prefix alone, because the first token is also drawn as the request says.
- `insert` may raise `NoRoomError` if memory is short: the generator tries again when a request has
  ended.
- A method `counters()` that returns `EngineCounters`.
- A method `release_params()` that drops the engine's own copy of the last policy.
"""

import dataclasses

from mujica_jax.config.schema import EngineConfig
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The engine that is asked for. The weights come later, through `load_params`."""

    model: DecoderConfig
    tokenizer: Tokenizer
    slots: int  # requests that run at a time: `max_concurrent_decodes` is at least this
    positions: int  # tokens of a prompt and its completion; prompts may be almost as long
    stop_token_ids: frozenset[int]
    dtype: str  # type of the computation, as in "bfloat16"
    # all settings of the section `engine`, for those that this engine has a use for
    engine: EngineConfig
    reserved_bytes: int  # of each device, for what else the program will hold there


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Counters that JetStream's interface does not have, counted since the engine was made."""

    prefilled_tokens: int  # prompt tokens computed, not found in memory
    free_pages: int  # of KV cache, now
    evicted_pages: int
    compiled_programs: int


class NoRoomError(Exception):
    """Memory is too short for one more request at present."""
