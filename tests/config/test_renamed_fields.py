"""Old names of fields: as flags, in configuration files, as attributes, and in stored runs."""

import dataclasses
import json
from typing import Any, Literal

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import train
from mujica_jax.commands.serve import ServeArguments
from mujica_jax.config import renamed_fields
from mujica_jax.config.command_line import command_line, override
from mujica_jax.config.files import load_config
from mujica_jax.config.renamed_fields import RENAMED_FIELDS, accept_old_names
from mujica_jax.config.schema import Config, EngineConfig, MygoConfig
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import RunMismatchError, UserError
from mujica_jax.trajectories.store import open_run
from tests.helpers.paths import HELPERS, ROOT

SMOKE = str(HELPERS / "smoke_config.py")
GRPO = str(ROOT / "configs" / "tiny_world_grpo.py")
NOTICE = (
    "method.fixed_threshold is now method.initial_threshold; the old name works in this release"
)
BOTH = (
    "method.fixed_threshold is the old name of method.initial_threshold and both are set: leave out "
    "method.fixed_threshold"
)
ROWS = sorted(RENAMED_FIELDS.items())


@pytest.fixture(autouse=True)
def nothing_said(tmp_path, monkeypatch):
    """Each test is a process that has named no old field yet, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    renamed_fields._say_once.cache_clear()


@dataclasses.dataclass(frozen=True)
class Example:
    """A configuration that has a renamed field, and another value for it."""

    file: str
    section: str
    old: str
    new: str
    value: Any

    @property
    def config(self) -> Config:
        return load_config(self.file)

    @property
    def changed(self) -> Config:
        section = dataclasses.replace(getattr(self.config, self.section), **{self.new: self.value})
        return dataclasses.replace(self.config, **{self.section: section})


def example(old: str, new: str) -> Example:
    section, field = new.split(".")
    for file in (SMOKE, GRPO):
        values = vars(getattr(load_config(file), section))
        if field in values:
            return Example(file, section, old.split(".")[1], field, values[field] + 1)
    raise AssertionError(f"no configuration has {new}")


def stored_under_the_old_name(config: Config, row: Example) -> dict[str, Any]:
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    values[row.section][row.old] = values[row.section].pop(row.new)
    return values


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_an_old_flag_sets_the_field_and_says_so_once(old, new, capsys):
    row = example(old, new)
    dashes = old.replace("_", "-")
    for words in (
        [f"--{dashes}", f"{row.value}"],
        [f"--{dashes}={row.value}"],
        [f"--{old}", f"{row.value}"],
        [f"--{old}={row.value}"],
    ):
        renamed_fields._say_once.cache_clear()
        assert command_line([row.file, *words], default="tiny_world") == row.changed
        assert capsys.readouterr().err == (
            f"{old} is now {new}; the old name works in this release\n"
        )
    assert command_line([row.file, *words], default="tiny_world") == row.changed
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_a_configuration_file_may_use_the_old_name(old, new, capsys):
    row = example(old, new)
    section = getattr(row.config, row.section)
    changed = getattr(row.changed, row.section)

    # As in `TrainerConfig(...)`.
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    del values[row.new]
    assert type(section)(**values, **{row.old: row.value}) == changed

    # As in `dataclasses.replace(base.trainer, ...)`.
    assert dataclasses.replace(section, **{row.old: row.value}) == changed

    # As in a method of one's own.
    assert getattr(changed, row.old) == row.value
    assert capsys.readouterr().err == f"{old} is now {new}; the old name works in this release\n"


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_the_run_of_an_earlier_version_goes_on_without_notice(old, new, capsys, tmp_path):
    row = example(old, new)
    stored = stored_under_the_old_name(row.config, row)
    assert from_dict(Config, stored) == row.config

    open_run(tmp_path / "run", stored)
    open_run(tmp_path / "run", dataclasses.asdict(row.config))
    assert capsys.readouterr().err == ""

    with pytest.raises(RunMismatchError) as refused:
        open_run(tmp_path / "run", dataclasses.asdict(row.changed))
    value = getattr(getattr(row.config, row.section), row.new)
    assert f" {new} was {value!r} and is now {row.value!r};" in str(refused.value)


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_each_row_names_a_field_that_is_there_and_one_that_is_not(old, new):
    row = example(old, new)
    fields = vars(getattr(row.config, row.section))
    assert row.new in fields and row.old not in fields
    assert old.split(".")[0] == row.section, "a field stays in its section"


def test_eval_reads_the_run_of_an_earlier_version_without_notice(capsys, tmp_path):
    row = example("method.fixed_threshold", "method.initial_threshold")
    open_run(tmp_path / "run", stored_under_the_old_name(row.changed, row))
    _, config = evaluation.command_line(["--checkpoint", "run"])
    assert isinstance(config.method, MygoConfig) and config.method.initial_threshold == row.value
    assert capsys.readouterr().err == ""


def test_the_policy_kept_by_an_earlier_version_is_read(capsys):
    values = json.loads((ROOT / "adapters" / "two_wiki_text_smollm2" / "config.json").read_text())
    config = from_dict(Config, values["config"])
    assert (config.trainer.sequence_length, config.trainer.batch_size) == (768, 4)
    assert config.engine.max_num_seqs == 48
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--method.fixed-threshold", "0.5", "--method.initial-threshold", "0.25"],
        ["--method.initial_threshold=0.25", "--method.fixed_threshold=0.5"],
    ],
)
def test_both_flags_at_once_are_refused(words, capsys):
    assert train.main([SMOKE, *words]) == 2
    assert capsys.readouterr().err == f"error: {BOTH}\n"


def test_both_names_at_once_in_a_configuration_file_are_refused(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mujica_jax.config.schema import MygoConfig\n"
        "def get_config():\n"
        "    return MygoConfig(rounds=1, fixed_threshold=0.5, initial_threshold=0.25)\n"
    )
    assert train.main([str(file)]) == 2
    assert capsys.readouterr().err == f"error: {BOTH}\n"


def test_a_program_says_the_new_name_and_goes_on(capsys):
    assert train.main([SMOKE, "--method.fixed-threshold", "7"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        NOTICE,
        "error: method.initial_threshold is 7.0, but the highest reward is 1: give a threshold from 0 to 1",
    ]


def test_a_wrong_name_in_a_stored_run_is_answered_with_the_new_one():
    values = dataclasses.asdict(load_config(SMOKE))
    values["method"]["initial_treshold"] = values["method"].pop("initial_threshold")
    with pytest.raises(
        UserError,
        match=r"unknown field 'initial_treshold' of a stored .*; did you mean initial_threshold\?$",
    ):
        from_dict(Config, values)


def test_a_name_that_never_was_is_no_attribute():
    method = load_config(SMOKE).method
    with pytest.raises(AttributeError, match="'MygoConfig' object has no attribute 'treshold'"):
        _ = method.treshold  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(method, "treshold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMethod:
    """A user's method with a field of its own under an old name."""

    kind: Literal["own"] = "own"
    fixed_threshold: float = 0.0
    initial_threshold: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig:
    method: OwnMethod | MygoConfig


