"""Make the parts that a configuration describes, for runs and `eval` alike.

These are agent, reward, generator and retrieval statistics.
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
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import AgentConfig, Config, EngineConfig, MujicaConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.engine.factory import make_engine
from mujica_jax.inference.generator import PolicyGenerator, check_temperatures
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.metrics import Rule
from mujica_jax.models.adapters import Adapter, read_adapter
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.quantization import Storage, engine_weights
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Question
from mujica_jax.retrieval.embedding.similarity import find_similarity
from mujica_jax.retrieval.statistics import RetrievalStatistics
from mujica_jax.rewards.reward import STAGED, Correctness, RewardFunction, find_reward
from mujica_jax.storage.run_directory import local_folder
from mujica_jax.tasks.task import EnvironmentKind, Task


def make_agent(config: AgentConfig, tokenizer: Tokenizer) -> Agent:
    """Return the agent of a configuration."""
    return implementation(config)(tokenizer, config)


def check_prompts(
    agent: AgentConfig, tokenizer: Tokenizer, kind: EnvironmentKind, *modes: PromptMode
) -> None:
    """Check that a conversation has room behind its prompt, with worked examples.

    This is checked in the agent's own mode of prompts and in `modes`. Raises UserError.
    """
    # This refuses a chat template that cannot be used, before anything is played.
    tokenizer.open_conversation("", "")
    if not isinstance(agent, PromptedAgent):  # baselines have prompts of their own
        return

    # Readers are shown what a search finds.
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
                f"the {role}'s prompt ({mode}) has {prompt_tokens} tokens, needs {needed_tokens} "
                "with what agent.max_turn_tokens and agent.max_observation_tokens allow, and "
                f"agent.max_trajectory_tokens is {agent.max_trajectory_tokens}: raise it to "
                f"{needed_tokens} or more, or show less"
            )


def make_reward(config: Config, rule: Rule, judge: Correctness | None = None) -> RewardFunction:
    """Return the reward of a configuration, with its embedder and the judge that it asks."""
    similarity = None
    if config.reward == STAGED and config.staged.search:
        similarity = find_similarity(config.staged.embedder)
    return find_reward(config.reward, rule, config.staged, similarity, judge)


def statistics_of(task: Task, questions: Sequence[Question]) -> RetrievalStatistics:
    """Return the sum over all environments that these questions are answered in.

    Environments that share a retriever share its statistics, which are counted once.
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
    """Return the generator of a run or an evaluation. `reserved_bytes`: see `make_engine`."""
    return open_generator(
        decoder,
        config.engine,
        tokenizer,
        positions=config.agent.max_trajectory_tokens,
        queue_size=0,  # episodes wait for their turn; only streams are refused
        reserved_bytes=reserved_bytes,
    )


def open_generator(
    decoder: Decoder,
    engine: EngineConfig,
    tokenizer: Tokenizer,
    *,
    positions: int,
    queue_size: int,
    reserved_bytes: int = 0,
) -> PolicyGenerator:
    """Return the generator that `engine.kind` names, for requests of up to `positions` tokens.

    `queue_size` bounds how many streams wait for a slot. `reserved_bytes`: see `make_engine`.
    """
    if engine.kind == "jetstream":
        # Imported here: JetStream's interface brings TensorFlow.
        from mujica_jax.inference.jetstream.factory import make_jetstream_generator

        return make_jetstream_generator(
            decoder,
            engine,
            tokenizer,
            positions=positions,
            queue_size=queue_size,
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
        queue_size=queue_size,
        token_bytes=tokenizer.token_bytes,
    )


def check_engine_temperatures(
    generator: PolicyGenerator, config: Config, *, trains: bool, sampled: bool = True
) -> None:
    """Check that an engine which samples all requests alike is asked for no other temperature.

    A run `trains`; an evaluation alone is greedy and, if it is `sampled` too, has eval.temperature.
    Raises UserError.
    """
    name = f"engine.factory {config.engine.factory}"
    is_greedy = (
        not generator.capabilities.sampling_per_request and generator.capabilities.temperature == 0
    )
    if is_greedy and sampled and not trains:
        raise UserError(
            f"{name} decodes greedily and the sampled scores have eval.temperature "
            f"{config.eval.temperature}: add --sampled False, or use an engine that samples each "
            "request by itself"
        )
    temperatures = {"the temperature of greedy evaluations": 0.0}
    if sampled:
        temperatures["eval.temperature"] = config.eval.temperature
    if trains:
        temperatures["sampling.temperature"] = config.sampling.temperature
    check_temperatures(generator.capabilities, temperatures, name)


def open_adapter(config: Config, decoder: Decoder) -> Adapter | None:
    """Return the adapter that training goes on from, if the configuration names one.

    Raises UserError where it does not have the rank that is trained.
    """
    if config.adapter is None:
        return None
    trainer = config.trainer
    adapter = read_adapter(decoder, local_folder(config.adapter))
    rank, alpha = adapter.rank_and_alpha()
    if rank != trainer.lora_rank or not math.isclose(alpha, trainer.lora_alpha, rel_tol=1e-4):
        raise UserError(
            f"{config.adapter} has rank {rank} and alpha {alpha:g}, and trainer.lora_rank is "
            f"{trainer.lora_rank}, trainer.lora_alpha {trainer.lora_alpha:g}: give "
            f"--trainer.lora-rank {rank} --trainer.lora-alpha {alpha:g}"
        )
    return adapter


def use_weights(
    generator: PolicyGenerator, decoder: Decoder, weights: nnx.State, storage: Storage, version: int
) -> None:
    """Let the engine sample from these weights of a model like `decoder`.

    Returns when they are there. They are copied, because training reuses its buffers.
    """
    stored_weights = engine_weights(weights, decoder.config, storage, decoder.dtype)
    generator.set_weights(stored_weights, version)
