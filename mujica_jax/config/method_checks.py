"""Check that a method's section agrees with the rest of the configuration. Called by
`checks.check`."""

from mujica_jax.config.agents import DecexConfig, MujicaConfig, SingleConfig
from mujica_jax.config.fields import check_remote, require
from mujica_jax.config.methods import (
    DecexTreeConfig,
    EviPathConfig,
    MygoConfig,
    PolicyGradientConfig,
)
from mujica_jax.config.rewards import StagedRewardConfig, needs_judge
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError


def check_method(config: Config) -> None:
    """Check the section of the method, and those that only some methods use. Raises UserError."""
    method = config.method
    is_mygo = isinstance(method, MygoConfig)
    if config.sampling.workers == "external" and not is_mygo:
        raise UserError(
            f"sampling.workers is external and method.kind {method.kind}: workers sample for mygo "
            "alone, so give --sampling.workers internal"
        )

    # The control learns the demonstrations of the warm-up, or those that a script plays for MyGO.
    has_demonstrations = config.warmup.steps or (is_mygo and has_script(config))
    if config.eval.control and not has_demonstrations:
        raise UserError(
            "eval.control is True and warmup.steps 0: the control learns the warm-up's "
            "demonstrations, so give warmup.steps, or --eval.control False"
        )

    match method:
        case MygoConfig():
            _check_mygo(config, method)
        case PolicyGradientConfig():
            _check_policy_gradient(config, method)
        case EviPathConfig():
            _check_evipath(config, method)
        case DecexTreeConfig():
            _check_trees(config, method)

    if config.reward == "staged":
        _check_staged(config.staged)
    check_remote(config.judge, "judge")
    _check_judge(config)


def _check_staged(staged: StagedRewardConfig) -> None:
    """Check that something can be earned, and that no stage is switched off where there are no
    stages."""
    if not (staged.answer or staged.format):
        raise UserError(
            "staged.answer and staged.format are both False, and nothing can be earned: leave one "
            "on"
        )
    if staged.unified and not (staged.stage_one and staged.stage_two):
        raise UserError(
            f"staged.unified is True and staged.stage_one {staged.stage_one}, staged.stage_two "
            f"{staged.stage_two}: a reward without stages has none to leave out, so set both to "
            "True or staged.unified to False"
        )


def _check_judge(config: Config) -> None:
    """Check that a reward which asks a judge has one, and a method that can wait for it."""
    if not needs_judge(config.reward, config.staged):
        return
    correctness = ""
    if config.reward == "staged":
        correctness = f" with staged.correctness {config.staged.correctness}"
    if config.judge.base_url is None:
        raise UserError(
            f"reward is {config.reward}{correctness}, which asks a judge, and judge.base_url is "
            "None: give --judge.base-url, --judge.model, --judge.mode and --judge.tokenizer, or "
            "another --reward"
        )
    if isinstance(config.method, DecexTreeConfig):
        raise UserError(
            "method.kind is decex, whose trees are scored by exact match or F1, and reward is "
            f"{config.reward}{correctness}, which asks a judge: give --reward em or f1"
        )


def check_judge_is_asked(config: Config) -> None:
    """Check that the reward of a run that trains asks the judge that is described. (`eval` asks it
    for scores too.)"""
    if config.judge.base_url is not None and not needs_judge(config.reward, config.staged):
        raise UserError(
            f"judge.base_url is {config.judge.base_url} and reward {config.reward} asks no judge: "
            "add --reward judge, or --reward staged --staged.correctness judge, or leave the judge "
            "out"
        )


def check_log_probabilities(config: Config) -> None:
    """Check that a method which learns from log-probabilities samples by an engine that gives them.

    Called for runs that train: evaluations need none."""
    if isinstance(config.method, PolicyGradientConfig) and config.engine.kind == "jetstream":
        raise UserError(
            f"method.kind is {config.method.kind}, which learns from the log-probability of each "
            "sampled token, and engine.kind is jetstream, whose interface gives none: add "
            "--engine.kind native"
        )


def has_script(config: Config) -> bool:
    """Return whether a script plays the demonstrations of the agent."""
    return config.warmup.source == "scripted" and isinstance(
        config.agent, MujicaConfig | SingleConfig | DecexConfig
    )


