"""Serve a policy and the agent that it plays: a page to ask, and OpenAI's interface.

    python -m mujica_jax.serve RUN [--policy N] [--port 8000] [flags]
    python -m mujica_jax.serve HF_DIR|FILE.gguf|smollm2|HUB_NAME [--adapter DIR] [--config CONFIG]
    python -m mujica_jax.serve --config CONFIG --remote.base-url URL --remote.model NAME ...

One port serves the page and the interface (docs/guides/serving.md). A run and an adapter of a run
bring their configuration, which says what the agent searches. A model without a configuration is
served without an agent. `--grpc-port` also serves the policy over gRPC, with JetStream's protocol.

Ctrl-C or SIGTERM ends the program after it has answered the requests that are being processed.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.checks import check, check_engine, check_remote
from mujica_jax.config.command_line import override, take_flag
from mujica_jax.config.files import load_config
from mujica_jax.config.program_help import ProgramHelp, program_name
from mujica_jax.config.schema import AgentConfig, Config, EngineConfig, RemoteConfig, TaskConfig
from mujica_jax.errors import UserError
from mujica_jax.runs.endpoint import open_endpoint
from mujica_jax.runs.policies import find_policy, init_as_checkpoint, is_run
from mujica_jax.runtime.extras import import_extra
from mujica_jax.storage.run_directory import run_path
from mujica_jax.tasks.data_folder import check_data_dir

if TYPE_CHECKING:
    from mujica_jax.web.served import ServedModels

HELP = ProgramHelp(
    summary="Serve a policy and its agent on one port, until Ctrl-C or SIGTERM ends the program: a "
    "page to ask and to look at runs, and OpenAI's interface.",
    usage="RUN|MODEL [flags]",
    examples={
        "runs/first": "Serve the newest policy of a run at http://127.0.0.1:8000.",
        "smollm2 --adapter adapters/two_wiki_text_smollm2 --task.data-dir DIR --port 0": "Serve a "
        "model with an adapter on a free port.",
    },
    common={
        "Policy": ("checkpoint", "policy", "adapter", "dtype", "remote.base_url", "remote.model"),
        "What is searched": ("task.data_dir", "task.index", "task.retriever", "sources"),
        "Agent": ("agent.kind", "agents"),
        "Address": ("host", "port", "grpc_port", "api_key_file"),
        "Answers": ("max_tokens", "max_new_tokens", "temperature", "seed"),
        "Sizes": ("queue_size", "engine.max_num_seqs", "engine.tensor_parallel_size"),
        "Page": ("runs",),
    },
)
LOOPBACK = "127.0.0.1"
MAX_PORT = 2**16 - 1
# The time to finish gRPC requests after the program was asked to end.
GRACE_SECONDS = 30.0
MINIMUMS = {"max_tokens": 2, "max_new_tokens": 1, "temperature": 0, "queue_size": 0, "seed": 0}
# Engine of a model without a configuration.
ENGINE = EngineConfig(max_num_seqs=16, decode_steps_per_call=8, prefill_tokens=2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Serve a policy: a page, and OpenAI's interface.

    The first word is the model. `--config NAME` names a configuration, which says what an agent
    searches. A run directory brings its own.
    """

    # The model to serve: a run directory (local or gs://BUCKET/PREFIX), a Hugging Face directory or
    # name, a GGUF file, or smollm2. None: the model behind `remote.base_url`.
    checkpoint: str | None
    # Number of the run's policy to serve. Without this flag it is the latest policy.
    policy: int | None = None
    # Folder of a LoRA adapter in PEFT's format, to add to a checkpoint that is not a run directory.
    adapter: str | None = None
    # Address to listen on. 0.0.0.0 accepts connections from other machines. They are not encrypted.
    host: str = LOOPBACK
    # Port to listen on. 0 chooses a free one.
    port: int = 8000
    # Port for JetStream's gRPC protocol (extra `jetstream`). Without this flag there is none.
    grpc_port: int | None = None
    # File whose first line is an API key. Requests without it are refused.
    api_key_file: str | None = None
    # More run directories to show on the page.
    runs: tuple[str, ...] = ()
    # Maximum number of tokens in a prompt and its answer together. The default is the longest
    # conversation of the agent; without an agent it is 4096, or the model's context if that is
    # shorter.
    max_tokens: int | None = None
    # Maximum number of tokens in an answer, for requests that do not set a limit.
    max_new_tokens: int = 512
    # Sampling temperature, for requests that set none. 0: always take the most likely token.
    temperature: float = 0.0
    # Number of requests that may wait while others are processed. Further requests are refused.
    queue_size: int = 64
    # Number type of weights and matrix products. The default is that of the run, and bfloat16 for a
    # model without a configuration.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Seed of the first request that sets none.
    seed: int = 0

    engine: EngineConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentServeArguments(ServeArguments):
    """Serve a policy and its agent: a page, and OpenAI's interface.

    The first word is the model. `--config NAME` names a configuration, which says what an agent
    searches. A run directory brings its own.
    """

    # Kinds of further agents, which the page offers beside the agent of the configuration.
    agents: tuple[str, ...] = ()
    # Further indexes of passages that the page offers, as in NAME=DIRECTORY or NAME=http://HOST:PORT.
    sources: tuple[str, ...] = ()

    task: TaskConfig
    agent: AgentConfig
    remote: RemoteConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: a signal ended the program.
    - 2: the user made a mistake.
    """
    try:
        options, config = parse(sys.argv[1:] if arguments is None else arguments)
        serve(options, config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> tuple[ServeArguments, Config | None]:
    """Return the arguments, and the configuration with their changes. None: there is none.

    Raises UserError.
    """
    words = init_as_checkpoint(arguments)
    if words and not words[0].startswith("-"):
        words = ["--checkpoint", *words]
    name = take_flag(words, "--config")
    checkpoint = take_flag([*words], "--checkpoint")
    config = _base_config(words, name=name, checkpoint=checkpoint)
    has_endpoint = any(word.startswith("--remote.base") for word in words)
    model = tyro.MISSING if checkpoint is None and not has_endpoint else checkpoint

    if config is None:
        _refuse_agent_flags(words, checkpoint)
        defaults = ServeArguments(checkpoint=model, engine=ENGINE)
        options = override(defaults, words, prog=program_name("serve"), program=HELP)
        check_engine(options)
        _check(options)
        return options, None

    agent_defaults = AgentServeArguments(
        checkpoint=model,
        engine=config.engine,
        task=evaluation.uncapped(config.task),
        agent=config.agent,
        remote=RemoteConfig(),
    )
    agent_options = override(agent_defaults, words, prog=program_name("serve"), program=HELP)
    config = dataclasses.replace(
        config,
        engine=agent_options.engine,
        task=evaluation.without_copies(agent_options.task),
        agent=agent_options.agent,
    )
    check(config)
    check_remote(agent_options.remote)
    check_data_dir(config.task)
    _check(agent_options)
    _check_agent(agent_options)
    return agent_options, config


def _base_config(
    words: Sequence[str], *, name: str | None, checkpoint: str | None
) -> Config | None:
    """Return the configuration that the flags change. None: a model without one."""
    named_config = None if name is None else load_config(name)
    adapter = take_flag([*words], "--adapter")
    brings_config = checkpoint is not None and is_run(run_path(checkpoint))
    brings_config = brings_config or (adapter is not None and is_run(run_path(adapter)))
    asks_for_help = "--help" in words or "-h" in words
    if named_config is None and not brings_config and not asks_for_help:
        return None
    return evaluation.base_config(words, named_config=named_config, checkpoint=checkpoint)


def _refuse_agent_flags(words: Sequence[str], checkpoint: str | None) -> None:
    """Refuse flags of agents and tasks for a model without a configuration. Raises UserError."""
    for word in words:
        if word.startswith(("--task.", "--agent.", "--agents", "--sources", "--remote.")):
            raise UserError(
                f"{word.partition('=')[0]} is given, but {checkpoint or 'the endpoint'} has no "
                "configuration that says what an agent searches: add --config CONFIG, such as "
                "two_wiki_text_smollm2"
            )


def _check(options: ServeArguments) -> None:
    """Check the flags. Raises UserError that names the first invalid flag."""
    for name, minimum in MINIMUMS.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value} and must be at least {minimum}")
    for name, port in (("port", options.port), ("grpc-port", options.grpc_port)):
        if port is not None and not 0 <= port <= MAX_PORT:
            raise UserError(
                f"--{name} is {port} and must be from 0, which chooses a free port, to {MAX_PORT}"
            )
    if options.max_tokens is not None and options.max_new_tokens >= options.max_tokens:
        raise UserError(
            f"--max-new-tokens is {options.max_new_tokens}, which leaves no room for a prompt in "
            f"--max-tokens {options.max_tokens}: lower --max-new-tokens or raise --max-tokens"
        )


def _check_agent(options: AgentServeArguments) -> None:
    """Check the flags of an agent. Raises UserError."""
    places_of(options.sources)
    longest = options.agent.max_trajectory_tokens
    if options.max_tokens is not None and options.max_tokens < longest:
        raise UserError(
            f"--max-tokens is {options.max_tokens}, but conversations of the agent may have "
            f"agent.max_trajectory_tokens {longest}: raise the first, or lower the second"
        )
    if options.remote.base_url is not None:
        for name in ("checkpoint", "policy", "adapter", "grpc_port"):
            value = getattr(options, name)
            if value is not None:
                raise UserError(
                    f"--remote.base-url is {options.remote.base_url}, and --{name.replace('_', '-')} "
                    f"is {value}, but the endpoint has the model: leave one of them out"
                )


def places_of(sources: Sequence[str]) -> dict[str, str]:
    """Return the places of NAME=PLACE, by name. Raises UserError."""
    places: dict[str, str] = {}
    for source in sources:
        name, equals, place = source.partition("=")
        if not (name and equals and place):
            raise UserError(
                f"--sources is {source!r}: give NAME=DIRECTORY or NAME=http://HOST:PORT"
            )
        if name in places:
            raise UserError(f"--sources names {name} twice: choose another name for one of them")
        places[name] = place
    return places


def read_api_key(file: str | None) -> str | None:
    """Return the key in a file. Raises UserError if there is none."""
    if file is None:
        return None
    from mujica_jax.web.api_key import first_key

    try:
        key = first_key(Path(file).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--api-key-file {file} cannot be read ({error}): check the path"
        ) from error
    if key is None:
        raise UserError(f"--api-key-file {file} holds no key: write the key into its first line")
    return key


def serve(options: ServeArguments, config: Config | None) -> None:
    """Load the policy and serve it until a signal ends the program. Raises UserError."""
    # These imports start JAX. They come late so that mistakes in the arguments are reported fast.
    from mujica_jax.retrieval.service import address_of, open_port, serve_until_told
    from mujica_jax.web.app import LOOPBACK_HOSTS, create_app
    from mujica_jax.web.model_routes import model_routers

    if options.grpc_port is not None:
        import_extra("jetstream.core.proto.jetstream_pb2_grpc", "--grpc-port", extra="jetstream")
    api_key = read_api_key(options.api_key_file)
    hosts = LOOPBACK_HOSTS if options.host == LOOPBACK else ("*",)
    runs = list(options.runs)
    if options.checkpoint is not None and is_run(run_path(options.checkpoint)):
        runs.insert(0, options.checkpoint)

    with contextlib.ExitStack() as stack:
        # A taken port is reported before the model is loaded.
        server_socket = stack.enter_context(
            contextlib.closing(open_port(options.host, options.port))
        )
        served = open_models(options, config)
        app = create_app(
            runs, model_routers=model_routers(served), allowed_hosts=hosts, api_key=api_key
        )

        served.background.start()
        stack.callback(served.background.stop)
        if options.grpc_port is not None:
            _start_grpc(options, served, stack)
        address = address_of(server_socket)
        announcement = (
            f"serving {served.name} at {address}; OpenAI's interface is at {address}/v1 "
            "(Ctrl-C ends the program)"
        )
        serve_until_told(app, server_socket, announcement)


def open_models(options: ServeArguments, config: Config | None) -> "ServedModels":
    """Load the policy, or connect to its endpoint. Raises UserError."""
    from mujica_jax.runtime.compilation_cache import use_compilation_cache
    from mujica_jax.web import models

    limits = models.ServingLimits(
        max_tokens=options.max_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        queue_size=options.queue_size,
        seed=options.seed,
    )
    if isinstance(options, AgentServeArguments) and options.remote.base_url is not None:
        assert config is not None, "an endpoint needs a configuration"
        endpoint = open_endpoint(options.remote, run_path("eval"))
        return models.open_served_endpoint(
            endpoint,
            config,
            limits=limits,
            agents=options.agents,
            places=places_of(options.sources),
        )

    assert options.checkpoint is not None, "the arguments were checked"
    policy = find_policy(options.checkpoint, policy=options.policy, adapter=options.adapter)
    use_compilation_cache()
    dtype = options.dtype or ("bfloat16" if config is None else config.trainer.dtype)
    is_agent = isinstance(options, AgentServeArguments)
    return models.open_policy(
        policy,
        config,
        options.engine,
        limits=limits,
        dtype=dtype,
        agents=options.agents if is_agent else (),
        places=places_of(options.sources) if is_agent else {},
    )


def _start_grpc(
    options: ServeArguments, served: "ServedModels", stack: contextlib.ExitStack
) -> None:
    """Serve the policy with JetStream's protocol too, until the stack is closed."""
    from mujica_jax.inference.jetstream.server import Server

    assert served.policy is not None, "an endpoint is not served over gRPC"
    assert options.grpc_port is not None, "the caller checked that there is a port"
    server = Server(
        served.policy.background,
        served.policy.defaults,
        tokenizer=served.policy.tokenizer,
        host=options.host,
        port=options.grpc_port,
    )
    port = server.start()
    stack.callback(server.stop, grace_seconds=GRACE_SECONDS)
    print(f"gRPC with JetStream's protocol at {options.host}:{port}", flush=True)
