"""Which agent `eval` plays where a configuration stands beside a policy that a run has trained."""

import dataclasses
from pathlib import Path

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.agents import DecexConfig, SingleConfig
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from mujica_jax.trajectories.store import open_run
from tests.helpers.paths import HELPERS

SMOKE = str(HELPERS / "smoke_config.py")
NQ = ["nq_qwen3_4b_v5e", "--task.data-dir", "DATA"]  # its agent is single
DECEX = DecexConfig(
    prompt="zero_shot",
    max_iterations=3,
    max_turn_tokens=128,
    max_trajectory_tokens=1024,
    max_observation_tokens=512,
)


@pytest.fixture
def run(tmp_path) -> str:
    """Return the directory of a run whose policy was trained as decex."""
    trained = dataclasses.replace(load_config("tiny_world_decex"), agent=DECEX)
    open_run(tmp_path / "run", dataclasses.asdict(trained))
    return str(tmp_path / "run")


def played(*words: str) -> Config:
    return evaluation.command_line(words)[1]


def test_a_policy_plays_the_agent_that_it_was_trained_as_on_the_task_of_a_configuration(run):
    config = played(*NQ, "--checkpoint", run)
    assert config.agent == DECEX
    assert config.task.kind == "nq"
    assert evaluation.other_agent([*NQ, "--checkpoint", run]) == (
        "the policy plays the agent decex, as in its training; nq_qwen3_4b_v5e names single, and "
        "--agent.kind single selects it"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["nq_qwen3_4b_v5e"],
        ["nq_qwen3_4b_v5e", "--task.kind", "popqa"],
        ["nq_qwen3_4b_v5e", "--task.kind", "bamboogle"],
        ["ambigqa_v5e"],
    ],
)
def test_the_documented_command_plays_decex_on_the_other_sets_of_its_paper(run, words):
    """In docs/guides/evaluation.md another method has trained the policies (`--checkpoint RUN`)."""
    assert load_config(words[0]).agent.kind != "decex"
    config = played(*words, "--checkpoint", run)
    assert config.agent == DECEX
    assert config.task.kind == (words[2] if len(words) > 1 else load_config(words[0]).task.kind)


def test_further_agents_are_compared_with_the_agent_that_it_was_trained_as(run):
    options, config = evaluation.command_line(
        [*NQ, "--checkpoint", run, "--agents", "direct", "rag"]
    )
    kinds = [evaluated.agent.kind for evaluated in evaluation.all_configs(options, config)]
    assert kinds == ["decex", "direct", "rag"]


def test_flags_change_the_agent_that_it_was_trained_as(run):
    words = [*NQ, "--checkpoint", run, "--agent.max-iterations", "2"]
    assert played(*words).agent == dataclasses.replace(DECEX, max_iterations=2)


def test_a_kind_that_a_flag_names_is_the_configurations_agent(run):
    words = [*NQ, "--checkpoint", run, "--agent.kind", "single"]
    agent = played(*words).agent
    assert isinstance(agent, SingleConfig)
    assert agent == load_config("nq_qwen3_4b_v5e").agent
    assert evaluation.other_agent(words) is None


def test_a_flag_of_the_configurations_agent_is_refused_with_the_way_to_it(run):
    with pytest.raises(
        UserError, match=r"agent.kind is decex: leave it out, or add --agent.kind single"
    ):
        played(*NQ, "--checkpoint", run, "--agent.max-searches", "2")


def test_other_limits_of_the_same_agent_are_the_runs_and_are_said(tmp_path):
    trained = load_config(SMOKE)
    agent = dataclasses.replace(trained.agent, max_turn_tokens=77)
    open_run(tmp_path / "run", dataclasses.asdict(dataclasses.replace(trained, agent=agent)))
    words = [SMOKE, "--checkpoint", str(tmp_path / "run")]
    assert played(*words).agent == agent
    assert evaluation.other_agent(words) == (
        f"the policy plays with the settings of its training, not with those of {SMOKE}: "
        f"agent.max_turn_tokens 77, not {trained.agent.max_turn_tokens}; flags --agent.* change "
        "them"
    )


def test_a_model_inside_a_run_and_an_adapter_belong_to_their_run(run, tmp_path):
    model = Path(run) / "policies" / "000001" / "model"
    model.mkdir(parents=True)
    assert played(*NQ, "--checkpoint", str(model)).agent == DECEX
    open_run(
        tmp_path / "adapter",
        dataclasses.asdict(dataclasses.replace(load_config(SMOKE), agent=DECEX)),
    )
    words = [*NQ, "--init", str(tmp_path), "--adapter", str(tmp_path / "adapter")]
    assert played(*words).agent == DECEX
    assert evaluation.other_agent(words) is not None


def test_a_checkpoint_of_no_run_plays_the_configurations_agent(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    words = [*NQ, "--checkpoint", str(tmp_path)]
    assert played(*words).agent == load_config("nq_qwen3_4b_v5e").agent
    assert evaluation.other_agent(words) is None


def test_a_run_without_a_configuration_beside_it_says_nothing(run):
    assert evaluation.other_agent(["--checkpoint", run]) is None
