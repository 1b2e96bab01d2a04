"""Make the parts that training runs and `eval` share, from their configuration.

These parts are the agent, the reward, the generator and the retrieval statistics.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from flax import nnx

from mujica_jax.agents.agent import Agent
from mujica_jax.agents.mujica import PLANNER, WORKER
from mujica_jax.agents.protocol import PromptMode
from mujica_jax.config.agents import PromptedAgent
from mujica_jax.config.kinds import is_plug_in
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.plug_ins import check_agent_methods
from mujica_jax.config.schema import AgentConfig, Config, EngineConfig, MujicaConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.factory import make_engine
from mujica_jax.inference.generator import PolicyGenerator, check_temperatures
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.metrics import Rule
from mujica_jax.models.adapters import Adapter, read_adapter
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.hub import model_folder
from mujica_jax.models.quantization import Storage, engine_weights
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Question
from mujica_jax.retrieval.embedding.similarity import find_similarity
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.rewards.reward import STAGED, Correctness, RewardFunction, find_reward
from mujica_jax.runtime.extras import import_extra
from mujica_jax.tasks.task import EnvironmentKind, Task

# What a user without the extra `jetstream` can also do.
NATIVE_ENGINE = ", or set it to native"


def make_agent(config: AgentConfig, tokenizer: Tokenizer) -> Agent:
    """Return the agent that the configuration describes."""
    agent = implementation(config)(tokenizer, config)
    if is_plug_in(type(config)):
        check_agent_methods(
            agent, name=config.implementation, needs_opening=isinstance(config, PromptedAgent)
        )
    return agent


def check_prompts(
    agent: AgentConfig, tokenizer: Tokenizer, kind: EnvironmentKind, *modes: PromptMode
) -> None:
    """Check that a conversation has enough room after its prompt and the worked examples.

    This is checked for the agent's own prompt mode and for those in `modes`. Raises UserError if
    there is too little room, or if the tokenizer's chat template cannot be used.
    """
    # This raises an error if the chat template cannot be used.
    tokenizer.open_conversation("", "")
    # Baselines have their own prompts, which are not checked here.
    if not isinstance(agent, PromptedAgent):
        return

    # The roles in `readers` read search results, so their conversations need room for these.
    roles = (agent.kind,)
    readers = (agent.kind,)
    if isinstance(agent, MujicaConfig):
        roles = (PLANNER, WORKER) if agent.split else (PLANNER,)
        readers = (WORKER,) if agent.split else (PLANNER,)

    for mode, role in itertools.product(sorted({agent.prompt, *modes}), roles):
        opening = make_agent(dataclasses.replace(agent, prompt=mode), tokenizer).opening(role, kind)
        prompt_tokens = len(tokenizer.open_conversation(opening.system, "", opening.examples))
        needed_tokens = prompt_tokens + agent.max_turn_tokens
        if role in readers:
            needed_tokens += agent.max_observation_tokens
        if needed_tokens > agent.max_trajectory_tokens:
            raise UserError(
                f"the {role}'s prompt ({mode}) has {prompt_tokens} tokens. With one turn "
                "(agent.max_turn_tokens) and, if the role reads search results, one of these "
                f"(agent.max_observation_tokens), it needs {needed_tokens} tokens, but "
                f"agent.max_trajectory_tokens is {agent.max_trajectory_tokens}: raise it to "
                f"{needed_tokens} or more, or lower the other two"
            )


def make_reward(config: Config, rule: Rule, judge: Correctness | None = None) -> RewardFunction:
    """Return the reward that the configuration describes, with its embedder and its judge."""
    similarity = None
    if config.reward == STAGED and config.staged.search:
        similarity = find_similarity(config.staged.embedder)
    return find_reward(config.reward, rule, config.staged, similarity, judge)


def statistics_of(task: Task, questions: Sequence[Question]) -> RetrievalStatistics:
    """Return the retrieval statistics of these questions, summed over their environments.

    Environments that share a retriever also share its statistics. These are counted once.
    """
    all_statistics = [task.environment(question).statistics for question in questions]
    distinct_statistics = {id(statistics): statistics for statistics in all_statistics}
    total = RetrievalStatistics()
    for statistics in distinct_statistics.values():
        total = total.with_more(**dataclasses.asdict(statistics))
    return total


def make_generator(
    decoder: Decoder, config: Config, tokenizer: Tokenizer, reserved_bytes: int = 0
) -> PolicyGenerator:
    """Return the generator of a run or an evaluation. For `reserved_bytes` see `make_engine`."""
    return open_generator(
        decoder,
        config.engine,
        tokenizer,
        positions=config.agent.max_trajectory_tokens,
        reserved_bytes=reserved_bytes,
    )


def open_generator(
    decoder: Decoder,
    engine: EngineConfig,
    tokenizer: Tokenizer,
    *,
    positions: int,
    reserved_bytes: int = 0,
) -> PolicyGenerator:
    """Return the generator that `engine.kind` names, for sequences of up to `positions` tokens.

    For `reserved_bytes` see `make_engine`.
    """
    if engine.kind == "jetstream":
        # This is imported only here, because JetStream's interface imports TensorFlow.
        import_extra(
            "jetstream.engine.engine_api",
            "engine.kind jetstream",
            extra="jetstream",
            otherwise=NATIVE_ENGINE,
        )
        from mujica_jax.inference.jetstream.factory import make_jetstream_generator

        return make_jetstream_generator(
            decoder,
            engine,
            tokenizer,
            positions=positions,
            reserved_bytes=reserved_bytes,
        )
    decoding_engine = make_engine(
        decoder,
        engine,
        positions=positions,
        stop_token_ids=tokenizer.stop_token_ids,
        reserved_bytes=reserved_bytes,
    )
    return BatchedGenerator(
        decoding_engine,
        prefix_reuse=engine.prefix_reuse,
        token_bytes=tokenizer.token_bytes,
    )


def check_engine_temperatures(
    generator: PolicyGenerator, config: Config, *, trains: bool, sampled: bool = True
) -> None:
    """Check that the engine can sample at the temperatures that the configuration needs.

    Some engines use one temperature for all requests. `trains` is true for a training run, which
    also samples at `sampling.temperature`. `sampled` is true if the evaluation also samples at
    `eval.temperature`. Raises UserError if the engine cannot do that.
    """
    name = f"engine.factory {config.engine.factory}"
    is_greedy = (
        not generator.capabilities.sampling_per_request and generator.capabilities.temperature == 0
    )
    if is_greedy and sampled and not trains:
        raise UserError(
            f"{name} can only decode greedily, but the sampled scores need eval.temperature "
            f"{config.eval.temperature}: add --no-sampled, or use an engine with its own "
            "temperature for each request"
        )
    temperatures = {"the temperature of greedy evaluations": 0.0}
    if sampled:
        temperatures["eval.temperature"] = config.eval.temperature
    if trains:
        temperatures["sampling.temperature"] = config.sampling.temperature
    check_temperatures(generator.capabilities, temperatures, name)


def open_adapter(config: Config, decoder: Decoder) -> Adapter | None:
    """Load the adapter that training continues from; None if the configuration names none.

    Raises UserError if the adapter's rank or alpha differs from the trainer's settings.
    """
    if config.adapter is None:
        return None
    trainer = config.trainer
    folder = model_folder(config.adapter, setting="--adapter")
    adapter = read_adapter(decoder, folder)
    rank, alpha = adapter.rank_and_alpha()
    if rank != trainer.lora_rank or not math.isclose(alpha, trainer.lora_alpha, rel_tol=1e-4):
        raise UserError(
            f"the adapter {config.adapter} has rank {rank} and alpha {alpha:g}, but "
            f"trainer.lora_rank is {trainer.lora_rank} and trainer.lora_alpha is "
            f"{trainer.lora_alpha:g}: set --trainer.lora-rank {rank} "
            f"--trainer.lora-alpha {alpha:g}"
        )
    return adapter


def use_weights(
    generator: PolicyGenerator, decoder: Decoder, weights: nnx.State, storage: Storage, version: int
) -> None:
    """Copy weights into the engine, so that it samples from them.

    `weights` belong to a model with the structure of `decoder`. `storage` is the type in which the
    engine stores them. `version` is the version of the policy. The function returns when the
    copy is complete. A copy is needed because training reuses its buffers.
    """
    stored_weights = engine_weights(weights, decoder.config, storage, decoder.dtype)
    generator.set_weights(stored_weights, version)