def test_a_users_own_field_under_an_old_name_stays_its_own(capsys, tmp_path):
    accept_old_names(OwnConfig)
    config = OwnConfig(method=OwnMethod(fixed_threshold=0.5))
    assert config.method == OwnMethod(fixed_threshold=0.5, initial_threshold=0.0)
    words = ["--method.fixed-threshold", "0.25"]
    assert override(config, words, prog="own").method == OwnMethod(fixed_threshold=0.25)
    values = dataclasses.asdict(config)
    assert from_dict(OwnMethod, values["method"]) == config.method
    open_run(tmp_path / "run", values)
    open_run(tmp_path / "run", values)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [["--engine.slots", "3"], ["--engine.slots=3"]],
)
def test_the_server_takes_an_old_flag_too(words, capsys):
    engine = EngineConfig(max_num_seqs=16, decode_steps_per_call=8, prefill_tokens=2048)
    defaults = ServeArguments(checkpoint="model", engine=engine)
    assert override(defaults, words, prog="serve").engine.max_num_seqs == 3
    assert capsys.readouterr().err == (
        "engine.slots is now engine.max_num_seqs; the old name works in this release\n"
    )


def test_a_field_under_both_names_is_refused(capsys):
    words = ["--trainer.row-tokens", "512", "--trainer.sequence-length", "256"]
    assert train.main([SMOKE, *words]) == 2
    assert capsys.readouterr().err == (
        "error: trainer.row_tokens is the old name of trainer.sequence_length and both are set: "
        "leave out trainer.row_tokens\n"
    )


@pytest.mark.parametrize("program", [train, evaluation])
def test_help_shows_new_names_alone(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    shown = capsys.readouterr().out
    assert "--engine.max-num-seqs" in shown
    for old, new in ROWS:
        assert old.replace("_", "-") + " " not in shown, f"{old} is {new} now"
