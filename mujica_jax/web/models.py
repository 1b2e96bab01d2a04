"""Load what `serve` serves: a policy, and the agents that it plays."""

import dataclasses
from collections.abc import Mapping, Sequence

from flax import nnx

from mujica_jax.agents.agent import EnginePolicy
from mujica_jax.config.kinds import of_kind
from mujica_jax.config.schema import AgentConfig, Config, EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.background import BackgroundGenerator
from mujica_jax.inference.engine.factory import engine_mesh
from mujica_jax.inference.generator import check_temperatures
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.retrieval.client import RemoteRetriever
from mujica_jax.retrieval.errors import RetrievalError
from mujica_jax.retrieval.retriever import IndexRetriever, Retriever
from mujica_jax.retrieval.text.index import open_index
from mujica_jax.runs.asking import Answerer
from mujica_jax.runs.endpoint import Endpoint
from mujica_jax.runs.evaluate import prepare_tasks
from mujica_jax.runs.parts import check_prompts, make_agent, open_generator, use_weights
from mujica_jax.runs.policies import SavedPolicy
from mujica_jax.tasks.asked import AskedQuestion, over_passages
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.task import Environment, Task
from mujica_jax.web.served import ServedAgent, ServedModels, ServedPolicy, Source, TaskSource

# The default limit on the tokens of a prompt with its answer, for a model without an agent. A
# shorter context lowers it.
MAX_TOKENS = 4096
# Questions of the task that the page offers as examples.
NUM_EXAMPLES = 6
HTTP = ("http://", "https://")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """The sizes and defaults of a server.

    Attributes:
        max_tokens: Largest number of tokens in a prompt and its answer. None: the longest
            conversation of the agent, or `MAX_TOKENS` without an agent.
        max_new_tokens: Largest number of new tokens, for requests without a limit.
        temperature: Sampling temperature, for requests without one.
        queue_size: Number of requests that may wait while others are processed.
        seed: Seed of the first request.
    """

    max_tokens: int | None
    max_new_tokens: int
    temperature: float
    queue_size: int
    seed: int


class PassageSource:
    """Passages of an index, in the place of what the task searches."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def asked(self, question: str) -> AskedQuestion:
        """Return the question. Raises UserError if it is empty."""
        if not question.strip():
            raise UserError(f"the question is {question!r}, which is empty: write a question")
        return over_passages(question, self._environment)


def open_policy(
    policy: SavedPolicy,
    config: Config | None,
    engine: EngineConfig,
    *,
    limits: ServingLimits,
    dtype: str,
    agents: Sequence[str] = (),
    places: Mapping[str, str] | None = None,
) -> ServedModels:
    """Load a policy, and return it with its agents.

    Without a configuration there is no agent. `agents` are the kinds of further agents, and
    `places` the directories or addresses of further indexes, by the names that the page shows.
    Raises UserError.
    """
    # Prepare the task and the indexes first, because loading a model takes longest.
    task = None if config is None else prepare_tasks([config], is_scored=False)[config.task]
    sources = {} if config is None or task is None else _sources(config, task, places or {})

    max_tokens = limits.max_tokens
    if max_tokens is None and config is not None:
        max_tokens = config.agent.max_trajectory_tokens
    tokenizer, decoder = policy.load(dtype, engine_mesh(engine), context_tokens=max_tokens or 0)
    max_new_tokens = limits.max_new_tokens
    if max_tokens is None:
        max_tokens = min(MAX_TOKENS, decoder.config.context_tokens)
        # Keep at least half of the tokens for the prompt.
        max_new_tokens = min(max_new_tokens, max_tokens // 2)

    generator = open_generator(decoder, engine, tokenizer, positions=max_tokens)
    if engine.weights != "compute" or policy.adapter is not None:
        use_weights(generator, decoder, nnx.state(decoder), engine.weights, policy.version)
    generator.policy_version = policy.version
    if engine.factory is not None:
        check_temperatures(
            generator.capabilities,
            {"--temperature": limits.temperature},
            f"engine.factory {engine.factory}",
        )

    background = BackgroundGenerator.of(generator, queue_size=limits.queue_size)
    defaults = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=limits.temperature, seed=limits.seed
    )
    return ServedModels(
        name=policy.name if policy.run is None else f"{policy.run.name}, {policy.name}",
        background=background,
        policy=ServedPolicy(background, tokenizer, max_tokens=max_tokens, defaults=defaults),
        agent=_agent(config, task, sources, background, tokenizer, agents),
        tokenizer=tokenizer,
        examples=examples_of(task),
    )


def open_served_endpoint(
    endpoint: Endpoint,
    config: Config,
    *,
    limits: ServingLimits,
    agents: Sequence[str] = (),
    places: Mapping[str, str] | None = None,
) -> ServedModels:
    """Return the agents that are played by a model behind an endpoint. Raises UserError.

    The model itself is not served, because its endpoint serves it already.
    """
    task = prepare_tasks([config], is_scored=False)[config.task]
    sources = _sources(config, task, places or {})
    tokenizer, generator = endpoint.open(config)
    capacity = endpoint.concurrency(config) + limits.queue_size
    background = BackgroundGenerator(generator, capacity=capacity)
    return ServedModels(
        name=endpoint.name,
        background=background,
        agent=_agent(config, task, sources, background, tokenizer, agents),
        tokenizer=tokenizer,
        examples=examples_of(task),
    )


def examples_of(task: Task | None) -> tuple[str, ...]:
    """Return some questions of the task, the first ones of dev, or of train if dev has none."""
    if task is None:
        return ()
    questions = task.questions("dev") or task.questions("train")
    texts = dict.fromkeys(question.text for question in questions[: 10 * NUM_EXAMPLES])
    return tuple(texts)[:NUM_EXAMPLES]


def _sources(config: Config, task: Task, places: Mapping[str, str]) -> dict[str, Source]:
    """Return what the agents may search, by names: the task first."""
    sources: dict[str, Source] = {task.name: TaskSource(task)}
    top_k = int(getattr(config.task, "top_k", 5))
    for name, place in places.items():
        if name in sources:
            raise UserError(
                f"--sources names {name} twice, or like the task {task.name}: choose another name"
            )
        sources[name] = PassageSource(TextEnvironment(open_place(place), top_k))
    return sources


def open_place(place: str) -> Retriever:
    """Open the directory of an index of passages, or connect to a server of one."""
    if not place.startswith(HTTP):
        return IndexRetriever(open_index(place, None))
    remote = RemoteRetriever(place)
    try:
        remote.check()
    except RetrievalError as error:
        raise UserError(str(error)) from error
    return remote


def _agent(
    config: Config | None,
    task: Task | None,
    sources: Mapping[str, Source],
    background: BackgroundGenerator,
    tokenizer: Tokenizer,
    kinds: Sequence[str],
) -> ServedAgent | None:
    """Return the agent of the configuration and those of further kinds."""
    if config is None or task is None:
        return None
    agents: dict[str, AgentConfig] = {config.agent.kind: config.agent}
    for kind in kinds:
        agents[kind] = of_kind(config, "agent", kind).agent

    answerers = {}
    for name, agent_config in agents.items():
        check_prompts(agent_config, tokenizer, task.environment_kind)
        answerers[name] = Answerer(
            agent=make_agent(agent_config, tokenizer),
            policy=EnginePolicy(background.generator),
            tokenizer=tokenizer,
            seed=config.seed,
        )
    return ServedAgent(background, answerers, sources)