def _check_policy_gradient(config: Config, method: PolicyGradientConfig) -> None:
    """Check the length punishment, the rows of an update, and that policy 0 stays if it is read."""
    is_cache_valid = 0 < method.overlong_cache_tokens <= method.overlong_tokens
    if method.overlong_tokens and not is_cache_valid:
        raise UserError(
            f"method.overlong_cache_tokens is {method.overlong_cache_tokens} and "
            f"method.overlong_tokens {method.overlong_tokens}: give from 1 to that many, or "
            "--method.overlong-tokens 0"
        )

    trainer = config.trainer
    parts = trainer.data * trainer.fsdp * trainer.accumulation_steps
    if method.rows_per_update % parts:
        raise UserError(
            f"method.rows_per_update {method.rows_per_update} cannot be split over data x fsdp x "
            f"accumulation_steps = {parts}: use a multiple of {parts}, or 0 for "
            "trainer.rows_per_step"
        )

    if method.kl_coefficient and config.keep_policies:
        raise UserError(
            f"method.kl_coefficient is {method.kl_coefficient}, which measures the distance to "
            f"policy 0, and keep_policies {config.keep_policies} removes it: give --keep-policies "
            "0, or --method.kl-coefficient 0"
        )


def _check_mygo(config: Config, method: MygoConfig) -> None:
    """Check that MyGO keeps the policies that sample, and that its numbers can be reached."""
    # How many policies a schedule needs: the newest one samples, the one before it, or the first.
    needed_policies = 1
    if method.schedule == "asynchronous":
        needed_policies = 2
    elif method.schedule == "offline":
        needed_policies = method.rounds + 1
    if 0 < config.keep_policies < needed_policies:
        raise UserError(
            f"keep_policies is {config.keep_policies} and method.schedule {method.schedule} "
            f"samples by older policies: keep at least {needed_policies}, or all with 0"
        )

    if method.keep_per_question > method.max_attempts:
        raise UserError(
            f"method.keep_per_question is {method.keep_per_question} and method.max_attempts "
            f"{method.max_attempts}: no question has more trajectories than attempts, so lower the "
            "first or raise the second"
        )

    # As in rewards/, which stands above this folder.
    best_reward = 1.0
    if config.reward == "staged":
        best_reward = float(config.staged.answer) + float(config.staged.format)
    if not 0 <= method.initial_threshold <= best_reward:
        raise UserError(
            f"method.initial_threshold is {method.initial_threshold} and the best reward is "
            f"{best_reward:g}: give a K from 0 to {best_reward:g}"
        )


def _check_evipath(config: Config, method: EviPathConfig) -> None:
    """Check that the teacher can write what it is asked for, and that the agent is the one that it
    plays."""
    if not isinstance(config.agent, MujicaConfig):
        raise UserError(
            "method evipath writes for planner and workers, and agent.kind is "
            f"{config.agent.kind}: choose mujica"
        )
    require(config, "method.threshold", lambda value: 0 <= value <= 1, "between 0 and 1")
    _check_teacher(method)
    check_remote(method.remote, "method.remote")

    if method.distractors == "retrieved" and method.mode != "abductive":
        raise UserError(
            f"method.distractors is retrieved and method.mode {method.mode}, where the worker "
            "reads what searches find anyway: leave --method.distractors out, or choose abductive"
        )
    questions = config.sampling.questions_per_round
    if method.trajectories > questions:
        raise UserError(
            f"method.trajectories is {method.trajectories} and sampling.questions_per_round "
            f"{questions}: a question has one trajectory, so lower the first or raise the second"
        )

    is_from_scratch = method.teacher == "policy" and config.init is None
    if is_from_scratch and method.mode != "deductive" and not is_taught(config):
        raise UserError(
            f"method.mode is {method.mode}, and warmup.steps {config.warmup.steps}, warmup.source "
            f"{config.warmup.source}: a policy from scratch reads the teacher's prompts where a "
            "scripted warm-up shows them, so give --warmup.steps, choose deductive, or name a "
            "checkpoint with --init"
        )
    if is_from_scratch and method.mode == "no_evidence":
        raise UserError(
            "method.mode is no_evidence, and the warm-up shows a policy from scratch the prompts "
            "with evidence alone: choose abductive or deductive, or name a checkpoint with --init"
        )


