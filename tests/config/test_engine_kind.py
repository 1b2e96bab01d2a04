"""`engine.kind` and `engine.factory`: which engine generates, and what is refused before anything
is loaded.
"""

import dataclasses

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import train
from mujica_jax.config.checks import check
from mujica_jax.config.kinds import of_kind
from mujica_jax.errors import UserError
from tests.helpers.configurations import CONFIGS
from tests.helpers.extras import needs

# Configurations for pods: those of MyGO and EviPath sample through JetStream's interface.
FOR_PODS = {name: config for name, config in CONFIGS.items() if name.endswith("_v5e")}


def test_pods_sample_through_jetstream_where_the_method_needs_no_log_probabilities():
    kinds = {
        name: config.engine.kind
        for name, config in FOR_PODS.items()
        if config.agent.kind == "mujica"
    }
    needing = {"two_wiki_kg_grpo_v5e"}
    assert {name for name, kind in kinds.items() if kind == "native"} == needing
    for name in ("two_wiki_text_dapo_staged_qwen3_8b_v5e", "two_wiki_text_decex_v5e"):
        assert CONFIGS[name].engine.kind == "native"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["tiny_world_grpo", "--engine.kind", "jetstream"],
            "method.kind grpo needs the log-probability of each sampled token, but engine.kind "
            "jetstream returns no log-probabilities: add --engine.kind native",
        ),
        (
            ["tiny_world_dapo_staged", "--engine.kind", "jetstream"],
            "method.kind dapo needs the log-probability of each sampled token",
        ),
        (
            ["tiny_world", "--engine.factory", "my_package:make_engine"],
            "engine.factory is my_package:make_engine, but engine.kind is native and calls no "
            "factory: add --engine.kind jetstream, or leave out --engine.factory",
        ),
        pytest.param(
            ["tiny_world", "--engine.kind", "jetstream", "--engine.factory", "nowhere:make"],
            "engine.factory is 'nowhere:make', but there is no module nowhere: start the program in",
            marks=needs("jetstream", "jetstream"),
        ),
    ],
)
def test_train_refuses_in_one_sentence(capsys, tmp_path, words, sentence):
    assert train.main([*words, "--run", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert sentence in message
    assert not (tmp_path / "run").exists()


def test_a_check_of_a_configuration_refuses_flare_without_log_probabilities():
    config = dataclasses.replace(
        CONFIGS["hotpotqa_v5e"], agent=of_kind(CONFIGS["hotpotqa_v5e"], "agent", "flare").agent
    )
    with pytest.raises(UserError, match=r"agent.kind flare needs the log-probability"):
        check(config)
    check(dataclasses.replace(config, engine=dataclasses.replace(config.engine, kind="native")))


def test_an_endpoint_has_an_engine_of_its_own():
    """FLARE on an endpoint that gives log-probabilities is not refused because of the configured
    engine.
    """
    words = [
        "hotpotqa_v5e",
        "--remote.base-url",
        "http://localhost:1",
        "--remote.model",
        "m",
        "--agent.kind",
        "flare",
        "--remote.mode",
        "chat",
    ]
    _, config = evaluation.command_line([*words, "--remote.tokenizer", "t"])
    assert config.engine.kind == "native"


def test_a_run_of_grpo_is_evaluated_by_jetstream(tmp_path):
    """An evaluation learns nothing, so it needs no log-probabilities."""
    words = ["tiny_world_grpo", "--checkpoint", str(tmp_path), "--engine.kind", "jetstream"]
    _, config = evaluation.command_line(words)
    assert config.engine.kind == "jetstream"
