"""EviPath's teachers, and what they need to write trajectories.

A teacher is a language model: the policy that the run starts with, a second checkpoint, or the
model behind an endpoint. All of them serve all modes. The script is no language model: it replays
the demonstrations that the warm-up shows.

A policy that is trained from scratch has read no text about tasks, so it cannot follow a prompt
that it never saw. Its warm-up shows it the teacher's prompts too (`lessons`), beside the agent's
own: the script writes both. Such a policy stands in for the paper's Llama, which follows either
prompt, in the abductive as in the deductive mode. It is asked for no plan: the thoughts of the
demonstrations hold none.
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
from mujica_jax.runs.endpoint import Endpoint, open_endpoint
from mujica_jax.runs.policies import Checkpoint, SavedPolicy, find_policy, read_object
from mujica_jax.runs.run import Run, method_of
from mujica_jax.runtime import distributed
from mujica_jax.tasks.checks import from_scratch
from mujica_jax.tasks.task import ParagraphTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Author:
    """A synthesizer with the teacher that writes for it."""

    synthesizer: Synthesizer
    # Episodes at a time; None: as many as the run's engine has slots.
    concurrency: int | None = None
    generator: PolicyGenerator | None = None  # of a second checkpoint

    def begin_shard(self) -> None:
        """Empty the teacher's cache.

        So a shard is a function of its attempts and the teacher alone.
        """
        if self.generator is not None:
            self.generator.reset_cache()


def find_author(run: Run) -> Callable[[], Author]:
    """Find the teacher, and return what opens it.

    Raises UserError for what is wrong with a teacher, before anything is learnt.
    """
    config = method_of(run, EviPathConfig)
    if config.teacher == "scripted":
        return functools.partial(_script, run)
    if config.teacher == "policy":
        return _find_own_policy(run)
    if config.teacher == "remote":
        return functools.partial(_endpoint, run, open_endpoint(config.remote, run.store.root))
    assert config.teacher_checkpoint is not None, (
        "the configuration was checked to name a checkpoint"
    )
    return _find_checkpoint(run, config.teacher_checkpoint)


def _find_own_policy(run: Run) -> Callable[[], Author]:
    """Check that the run's own policy has room for the teacher's prompts."""
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
    """Find a second checkpoint, and check that it can teach."""
    policy = distributed.primary_first(
        "the teacher", lambda: find_policy(name, policy=None, adapter=None)
    )
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
    """Return conversations with EviPath's teacher that a model from scratch learns in its warm-up.

    The script plays the demonstrations once more, this time as the teacher in abductive mode.
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
    """Open the script as teacher."""
    return Author(synthesizer=_synthesizer(run, _scripted_teacher(run), _agent(run).prompt))


def _own_policy(run: Run, trained: PromptMode | None) -> Author:
    """Open the policy that the run starts with as teacher."""
    limit = _agent(run).max_trajectory_tokens
    teacher = _model_teacher(run, None, run.tokenizer, trained, limit)
    return Author(synthesizer=_synthesizer(run, teacher, _prompt(run, trained)))


def _endpoint(run: Run, endpoint: Endpoint) -> Author:
    """Open the model behind an endpoint as teacher."""
    teacher = Teacher(policy=EnginePolicy(endpoint.generator), tokenizer=endpoint.tokenizer)
    synthesizer = _synthesizer(run, teacher, _prompt(run, trained=None))
    return Author(
        synthesizer=synthesizer, concurrency=method_of(run, EviPathConfig).remote.concurrency
    )


def _checkpoint(run: Run, policy: SavedPolicy, trained: PromptMode | None) -> Author:
    """Load a second checkpoint as teacher."""
    run.generator.release_weights()  # the teacher takes their place
    limit = _checkpoint_limit(run)
    agent = dataclasses.replace(_agent(run), max_trajectory_tokens=limit)
    config = dataclasses.replace(run.config, agent=agent)
    checkpoint = Checkpoint(**vars(policy), out=run.store.root)
    tokenizer, generator = checkpoint.open(config, context_setting="method.teacher_max_tokens")
    teacher = _model_teacher(run, EnginePolicy(generator), tokenizer, trained, limit)
    return Author(
        synthesizer=_synthesizer(run, teacher, _prompt(run, trained)),
        generator=cast(PolicyGenerator, generator),  # a checkpoint has an engine on this machine
    )


def _checkpoint_limit(run: Run) -> int:
    """Return how many tokens a conversation with a second checkpoint may hold."""
    config = method_of(run, EviPathConfig)
    return config.teacher_max_tokens or _agent(run).max_trajectory_tokens


def _model_teacher(
    run: Run, policy: Policy | None, tokenizer: Tokenizer, trained: PromptMode | None, limit: int
) -> Teacher:
    """Return a teacher on this machine.

    A teacher that reads brief prompts was never shown a request for a plan.
    """
    return Teacher(
        policy=policy,
        tokenizer=tokenizer,
        plans=_prompt(run, trained) != "brief",
        max_tokens=limit,
    )


def _check_room(run: Run, tokenizer: Tokenizer, prompt: PromptMode, limit: int, field: str) -> None:
    """Refuse a teacher whose prompt leaves no room for what it reads and writes.

    This is checked before anything is learnt.
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
                f"the teacher's prompt as {role} ({prompt}) has {prompt_tokens} tokens, needs "
                f"{needed_tokens} "
                "with what agent.max_turn_tokens and agent.max_observation_tokens allow, and "
                f"{field} is {limit}: raise it, evidence comes on top, or choose a shorter "
                "--method.teacher-prompt"
            )


def _synthesizer(
    run: Run, teacher: Teacher, prompt: PromptMode, *, mode: str | None = None
) -> Synthesizer:
    """Return what writes trajectories with a teacher (`mode` None: in the configured mode)."""
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
    """Return the paragraphs of a question that brings none of its own."""
    del question
    return ()


def _prompt(run: Run, trained: PromptMode | None) -> PromptMode:
    """Return the mode of prompts that the teacher reads.

    `trained` is the mode that it was trained on, if any.
    """
    config = method_of(run, EviPathConfig)
    if config.teacher_prompt != "auto":
        return config.teacher_prompt
    return trained or "few_shot"


def _script_policy(run: Run) -> ScriptedPolicy:
    return ScriptedPolicy(
        run.tokenizer, seed=run.config.seed, contract=contract_of(run.config.agent)
    )


def _scripted_teacher(run: Run) -> Teacher:
    return Teacher(policy=_script_policy(run), tokenizer=run.tokenizer, plans=False)


def _agent(run: Run) -> MujicaConfig:
    assert isinstance(run.config.agent, MujicaConfig), (
        "the configuration was checked to play mujica"
    )
    return run.config.agent


def _trained_agent(policy: SavedPolicy) -> dict:
    """Return the agent's section of the run that made a policy."""
    assert policy.run is not None, "only a policy of a run was trained as an agent"
    return read_object(policy.run / "config.json")["config"]["agent"]


def _check_trained_agent(run: Run, policy: SavedPolicy) -> None:
    """Refuse a teacher that was trained as another agent.

    Prints in what else the agent of its run differs.
    """
    if policy.run is None:
        return
    trained_kind = _trained_agent(policy)["kind"]
    if trained_kind != _agent(run).kind:
        raise UserError(
            f"method.teacher_checkpoint {policy.run} was trained as {trained_kind}, and a teacher "
            f"of EviPath plays {_agent(run).kind}: choose another --method.teacher-checkpoint"
        )
    differences = policy.trained_otherwise(_agent(run))
    if differences:
        run.progress.line(f"the teacher was trained under other settings: {'; '.join(differences)}")
