"""Serve a policy over gRPC with JetStream's protocol (docs/guides/serving.md).

    python -m mujica_jax.serve --checkpoint RUN|HF_DIR|FILE.gguf|smollm2 [--policy N] \\
        [--adapter DIR] --port 9000

The checkpoint is given as for `mujica_jax.eval`. It is a run directory or a model. The latest
policy of a run is served, unless `--policy` names another one. `--adapter` adds a LoRA adapter to a
model. Ctrl-C or SIGTERM ends the program after it has answered the requests that are being
processed.
"""

import dataclasses
import queue
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import tyro

from mujica_jax.config.checks import check_engine
from mujica_jax.config.command_line import override
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.runs.policies import SavedPolicy, find_policy, init_as_checkpoint

if TYPE_CHECKING:
    from mujica_jax.inference.jetstream.server import Server

HELP = ProgramHelp(
    summary="Serve a policy over gRPC with JetStream's protocol, until Ctrl-C or SIGTERM ends the "
    "program.",
    usage="--checkpoint RUN|MODEL [flags]",
    examples={
        "--checkpoint runs/first": "Serve the newest policy of a run on port 9000.",
        "--init smollm2 --port 0 --metrics-port 9090": "Serve a model on a free port, with metrics "
        "for Prometheus.",
    },
    common={
        "Policy": ("checkpoint", "policy", "adapter", "dtype"),
        "Address": ("host", "port", "metrics_port"),
        "Answers": ("max_tokens", "max_new_tokens", "temperature", "seed"),
        "Sizes": ("queue_size", "engine.max_num_seqs", "engine.tensor_parallel_size"),
    },
)
# The default limit on the tokens of a prompt with its answer. A shorter context lowers it.
MAX_TOKENS = 4096
# The time to finish requests after the program was asked to end.
GRACE_SECONDS = 30.0
MINIMUMS = {"max_tokens": 2, "max_new_tokens": 1, "temperature": 0, "queue_size": 0, "seed": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Serve a policy over gRPC with JetStream's protocol."""

    # The model to serve: a run directory (local or gs://BUCKET/PREFIX), a Hugging Face directory, a
    # GGUF file, or smollm2.
    checkpoint: str
    # Number of the run's policy to serve. Without this flag it is the latest policy.
    policy: int | None = None
    # Folder of a LoRA adapter in PEFT's format, to add to a checkpoint that is not a run directory.
    adapter: str | None = None
    # Address to listen on. 0.0.0.0 accepts connections from other machines. They are not encrypted.
    host: str = "127.0.0.1"
    # Port to listen on. 0 chooses a free one.
    port: int = 9000
    # Port for Prometheus metrics over HTTP. Without this flag there are none.
    metrics_port: int | None = None
    # Maximum number of tokens in a prompt and its answer together. The default is 4096, or the
    # context length of the model if that is shorter.
    max_tokens: int | None = None
    # Maximum number of tokens in an answer, for requests that do not set a limit.
    max_new_tokens: int = 512
    # Sampling temperature. 0: always take the most likely token.
    temperature: float = 0.0
    # Number of requests that may wait while others are processed. Further requests are refused.
    queue_size: int = 64
    # Number type of weights and matrix products.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Seed of the sampling.
    seed: int = 0

    engine: EngineConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: a signal ended the program.
    - 2: the user made a mistake.
    """
    words = init_as_checkpoint(sys.argv[1:] if arguments is None else arguments)
    engine = EngineConfig(max_num_seqs=16, decode_steps_per_call=8, prefill_tokens=2048)
    try:
        defaults = ServeArguments(checkpoint=tyro.MISSING, engine=engine)
        options = override(defaults, words, prog=program_name("serve"), program=HELP)
        _check(options)
        serve(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: ServeArguments) -> None:
    """Check the flags. Raises UserError that names the first invalid flag."""
    check_engine(options)
    for name, minimum in MINIMUMS.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value} and must be at least {minimum}")
    for name, port in (("port", options.port), ("metrics-port", options.metrics_port)):
        if port is not None and not 0 <= port < 2**16:
            raise UserError(
                f"--{name} is {port} and must be from 0, which chooses a free port, to {2**16 - 1}"
            )
    if options.max_tokens is not None and options.max_new_tokens >= options.max_tokens:
        raise UserError(
            f"--max-new-tokens is {options.max_new_tokens}, which leaves no room for a prompt in "
            f"--max-tokens {options.max_tokens}: lower --max-new-tokens or raise --max-tokens"
        )


def serve(options: ServeArguments) -> None:
    """Load the policy and serve it until a signal ends the program."""
    # These imports start JAX. They come late so that mistakes in the arguments are reported fast.
    from mujica_jax.inference.counters import LiveCounters, serve_metrics
    from mujica_jax.runtime.compilation_cache import use_compilation_cache

    policy = find_policy(options.checkpoint, policy=options.policy, adapter=options.adapter)
    use_compilation_cache()
    server = _make_server(policy, options)

    # A threading.Event would not work here. If the signal came while `wait` holds the lock of the
    # event, a handler that sets the event would wait forever.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.put(number))

    port = server.start()
    close_metrics = None
    if options.metrics_port is not None:
        counters = LiveCounters(lambda: server.statistics)
        metrics_port, close_metrics = serve_metrics(
            counters, port=options.metrics_port, host=options.host
        )
        print(f"metrics at http://{options.host}:{metrics_port}/metrics", flush=True)
    print(f"serving {policy.name} at {options.host}:{port}", flush=True)
    signals.get()

    server.stop(grace_seconds=GRACE_SECONDS)
    if close_metrics is not None:
        close_metrics()


def _make_server(policy: SavedPolicy, options: ServeArguments) -> "Server":
    """Load the policy and return a server for it, which is not started."""
    from mujica_jax.inference.generator import check_temperatures
    from mujica_jax.inference.jetstream.server import Server
    from mujica_jax.inference.requests import SamplingParams
    from mujica_jax.runs.parts import open_generator

    tokenizer, decoder = policy.load(options.dtype, context_tokens=options.max_tokens or 0)
    max_tokens = options.max_tokens
    max_new_tokens = options.max_new_tokens
    if max_tokens is None:
        max_tokens = min(MAX_TOKENS, decoder.config.context_tokens)
        # Keep at least half of the tokens for the prompt.
        max_new_tokens = min(max_new_tokens, max_tokens // 2)

    generator = open_generator(
        decoder,
        options.engine,
        tokenizer,
        positions=max_tokens,
        queue_size=options.queue_size,
    )
    if options.engine.factory is not None:
        check_temperatures(
            generator.capabilities,
            {"--temperature": options.temperature},
            f"engine.factory {options.engine.factory}",
        )
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=options.temperature, seed=options.seed
    )
    return Server(generator, sampling, tokenizer=tokenizer, host=options.host, port=options.port)
