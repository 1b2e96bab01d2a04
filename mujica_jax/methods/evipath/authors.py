"""Find and open EviPath's teacher, the model that writes trajectories.

A teacher is usually a language model: the policy that the run starts with, a second checkpoint, or
a model behind an endpoint. Each of these can be used in all modes. The teacher can also be a
script, which replays the warm-up's demonstrations.

A policy that is trained from scratch cannot follow a prompt that it has never seen. Its warm-up
therefore also contains conversations with the teacher's prompts, which the script writes
(`lessons`). Such a policy takes the place of the paper's Llama model, in the abductive and in the
deductive mode. It is not asked for a plan, because the demonstrations contain none.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

from mujica_jax.agents.agent import Attempt, EnginePolicy, Policy
from mujica_jax.agents.mujica import PLANNER, WORKER, contract_of
from mujica_jax.agents.protocol import PromptMode
from mujica_jax.agents.synthesis_prompts import planner_addition, worker_addition
from mujica_jax.config.checks import is_taught
from mujica_jax.config.schema import EviPathConfig, MujicaConfig
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.errors import UserError
from mujica_jax.inference.generator import PolicyGenerator
from mujica_jax.methods.evipath.synthesis import ParagraphsOf, Synthesis, Synthesizer
from mujica_jax.methods.evipath.teacher import Teacher
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Conversation, GoldPassage, Question
from mujica_jax.retrieval.embedding.similarity import find_similarity
from mujica_jax.runs.commits import record_commits
from mujica_jax.runs.endpoint import Endpoint, open_endpoint
from mujica_jax.runs.policies import Checkpoint, SavedPolicy, find_policy, read_object
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runtime import distributed
from mujica_jax.tasks.checks import from_scratch
from mujica_jax.tasks.task import ParagraphTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Author:
    """A synthesizer together with its teacher.

    Attributes:
        synthesizer: Writes trajectories with the teacher.
        concurrency: Number of episodes at the same time. None: as many as the run's engine decodes.
        generator: The generator of a second checkpoint; None for other teachers.
    """

    synthesizer: Synthesizer
    concurrency: int | None = None
    generator: PolicyGenerator | None = None

    def begin_shard(self) -> None:
        """Clear the teacher's cache.

        A shard then depends only on its attempts and on the teacher.
        """
        if self.generator is not None:
            self.generator.reset_cache()


def find_author(run: Run) -> Callable[[], Author]:
    """Find and check the configured teacher, and return a function that opens it.

    Raises UserError if the teacher cannot be used. This happens before any training.
    """
    config = method_of(run, EviPathConfig)
    if config.teacher == "scripted":
        return functools.partial(_script, run)
    if config.teacher == "policy":
        return _find_own_policy(run)
    if config.teacher == "remote":
        return functools.partial(_endpoint, run, open_endpoint(config.remote, run.store.root))
    assert config.teacher_checkpoint is not None, (
        "config.checks makes sure that a checkpoint is named"
    )
    return _find_checkpoint(run, config.teacher_checkpoint)


def _find_own_policy(run: Run) -> Callable[[], Author]:
    """Check that the run's own policy has room for the teacher's prompts.

    Returns a function that opens it as the teacher.
    """
    agent = _agent(run)
    trained_prompt = agent.prompt if run.config.warmup.steps else None
    _check_room(
        run,
        run.tokenizer,
        _prompt(run, trained_prompt),
        limit=agent.max_trajectory_tokens,
        field="agent.max_trajectory_tokens",
    )
    return functools.partial(_own_policy, run, trained_prompt)


def _find_checkpoint(run: Run, name: str) -> Callable[[], Author]:
    """Find a second checkpoint, check that it can teach, and return a function that opens it."""
    policy = distributed.primary_first(
        "the teacher",
        lambda: find_policy(name, policy=None, adapter=None, setting="--method.teacher-checkpoint"),
    )
    record_commits(run.store)
    _check_trained_agent(run, policy)
    trained_prompt = None
    if policy.run is not None:
        trained_prompt = _trained_agent(policy).get("prompt")
    tokenizer = distributed.primary_first(
        "the teacher's tokenizer", lambda: Tokenizer.load(policy.model)
    )
    _check_room(
        run,
        tokenizer,
        _prompt(run, trained_prompt),
        limit=_checkpoint_limit(run),
        field="method.teacher_max_tokens",
    )
    return functools.partial(_checkpoint, run, policy, trained_prompt)


def lessons(run: Run) -> list[Conversation]:
    """Return conversations with the teacher's prompts, for the warm-up of a model from scratch.

    The script plays the demonstrations once more, this time as the teacher in the abductive mode.
    Other models need no lessons, and the result is empty.
    """
    if not is_taught(run.config):
        return []
    rows: list[Conversation] = []
    synthesizer = _synthesizer(
        run, _scripted_teacher(run), _prompt(run, trained="brief"), mode="abductive"
    )

    async def play() -> None:
        for question, environment in from_scratch(run.task).demonstrations():
            run.preemption.check()
            attempt = Attempt(question=question, number=0, seed=run.config.seed, temperature=0.0)
            rows.extend(await synthesizer.lessons(attempt, environment, _script_policy(run)))

    asyncio.run(play())
    return rows


def _script(run: Run) -> Author:
    """Open the script as the teacher."""
    return Author(synthesizer=_synthesizer(run, _scripted_teacher(run), _agent(run).prompt))


def _own_policy(run: Run, trained: PromptMode | None) -> Author:
    """Open the policy that the run starts with as the teacher."""
    limit = _agent(run).max_trajectory_tokens
    teacher = _model_teacher(run, None, run.tokenizer, trained, limit)
    return Author(synthesizer=_synthesizer(run, teacher, _prompt(run, trained)))


def _endpoint(run: Run, endpoint: Endpoint) -> Author:
    """Open the model behind an endpoint as the teacher."""
    teacher = Teacher(policy=EnginePolicy(endpoint.generator), tokenizer=endpoint.tokenizer)
    synthesizer = _synthesizer(run, teacher, _prompt(run, trained=None))
    return Author(
        synthesizer=synthesizer, concurrency=method_of(run, EviPathConfig).remote.concurrency
    )


def _checkpoint(run: Run, policy: SavedPolicy, trained: PromptMode | None) -> Author:
    """Load a second checkpoint as the teacher."""
    # Make room for the teacher's weights.
    run.generator.release_weights()
    limit = _checkpoint_limit(run)
    agent = dataclasses.replace(_agent(run), max_trajectory_tokens=limit)
    config = dataclasses.replace(run.config, agent=agent)
    checkpoint = Checkpoint(**vars(policy), out=run.store.root)
    tokenizer, generator = checkpoint.open(config, context_setting="method.teacher_max_tokens")
    teacher = _model_teacher(run, EnginePolicy(generator), tokenizer, trained, limit)
    return Author(
        synthesizer=_synthesizer(run, teacher, _prompt(run, trained)),
        # A checkpoint is decoded by an engine on this machine.
        generator=cast(PolicyGenerator, generator),
    )


def _checkpoint_limit(run: Run) -> int:
    """Return the largest number of tokens of a conversation with a second checkpoint."""
    config = method_of(run, EviPathConfig)
    return config.teacher_max_tokens or _agent(run).max_trajectory_tokens


def _model_teacher(
    run: Run, policy: Policy | None, tokenizer: Tokenizer, trained: PromptMode | None, limit: int
) -> Teacher:
    """Return a teacher whose model runs on this machine.

    If it reads brief prompts, it is not asked for plans, because its training contained none.
    """
    return Teacher(
        policy=policy,
        tokenizer=tokenizer,
        plans=_prompt(run, trained) != "brief",
        max_tokens=limit,
    )


def _check_room(run: Run, tokenizer: Tokenizer, prompt: PromptMode, limit: int, field: str) -> None:
    """Check that the teacher's prompt leaves room for one turn and one search result.

    This is checked before any training. `limit` is the largest number of tokens of a conversation,
    and `field` the setting that holds it. Raises UserError.
    """
    agent = _agent(run)
    kind = run.task.environment_kind
    for role in (PLANNER, WORKER):
        opening = contract_of(agent).opening(role, kind, prompt, parallel=agent.parallel)
        system = opening.system
        if method_of(run, EviPathConfig).mode != "deductive":
            system += planner_addition(prompt) if role == PLANNER else worker_addition(prompt)
        prompt_tokens = len(tokenizer.open_conversation(system, "", opening.examples))
        needed_tokens = prompt_tokens + agent.max_turn_tokens
        if role == WORKER:
            needed_tokens += agent.max_observation_tokens
        if needed_tokens > limit:
            raise UserError(
                f"the teacher's prompt as {role} ({prompt}) has {prompt_tokens} tokens. With one "
                "turn (agent.max_turn_tokens) and, as a worker, one search result "
                f"(agent.max_observation_tokens), it needs {needed_tokens} tokens, and more for "
                f"the evidence. But {field} is {limit}: raise {field}, or choose a shorter "
                "--method.teacher-prompt"
            )


def _synthesizer(
    run: Run, teacher: Teacher, prompt: PromptMode, *, mode: str | None = None
) -> Synthesizer:
    """Return a synthesizer that writes trajectories with this teacher.

    `mode` is the mode of EviPath; None means the configured one.
    """
    config = method_of(run, EviPathConfig)
    paragraphs: ParagraphsOf = _no_paragraphs
    if isinstance(run.task, ParagraphTask) and config.distractors != "retrieved":
        paragraphs = run.task.own_paragraphs
    return Synthesizer(
        Synthesis(
            method=config if mode is None else dataclasses.replace(config, mode=mode),
            agent=_agent(run),
            tokenizer=run.tokenizer,
            teacher=teacher,
            similarity=find_similarity(config.embedder),
            prompt=prompt,
            rule=run.task.rule,
            paragraphs=paragraphs,
        )
    )


def _no_paragraphs(question: Question) -> Sequence[GoldPassage]:
    """Return no paragraphs. This is used if questions bring none, or if they are not to be used."""
    del question
    return ()


def _prompt(run: Run, trained: PromptMode | None) -> PromptMode:
    """Return the mode of the prompts that the teacher reads.

    `trained` is the mode of the prompts that it was trained with; None if it was not trained as an
    agent.
    """
    config = method_of(run, EviPathConfig)
    if config.teacher_prompt != "auto":
        return config.teacher_prompt
    return trained or "few_shot"


def _script_policy(run: Run) -> ScriptedPolicy:
    """Return the script that plays demonstrations, without deliberate mistakes."""
    return ScriptedPolicy(
        run.tokenizer, seed=run.config.seed, contract=contract_of(run.config.agent)
    )


def _scripted_teacher(run: Run) -> Teacher:
    """Return the script as a teacher."""
    return Teacher(policy=_script_policy(run), tokenizer=run.tokenizer, plans=False)


def _agent(run: Run) -> MujicaConfig:
    """Return the configuration of the run's agent."""
    assert isinstance(run.config.agent, MujicaConfig), (
        "config.checks makes sure that EviPath trains the agent mujica"
    )
    return run.config.agent


def _trained_agent(policy: SavedPolicy) -> dict:
    """Return the configuration of the agent that a policy was trained as."""
    assert policy.run is not None, "only the policies of runs were trained as agents"
    return read_object(policy.run / "config.json")["config"]["agent"]


def _check_trained_agent(run: Run, policy: SavedPolicy) -> None:
    """Check that the teacher was trained as the same kind of agent. Raises UserError otherwise.

    If other settings of the agent differ, a line on the console says which.
    """
    if policy.run is None:
        return
    trained_kind = _trained_agent(policy)["kind"]
    if trained_kind != _agent(run).kind:
        raise UserError(
            f"method.teacher_checkpoint {policy.run} was trained as the agent {trained_kind}, but "
            f"a teacher of EviPath must be the agent {_agent(run).kind}: choose another "
            "--method.teacher-checkpoint"
        )
    differences = policy.trained_otherwise(_agent(run))
    if differences:
        run.progress.line(f"the teacher was trained with other settings: {'; '.join(differences)}")