def _check_teacher(method: EviPathConfig) -> None:
    """Check that exactly the teacher that was chosen is described."""
    if method.teacher == "remote" and method.remote.base_url is None:
        raise UserError(
            "method.teacher is remote and there is no endpoint: give --method.remote.base-url, or "
            "another teacher"
        )
    if method.teacher != "remote" and method.remote.base_url is not None:
        raise UserError(
            f"method.teacher is {method.teacher} and method.remote.base-url "
            f"{method.remote.base_url}: add --method.teacher remote, or leave the endpoint out"
        )
    if method.teacher == "checkpoint" and method.teacher_checkpoint is None:
        raise UserError(
            "method.teacher is checkpoint and there is none: give --method.teacher-checkpoint, or "
            "another teacher"
        )
    if method.teacher != "checkpoint" and method.teacher_checkpoint is not None:
        raise UserError(
            f"method.teacher is {method.teacher} and method.teacher_checkpoint "
            f"{method.teacher_checkpoint}: add --method.teacher checkpoint, or leave the "
            "checkpoint out"
        )
    if method.teacher != "checkpoint" and method.teacher_max_tokens:
        raise UserError(
            f"method.teacher_max_tokens is {method.teacher_max_tokens} and method.teacher "
            f"{method.teacher}: it is the limit of a second checkpoint, so add --method.teacher "
            "checkpoint, or leave it out"
        )

    if method.teacher != "scripted":
        return
    if method.mode != "abductive":
        raise UserError(
            f"method.mode is {method.mode}, and the scripted teacher is no language model: it "
            "replays demonstrations from the gold evidence, so add --method.teacher policy, or "
            "choose abductive"
        )
    if method.teacher_prompt != "auto":
        raise UserError(
            f"method.teacher_prompt is {method.teacher_prompt}, and the scripted teacher reads no "
            "prompt: leave it out, or choose another teacher"
        )


def is_taught(config: Config) -> bool:
    """Return whether the warm-up shows a model from scratch the prompts of EviPath's teacher.

    It does so in every mode, so that modes that are compared start with the same policy and have
    the same teacher."""
    method = config.method
    is_own_teacher = isinstance(method, EviPathConfig) and method.teacher == "policy"
    return is_own_teacher and config.init is None and config.warmup.steps > 0 and has_script(config)


def _check_trees(config: Config, method: DecexTreeConfig) -> None:
    """Check that the settings of DecEx-RAG's trees are consistent."""
    if not isinstance(config.agent, DecexConfig):
        raise UserError(
            "method.kind is decex, whose trees branch at decex's decisions, and agent.kind is "
            f"{config.agent.kind}: add --agent.kind decex"
        )
    if method.expansion == "full" and not method.budget_tokens:
        raise UserError(
            f"method.expansion is full, where each of {config.agent.max_iterations} layers has "
            f"{2 * method.branches**2} times the states of the one before, and "
            "method.budget_tokens is 0: give --method.budget-tokens, as 20000"
        )
    check_remote(method.remote, "method.remote")
    if not (method.sft or _learns_pairs(method)):
        raise UserError(
            f"method.sft is False, method.dpo {method.dpo}, method.decision_pairs "
            f"{method.decision_pairs} and method.execution_pairs {method.execution_pairs}: nothing "
            "is learnt from the trees, so set one to True"
        )


def check_pairs(config: Config) -> None:
    """Check that a row holds both conversations of a preference pair, for a run that begins. Raises
    UserError."""
    method = config.method
    if not isinstance(method, DecexTreeConfig) or not _learns_pairs(method):
        return
    max_tokens = config.agent.max_trajectory_tokens
    row_tokens = config.trainer.row_tokens
    if row_tokens < 2 * max_tokens:
        raise UserError(
            f"trainer.row_tokens is {row_tokens} and agent.max_trajectory_tokens {max_tokens}: a "
            "row holds both conversations of a preference pair, so give --trainer.row-tokens "
            f"{2 * max_tokens}, --agent.max-trajectory-tokens {row_tokens // 2}, or --method.dpo "
            "False"
        )


def _learns_pairs(method: DecexTreeConfig) -> bool:
    """Return whether DPO learns any pair of the trees."""
    return method.dpo and (method.decision_pairs or method.execution_pairs)
