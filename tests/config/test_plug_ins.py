"""Plug-ins on the command line, in configuration files and in stored runs, and what is refused."""

import dataclasses
import json
import sys

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import train
from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.kinds import of_kind
from mujica_jax.config.schema import Config
from mujica_jax.config.stored import from_dict, to_dict
from mujica_jax.errors import UserError
from tests.helpers.paths import HELPERS
from tests.helpers.plug_in_modules import AGENT
from tests.helpers.plug_in_modules import write_module as write_module

SMOKE = str(HELPERS / "smoke_config.py")
PATIENT = "patient_plug_in:PatientConfig"
HEAD = "import dataclasses\nfrom typing import ClassVar, Literal\n"
FROZEN = "@dataclasses.dataclass(frozen=True, kw_only=True)\n"


@pytest.fixture
def patient(write_module) -> Config:
    """Return the small configuration with the agent of a user's own module."""
    write_module("patient_plug_in", AGENT)
    words = [SMOKE, "--agent.kind", PATIENT, "--agent.breaths", "5"]
    return command_line(words, default="tiny_world")


def stored(config: Config) -> dict:
    return json.loads(json.dumps(to_dict(config)))


def refused(capsys, *words: str) -> str:
    """Return the one sentence with which `train` refuses these flags."""
    assert train.main([SMOKE, "--run", "run", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message.removeprefix("error: ").strip()


# --- chosen by a flag ---


def test_a_kind_of_ones_own_module_has_the_shared_settings_and_its_own(patient):
    smoke = load_config(SMOKE)
    assert patient.agent.breaths == 5
    assert patient.agent.kind == "patient"
    assert patient.agent.max_turn_tokens == smoke.agent.max_turn_tokens
    assert dataclasses.replace(patient, agent=smoke.agent) == smoke
    check(patient)


def test_the_working_directory_is_searched_as_by_a_console_command(patient, tmp_path):
    assert str(tmp_path) in sys.path
    assert sys.modules["patient_plug_in"].__file__ == str(tmp_path / "patient_plug_in.py")


def test_a_misspelled_flag_of_a_plug_in_is_answered_with_the_nearest(write_module, capsys):
    write_module("patient_plug_in", AGENT)
    with pytest.raises(SystemExit) as ended:
        command_line([SMOKE, "--agent.kind", PATIENT, "--agent.breath", "5"], default="tiny_world")
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "--agent.breaths INT" in printed.out + printed.err
    assert "Number of deep breaths." in printed.out + printed.err


def test_a_flag_of_another_kind_is_answered_with_the_kind_that_has_it(write_module):
    write_module("patient_plug_in", AGENT)
    with pytest.raises(UserError) as answer:
        command_line([SMOKE, "--agent.kind", PATIENT, "--agent.style", "x"], default="tiny_world")
    assert str(answer.value) == (
        "--agent.style is a setting of agent.kind single, but agent.kind is patient: leave it out, "
        "or add --agent.kind single"
    )


def test_help_shows_the_settings_of_a_plug_in(write_module, capsys):
    write_module("patient_plug_in", AGENT)
    with pytest.raises(SystemExit) as ended:
        command_line([SMOKE, "--agent.kind", PATIENT, "--help"], default="tiny_world")
    assert ended.value.code == 0
    assert "Number of deep breaths." in capsys.readouterr().out


def test_a_field_of_a_plug_in_may_have_an_old_name_of_a_built_in_one(write_module, capsys):
    write_module(
        "old_words_plug_in",
        HEAD
        + FROZEN
        + "class Mine:\n    kind: Literal['mine'] = 'mine'\n"
        + "    implementation: ClassVar[str] = 'mujica_jax.methods.mygo:mygo'\n"
        + "    group_attempts: int = 2\n",
    )
    words = [SMOKE, "--method.kind", "old_words_plug_in:Mine", "--method.group-attempts", "7"]
    assert command_line(words, default="tiny_world").method.group_attempts == 7
    assert capsys.readouterr().err == ""


def test_a_default_of_a_plug_in_may_be_made_by_a_factory(write_module):
    write_module(
        "factory_plug_in",
        AGENT + "    words: tuple[str, ...] = dataclasses.field(default_factory=tuple)\n",
    )
    words = [SMOKE, "--agent.kind", "factory_plug_in:PatientConfig"]
    assert command_line(words, default="tiny_world").agent.words == ()


def test_another_agent_of_an_evaluation_may_be_a_plug_in(patient):
    assert of_kind(load_config(SMOKE), "agent", PATIENT).agent.breaths == 3


def test_unknown_names_are_answered_with_the_nearest_and_the_form_of_ones_own(capsys):
    assert refused(capsys, "--agent.kind", "mujca") == (
        "unknown agent 'mujca'; did you mean mujica? (or your own as module:Class)"
    )
    assert refused(capsys, "--reward", "f1_fromat") == (
        "unknown reward 'f1_fromat'; did you mean f1_format? (or your own as module:name)"
    )


# --- in a configuration file ---


def test_a_configuration_file_may_use_a_class_of_a_module_beside_it(patient, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "from mujica_jax.config.files import load_config\n"
        "from patient_plug_in import PatientConfig\n"
        "def get_config():\n"
        f"    config = load_config({SMOKE!r})\n"
        "    fields = {**vars(config.agent), 'kind': 'patient', 'breaths': 5}\n"
        "    return dataclasses.replace(config, agent=PatientConfig(**fields))\n"
    )
    assert load_config("mine.py") == patient


def test_a_class_in_the_configuration_file_itself_cannot_be_stored(tmp_path, write_module, capsys):
    write_module(
        "mine",
        AGENT + "from mujica_jax.config.files import load_config\n"
        "def get_config():\n"
        f"    config = load_config({SMOKE!r})\n"
        "    fields = {**vars(config.agent), 'kind': 'patient'}\n"
        "    return dataclasses.replace(config, agent=PatientConfig(**fields))\n",
    )
    assert train.main(["mine.py", "--run", "run"]) == 2
    assert capsys.readouterr().err == (
        "error: agent is a PatientConfig, which a run cannot import again: move it from the "
        "configuration file into a module of its own\n"
    )


# --- stored and opened again ---


def test_a_stored_run_keeps_the_place_of_its_plug_in_and_opens_again(patient):
    values = stored(patient)
    assert values["agent"]["kind"] == PATIENT
    assert values["task"]["kind"] == "tiny_world"
    assert from_dict(Config, values) == patient
    assert to_dict(patient.agent)["kind"] == PATIENT


def test_an_evaluation_opens_a_run_with_a_plug_in_without_flags(patient, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": stored(patient)}))
    _, config = evaluation.command_line(["--checkpoint", "run"])
    assert config.agent == patient.agent
    for kind in (PATIENT, "patient"):
        _, config = evaluation.command_line(["--checkpoint", "run", "--agent.kind", kind])
        assert config.agent == patient.agent


def test_a_run_whose_plug_in_is_gone_is_answered_with_one_sentence(patient, tmp_path, capsys):
    values = stored(patient)
    values["agent"]["kind"] = "gone_plug_in:PatientConfig"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": values}))
    assert evaluation.main(["--checkpoint", "run"]) == 2
    assert capsys.readouterr().err == (
        "error: the stored agent.kind is 'gone_plug_in:PatientConfig', but there is no module "
        "gone_plug_in: start the program in the folder that contains it, or add that folder to "
        "PYTHONPATH\n"
    )


def test_a_stored_kind_that_is_no_configuration_is_not_called(patient):
    values = stored(patient)
    values["agent"]["kind"] = "os:getcwd"
    with pytest.raises(
        UserError, match=r"the stored agent.kind is 'os:getcwd', but it is no datac"
    ):
        from_dict(Config, values)


# --- refused before a run starts ---


def test_a_module_that_does_not_import_is_named_with_its_own_message(write_module, capsys):
    file = write_module("broken_plug_in", "import dataclasses\n\nvalue = dataclasses.nothing\n")
    assert refused(capsys, "--agent.kind", "broken_plug_in:Mine") == (
        "broken_plug_in:Mine cannot be imported: AttributeError: module 'dataclasses' has no "
        f"attribute 'nothing' ({file}, line 3)"
    )
    write_module("unreadable_plug_in", "def f(:\n")
    assert refused(capsys, "--reward", "unreadable_plug_in:f") == (
        "unreadable_plug_in:f cannot be imported: SyntaxError: invalid syntax "
        "(unreadable_plug_in.py, line 1)"
    )


def test_a_name_that_a_module_lacks_is_answered_with_its_nearest(write_module, capsys):
    write_module("patient_plug_in", AGENT)
    assert refused(capsys, "--agent.kind", "patient_plug_in:PatentConfig") == (
        "agent.kind is 'patient_plug_in:PatentConfig', but the module patient_plug_in has no "
        "PatentConfig; did you mean PatientConfig?"
    )


@pytest.mark.parametrize(
    ("section", "text", "sentence"),
    [
        ("agent", "def Mine(): ...", "it is no dataclass: name the dataclass with the settings of"),
        ("task", "@dataclasses.dataclass\nclass Mine:\n    a: int = 1", "it can be changed: write"),
        ("task", f"{FROZEN}class Mine:\n    a: int = 1", "it has no short name: give it the field"),
        (
            "task",
            f"{FROZEN}class Mine:\n    kind: Literal['two words'] = 'two words'",
            "it has no short name: give it the field",
        ),
        (
            "task",
            f"{FROZEN}class Mine:\n    kind: Literal['mine'] = 'mine'",
            "it names no implementation: give it implementation: ClassVar[str]",
        ),
        (
            "method",
            f"{FROZEN}class Mine:\n    kind: Literal['mygo'] = 'mygo'",
            "it has the kind 'mygo' of a built-in method: rename it",
        ),
        (
            "agent",
            f"{FROZEN}class Mine:\n    kind: Literal['mine'] = 'mine'\n"
            "    implementation: ClassVar[str] = 'a:b'",
            "it lacks the limits of an agent: derive it from mujica_jax.config.agents.AgentLimits",
        ),
    ],
)
def test_what_is_no_configuration_of_a_kind_is_refused(
    write_module, capsys, section, text, sentence
):
    write_module("wrong_plug_in", f"{HEAD}{text}\n")
    message = refused(capsys, f"--{section}.kind", "wrong_plug_in:Mine")
    assert message.startswith(f"{section}.kind is 'wrong_plug_in:Mine', but {sentence}")


@pytest.mark.parametrize(
    ("section", "implementation", "sentence"),
    [
        (
            "method",
            "def make(): ...",
            "the method wrong_plug_in:make takes (), but it is called with (run): change its",
        ),
        (
            "task",
            "def make(config, folder): ...",
            "the task wrong_plug_in:make takes (config, folder), but it is called with (config)",
        ),
        (
            "task",
            "def other(config): ...",
            "the implementation of mine is 'wrong_plug_in:make', but the module wrong_plug_in has "
            "no make; choose from Mine, other",
        ),
        (
            "agent",
            "def make(config): ...",
            "the agent wrong_plug_in:make takes (config), but it is called with (tokenizer, config)",
        ),
        (
            "agent",
            "class make:\n    def __init__(self, tokenizer, config): ...",
            "the agent wrong_plug_in:make has no method `async def run(self, attempt, environment, "
            "policy)`: add it",
        ),
        (
            "agent",
            "class make:\n    def __init__(self, tokenizer, config): ...\n"
            "    def run(self, attempt, environment, policy): ...",
            "the agent wrong_plug_in:make has no method `async def run(",
        ),
        (
            "agent",
            "class make:\n    def __init__(self, tokenizer, config): ...\n"
            "    async def run(self, attempt, environment, policy): ...",
            "the agent wrong_plug_in:make has no method `opening(self, role, kind)`",
        ),
    ],
)
def test_an_implementation_with_the_wrong_signature_is_refused(
    write_module, capsys, section, implementation, sentence
):
    base = "MujicaConfig" if section == "agent" else "object"
    write_module(
        "wrong_plug_in",
        f"{HEAD}from mujica_jax.config.agents import MujicaConfig\n{FROZEN}class Mine({base}):\n"
        "    kind: Literal['mine'] = 'mine'\n"
        f"    implementation: ClassVar[str] = 'wrong_plug_in:make'\n{implementation}\n",
    )
    flags = [f"--{section}.kind", "wrong_plug_in:Mine", "--eval.no-control"]
    assert refused(capsys, *flags).startswith(sentence)


@pytest.mark.parametrize(
    ("reward", "flags", "sentence"),
    [
        (
            "def mine(score): ...",
            [],
            "the reward wrong_plug_in:mine takes (score), but it is called with (score, trajectory) "
            "or (score, trajectory, question): change its parameters",
        ),
        ("mine = 0.5", [], "reward is 'wrong_plug_in:mine', but this is a float: name a function"),
        (
            "async def mine(score, trajectory): ...",
            ["--method.kind", "decex", "--agent.kind", "decex", "--task.environment", "text"],
            "the reward wrong_plug_in:mine is asynchronous, but method.kind decex scores its trees "
            "without waiting: give a reward that is a plain function",
        ),
    ],
)
def test_a_reward_with_the_wrong_signature_is_refused(
    write_module, capsys, reward, flags, sentence
):
    write_module("wrong_plug_in", f"{reward}\n")
    assert refused(capsys, "--reward", "wrong_plug_in:mine", *flags) == sentence


def test_a_method_without_learning_rates_makes_no_control_run(write_module, capsys):
    write_module(
        "rateless_plug_in",
        f"{HEAD}{FROZEN}class Mine:\n    kind: Literal['mine'] = 'mine'\n"
        "    implementation: ClassVar[str] = 'mujica_jax.methods.mygo:mygo'\n",
    )
    assert refused(capsys, "--method.kind", "rateless_plug_in:Mine") == (
        "eval.control is True, but method.kind mine has no learning_rate and end_learning_rate, "
        "with which the control run learns: add both to its settings, or give --eval.no-control"
    )
