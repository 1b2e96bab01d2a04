"""Switches of the command line: `--x` and `--no-x`, and the form of the last release."""

import pytest

from mujica_jax.config import command_line as module
from mujica_jax.config.command_line import command_line, override
from mujica_jax.config.files import load_config
from mujica_jax.errors import UserError


@pytest.fixture(autouse=True)
def _say_again():
    """Let each test print the notice that a process prints once."""
    module._say_once.cache_clear()


@pytest.mark.parametrize(
    ("words", "control"),
    [
        ("--eval.control", True),
        ("--eval.no-control", False),
        ("--eval.control --seed 3", True),
        ("--eval.no_control --seed 3", False),
        ("--eval.control --eval.no-control", False),
    ],
)
def test_a_switch_has_two_flags(words, control):
    assert command_line(words.split(), default="tiny_world").eval.control is control


def test_a_switch_of_a_configuration_stays_without_a_flag():
    config = load_config("hotpotqa_distractor_v5e")
    assert override(config, [], prog="eval") == config
    assert config.engine.prefix_reuse
    assert not override(config, ["--engine.no-prefix-reuse"], prog="eval").engine.prefix_reuse


@pytest.mark.parametrize(
    ("words", "control", "notice"),
    [
        ("--eval.control True", True, "--eval.control True is now --eval.control; "),
        ("--eval.control False", False, "--eval.control False is now --eval.no-control; "),
        ("--eval.control=False", False, "--eval.control False is now --eval.no-control; "),
    ],
)
def test_the_form_of_the_last_release_works_with_a_notice(words, control, notice, capsys):
    assert command_line(words.split(), default="tiny_world").eval.control is control
    assert capsys.readouterr().err == f"{notice}the old form works in this release\n"


def test_the_new_form_has_no_notice(capsys):
    command_line(["--eval.control", "--agent.no-split"], default="tiny_world")
    assert capsys.readouterr().err == ""


def test_a_switch_with_another_value_is_refused():
    with pytest.raises(UserError) as refused:
        command_line(["--eval.control", "maybe"], default="tiny_world")
    assert str(refused.value) == (
        "--eval.control is followed by 'maybe' and takes no value: write --eval.control or "
        "--eval.no-control"
    )


def test_the_negation_of_a_switch_takes_no_value(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line(["--eval.no-control", "True"], default="tiny_world")
    assert ended.value.code == 2
    assert "True" in capsys.readouterr().err


def test_a_switch_of_another_kind_names_the_kind_that_has_it():
    with pytest.raises(UserError) as refused:
        command_line(["--method.no-sft"], default="tiny_world")
    assert str(refused.value) == (
        "--method.no-sft is a setting of method.kind decex, but method.kind is mygo: leave it out, "
        "or add --method.kind decex"
    )
