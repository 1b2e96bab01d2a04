"""Changes to a configuration as the API takes them."""

import dataclasses

import pytest

from mujica_jax.api.overrides import as_config, as_words, parsed
from mujica_jax.config.command_line import override
from mujica_jax.config.schema import Config
from mujica_jax.errors import UserError
from tests.helpers.smoke_config import get_config


def changed(overrides) -> Config:
    words = as_words(overrides)
    return parsed(words, lambda: override(get_config(), words, prog="train"))


def test_a_mapping_and_the_words_of_a_command_line_change_the_same():
    by_mapping = changed({"method.rounds": 1, "agent.max_iterations": 2})
    assert by_mapping == changed(["--method.rounds", "1", "--agent.max-iterations", "2"])
    assert by_mapping.method.rounds == 1
    assert by_mapping.agent.max_iterations == 2


def test_no_overrides_change_nothing():
    assert changed(None) == changed({}) == get_config()


def test_values_that_are_true_false_none_and_lists_are_written_as_flags():
    overrides = {"eval.control": False, "init": None, "agents": ("direct", "rag")}
    assert as_words(overrides) == [
        "--eval.no-control", "--init", "None", "--agents", "direct", "rag",
    ]  # fmt: skip
    assert changed({"eval.control": False, "init": None}) == dataclasses.replace(
        get_config(), eval=dataclasses.replace(get_config().eval, control=False)
    )


def test_a_kind_can_be_changed():
    overrides = {"method.kind": "grpo", "method.group_size": 2, "method.rounds_per_evaluation": 1}
    assert changed(overrides).method.kind == "grpo"


def test_an_unknown_name_is_an_error_of_one_sentence_with_the_nearest_name():
    with pytest.raises(UserError) as caught:
        changed({"method.round": 1})
    message = str(caught.value)
    assert message.startswith(
        "the overrides '--method.round 1' do not fit: Unrecognized options: --method.round"
    )
    assert "--method.rounds" in message
    assert "---" not in message
    assert "\n" not in message


def test_a_text_in_place_of_a_mapping_is_refused():
    with pytest.raises(UserError, match="give a mapping such as"):
        as_words("--method.rounds 1")


def test_a_configuration_is_itself_and_a_name_is_a_file():
    config = get_config()
    assert as_config(config) is config
    assert as_config("tiny_world").name == "tiny_world"
    with pytest.raises(UserError, match="did you mean tiny_world"):
        as_config("tiny_wrld")
