"""Tokens a second of multi-turn agent rollouts: many conversations with one system prompt, an
observation after every turn.

    python benchmarks/rollout.py --checkpoint DIRECTORY [--sessions 48 --turns 3 --seed 0]
    python benchmarks/rollout.py --checkpoint DIRECTORY --engines native jetstream    in turns, and their ratio

Each session is a prompt (384 tokens that all share, 24 of its own) and, a turn, 12 to 63 generated
tokens and 40 observed ones; lengths are forced, tokens are drawn at temperature 1. Prints one JSON
line: the median of the runs after the first, which compiles what the cache on disk does not have.
With several engines it prints a line for each, and the first one's seconds as a multiple of the
other's: 0.9 means that the other reaches nine tenths of the first one's speed. Of a line:
`recompiles` counts that, run by run, and is 0 from the start when the program is started again. The
floor is what the generated and prefilled tokens cost at the speed of this machine's largest matrix
product and its memory:

    2 x weights of the layers x all tokens + 2 x weights of the head x generated tokens
    + 4 x layers x heads x head_dim x sum over tokens of the tokens before it          operations, and
    keys and values that are a session's own, read once a generated token              bytes

What all share and the weights are read once a step, whatever the number of sessions: the floor
leaves them out. On an accelerator they are most of what is read, so there is a second floor, of
memory alone: all weights and the shared keys and values once a step, with as many steps as the
longest session has tokens, and the sessions' own. A directory that holds a config.json and no
weights is a model whose weights are drawn.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.families import DecoderConfig
from mujica_jax.models.layers import block_weights
from mujica_jax.models.weights import load_checkpoint, load_config
from mujica_jax.runs.parts import open_generator, use_weights
from mujica_jax.runtime.compilation_cache import use_compilation_cache
from mujica_jax.runtime.host_memory import keep_freed_memory

SYSTEM_TOKENS = 384
QUESTION_TOKENS = 24
OBSERVED_TOKENS = 40
MIN_GENERATED_TOKENS = 12
MAX_GENERATED_TOKENS = 64  # is not reached


@dataclasses.dataclass(frozen=True)
class Turn:
    generated_tokens: int
    observed: list[int]


@dataclasses.dataclass(frozen=True)
class Session:
    prompt: list[int]
    turns: list[Turn]


def workload(vocabulary: int, sessions: int, turns: int, seed: int) -> list[Session]:
    """Return the sessions, a function of the seed.

    Their ids avoid the first 300, where special tokens are.
    """
    draw = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return draw.integers(300, vocabulary - 1, count).tolist()

    shared = ids(SYSTEM_TOKENS)
    drawn_sessions = []
    for _ in range(sessions):
        prompt = shared + ids(QUESTION_TOKENS)
        drawn = (
            Turn(
                int(draw.integers(MIN_GENERATED_TOKENS, MAX_GENERATED_TOKENS)), ids(OBSERVED_TOKENS)
            )
            for _ in range(turns)
        )
        drawn_sessions.append(Session(prompt, list(drawn)))
    return drawn_sessions


async def play(generator: PolicyGenerator, sessions: list[Session]) -> None:
    async def play_session(number: int, session: Session) -> None:
        context = list(session.prompt)
        for place, turn in enumerate(session.turns):
            params = SamplingParams(
                max_new_tokens=turn.generated_tokens, temperature=1.0, seed=1000 * number + place
            )
            completion = await generator.generate(
                context, params, continues=place + 1 < len(session.turns)
            )
            context += [*completion.token_ids, *turn.observed]

    await asyncio.gather(
        *(play_session(number, session) for number, session in enumerate(sessions))
    )


def work(model: DecoderConfig, sessions: list[Session]) -> tuple[float, float]:
    """Return (operations, bytes of keys and values) that no engine can do without, in float32."""
    in_layers = model.num_layers * sum(
        int(np.prod(weight.shape)) for weight in block_weights(model) if weight.inputs
    )
    by_position = 4.0 * model.num_layers * model.num_heads * model.head_dim
    token_bytes = 8.0 * model.num_layers * model.num_kv_heads * model.head_dim
    operations = 2.0 * in_layers * SYSTEM_TOKENS + by_position * SYSTEM_TOKENS**2 / 2
    read = 0.0
    for session in sessions:
        position = SYSTEM_TOKENS
        for place, turn in enumerate(session.turns):
            heard = QUESTION_TOKENS if place == 0 else OBSERVED_TOKENS
            tokens = heard + turn.generated_tokens
            operations += (
                2.0 * in_layers * tokens
                + 2.0 * model.vocab_size * model.hidden_size * turn.generated_tokens
            )
            operations += by_position * sum(range(position, position + tokens))
            own = range(position + heard - SYSTEM_TOKENS, position + tokens - SYSTEM_TOKENS)
            read += token_bytes * sum(own)
            position += tokens
    return operations, read


def memory_bytes(
    model: DecoderConfig, sessions: list[Session], own: float, weights: int, itemsize: int
) -> float:
    """Return the bytes that decoding reads if every step has all sessions.

    `own` are the sessions' keys and values in float32.
    """
    steps = max(sum(turn.generated_tokens for turn in session.turns) for session in sessions)
    shared = 2 * itemsize * model.num_layers * model.num_kv_heads * model.head_dim * SYSTEM_TOKENS
    return steps * (weights + shared) + own * itemsize / 4


def opened(directory: str, dtype: str) -> Decoder:
    if any(Path(directory).glob("*.safetensors")):
        return load_checkpoint(directory, dtype=dtype)
    model = load_config(directory)

    @nnx.jit
    # in the type of the products, as the engine holds them: 7B in float32 would not fit a chip
    def drawn() -> Decoder:
        decoder = Decoder(model, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
        nnx.update(
            decoder, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(decoder, nnx.Param))
        )
        return decoder

    return drawn()


def count_programs() -> dict[str, int]:
    """Return counts that go on rising.

    They are of the programs that JAX asked for, and of those among them that its cache on disk had.
    """
    counts = {"loaded or compiled": 0, "found on disk": 0}

    def on_duration(event: str, duration: float, **_: Any) -> None:
        counts["loaded or compiled"] += event == "/jax/core/compile/backend_compile_duration"

    def on_event(event: str, **_: Any) -> None:
        counts["found on disk"] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    return counts


@dataclasses.dataclass(frozen=True)
class NoStops:
    """Stands where a tokenizer does: no token ends a request, because lengths are forced."""

    vocabulary: int

    @property
    def stop_token_ids(self) -> tuple[int]:
        # No token has this id.
        return (self.vocabulary,)

    def token_bytes(self, token_id: int) -> bytes:
        return b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of all sessions."""

    seconds: float
    recompiles: int
    prompt_tokens: int
    prefilled_tokens: int


def measure(
    generator: PolicyGenerator, sessions: list[Session], programs: dict[str, int]
) -> Measured:
    """Play all sessions with an empty cache. `programs` are the counts of `count_programs`."""
    generator.reset_cache()
    before = generator.statistics
    already = dict(programs)
    start_time = time.perf_counter()
    asyncio.run(play(generator, sessions))
    seconds = time.perf_counter() - start_time
    after = generator.statistics
    fresh = {name: programs[name] - already[name] for name in programs}
    return Measured(
        seconds=seconds,
        recompiles=fresh["loaded or compiled"] - fresh["found on disk"],
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
    )


def machine(repeats: int) -> tuple[float, float]:
    """Return operations a second of a large float32 product, bytes a second of a large sum."""
    matrix = jnp.ones((2048, 2048))
    long = jnp.ones(64 << 20)
    product = jax.jit(lambda matrix: matrix @ matrix)
    total = jax.jit(jnp.sum)

    def seconds(call: Any, argument: Any) -> float:
        call(argument).block_until_ready()
        call_seconds = []
        for _ in range(repeats):
            start_time = time.perf_counter()
            call(argument).block_until_ready()
            call_seconds.append(time.perf_counter() - start_time)
        return statistics.median(call_seconds)

    return 2 * 2048**3 / seconds(product, matrix), long.nbytes / seconds(total, long)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a Hugging Face directory")
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--decode-steps", type=int, default=8)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--weights",
        default="compute",
        choices=["compute", "int8", "fp8", "w8a8"],
        help="of the layers",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["native"],
        choices=["native", "jetstream"],
        help="as engine.kind; in turns",
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="measured runs, after one that compiles"
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    use_compilation_cache()
    programs = count_programs()
    positions = (
        SYSTEM_TOKENS
        + QUESTION_TOKENS
        + arguments.turns * (MAX_GENERATED_TOKENS - 1 + OBSERVED_TOKENS)
    )
    engine_config = EngineConfig(
        max_num_seqs=arguments.slots,
        decode_steps_per_call=arguments.decode_steps,
        prefill_tokens=arguments.prefill_tokens,
        page_tokens=arguments.page_tokens,
    )
    try:
        decoder = opened(arguments.checkpoint, arguments.dtype)
        tokenizer = NoStops(vocabulary=decoder.config.vocab_size)
        generators = {
            kind: open_generator(
                decoder,
                dataclasses.replace(engine_config, kind=kind),
                tokenizer,
                positions=positions,
            )
            for kind in arguments.engines
        }
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    sessions = workload(
        decoder.config.vocab_size, arguments.sessions, arguments.turns, arguments.seed
    )
    generated = sum(turn.generated_tokens for session in sessions for turn in session.turns)
    for generator in generators.values():
        use_weights(generator, decoder, nnx.state(decoder, nnx.Param), arguments.weights, 0)
    runs: dict[str, list[Measured]] = {kind: [] for kind in generators}
    for _ in range(1 + arguments.runs):
        for kind, generator in generators.items():
            runs[kind].append(measure(generator, sessions, programs))
    medians = {
        kind: statistics.median(run.seconds for run in measured[1:])
        for kind, measured in runs.items()
    }
    speed, bandwidth = machine(arguments.runs + 2)
    operations, read = work(decoder.config, sessions)
    floor = operations / speed + read / bandwidth
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param)))
    itemsize = jnp.dtype(arguments.dtype).itemsize
    memory_floor = (
        memory_bytes(decoder.config, sessions, read, parameters * itemsize, itemsize) / bandwidth
    )
    first = arguments.engines[0]
    for kind, measured in runs.items():
        median = medians[kind]
        last = measured[-1]
        result = {
            "engine": kind,
            "generated_tokens_per_second": round(generated / median, 1),
            "sessions_per_second": round(len(sessions) / median, 2),
            "generated_tokens": generated,
            "prompt_tokens": last.prompt_tokens,
            "prefilled_tokens": last.prefilled_tokens,
            "saved_tokens": last.prompt_tokens - last.prefilled_tokens,
            "seconds": [round(run.seconds, 3) for run in measured],
            "recompiles": [run.recompiles for run in measured],
            "matmul_gflops": round(speed / 1e9, 1),
            "memory_gigabytes_per_second": round(bandwidth / 1e9, 1),
            "floor_seconds": round(floor, 3),
            "share_of_floor": round(floor / median, 3),
            "memory_floor_seconds": round(memory_floor, 3),
            "share_of_memory_floor": round(memory_floor / median, 3),
            "device": jax.devices()[0].device_kind,
        }
        if kind != first:
            result[f"speed_beside_{first}"] = round(medians[first] / median, 3)
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
