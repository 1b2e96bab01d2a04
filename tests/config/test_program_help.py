"""The help of the programs: what it begins with, which flags it shows, and that each text stands alone."""

import collections
import dataclasses
import re

import pytest
import tyro

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import plan, sample, serve, train
from mujica_jax.commands.plan import PlanConfig
from mujica_jax.config.command_line import override
from mujica_jax.config.field_help import docstring, first_sentence
from mujica_jax.config.files import CONFIG_FOLDER, load_config
from mujica_jax.config.kinds import section_types, sections_with_kinds, with_kind
from mujica_jax.config.program_help import (
    config_summaries,
    flags_of,
    negated,
    program_name,
    wanted_help,
)
from mujica_jax.config.schema import Config

TINY_WORLD = load_config("tiny_world")
EVAL_SECTIONS = ("task", "agent", "engine", "eval", "judge", "faults", "distributed")
# The defaults of each program that reads flags into a dataclass.
DEFAULTS = {
    "train": TINY_WORLD,
    "plan": PlanConfig(**vars(TINY_WORLD)),
    "sample": sample.SampleArguments(run=tyro.MISSING),
    "serve": serve.AgentServeArguments(
        checkpoint=tyro.MISSING,
        remote=evaluation.RemoteConfig(),
        **{name: getattr(TINY_WORLD, name) for name in ("task", "agent", "engine")},
    ),
    "eval": evaluation.EvalArguments(
        checkpoint=tyro.MISSING,
        reward="f1",
        seed=0,
        remote=evaluation.RemoteConfig(),
        **{name: getattr(TINY_WORLD, name) for name in EVAL_SECTIONS},
    ),
}
PROGRAMS = {
    "train": train.HELP,
    "plan": plan.HELP,
    "sample": sample.HELP,
    "serve": serve.HELP,
    "eval": evaluation.HELP,
}


def variants(name: str):
    """Return the defaults of a program, with each kind of each section."""
    values = DEFAULTS[name]
    with_kinds = [values]
    for section, kinds in sections_with_kinds(type(values)).items():
        with_kinds += [with_kind(values, section, kind) for kind in kinds.values()]
    return with_kinds


def shown(name: str, *words: str, capsys) -> str:
    """Return what the help of a program prints."""
    with pytest.raises(SystemExit) as ended:
        override(DEFAULTS[name], words, prog=f"mujica {name}", program=PROGRAMS[name])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_begins_with_what_the_program_does_its_usage_and_two_examples(name, capsys):
    text = " ".join(shown(name, "--help", capsys=capsys).split())
    program = PROGRAMS[name]
    assert text.startswith(f"{program.summary} usage: mujica {name} {program.usage} examples:")
    assert len(program.examples) == 2
    for words, meaning in program.examples.items():
        assert f"mujica {name} {words} {meaning}" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_common_flag_is_a_field_of_some_kind_and_stands_there_once(name):
    fields = {flag.name for values in variants(name) for flag in flags_of(values)}
    common = [field for fields in PROGRAMS[name].common.values() for field in fields]
    assert set(common) - fields == set()
    assert len(set(common)) == len(common)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_help_text_ends_a_sentence_and_no_two_fields_have_the_same(name):
    for values in variants(name):
        names_of_text = collections.defaultdict(list)
        for flag in flags_of(values):
            assert flag.text.endswith("."), flag
            names_of_text[flag.text].append(flag.name)
        repeated = [names for names in names_of_text.values() if len(names) > 1]
        assert repeated == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_field_without_a_value_says_what_that_means(name):
    for values in variants(name):
        for flag in flags_of(values):
            assert "None" not in flag.note
            assert "default: )" not in flag.note


@pytest.mark.parametrize("name", ["train", "eval", "serve", "plan"])
def test_the_common_help_is_shorter_than_the_whole_help(name, capsys):
    common = shown(name, "--help", capsys=capsys)
    whole = shown(name, "--help", "all", capsys=capsys)
    assert len(common) < len(whole)
    for flag in flags_of(DEFAULTS[name]):
        assert f"\n  {flag.usage}\n" in whole
    assert f"mujica {name} --help all lists every flag" in common
    assert "--help all lists every flag" not in whole


@pytest.mark.parametrize("section", ["method", "agent", "task"])
def test_a_flag_for_a_kind_lists_all_kinds_with_the_first_sentence_of_each(section, capsys):
    text = " ".join(shown("train", "--help", capsys=capsys).split())
    kinds = sections_with_kinds(Config)[section]
    assert len(kinds) >= 5
    for name, kind in kinds.items():
        assert f" {name} {first_sentence(docstring(kind))}" in text


def test_the_help_of_a_kind_has_all_its_settings(capsys):
    text = shown("train", "--method.kind", "grpo", "--help", capsys=capsys)
    assert "Settings of --method.kind grpo:" in text
    fields = dataclasses.fields(sections_with_kinds(Config)["method"]["grpo"])
    assert len(fields) > 10
    for field in fields:
        assert f"--method.{field.name.replace('_', '-')}" in text
    # Settings of MyGO alone.
    assert "--method.max-attempts" not in text


def test_the_help_lists_every_configuration_with_its_first_sentence(capsys):
    summaries = config_summaries()
    assert summaries.keys() == {file.stem for file in CONFIG_FOLDER.glob("*.py")}
    assert all(summary.endswith(".") for summary in summaries.values())
    text = " ".join(shown("eval", "--help", capsys=capsys).split())
    for name, summary in summaries.items():
        assert f" {name} {summary}" in text


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_lines_fit_the_terminal_but_for_commands_and_flags(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown("serve", "--help", "all", capsys=capsys)
    limit = max(60, min(100, columns))
    sentences = [
        line for line in text.splitlines() if not re.match(r"  (--|mujica )|usage: ", line)
    ]
    assert max(map(len, sentences)) <= limit


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed", "1"], ""),
        (["-h"], "common"),
        (["--seed", "1", "--help"], "common"),
        (["--help", "all"], "all"),
        (["--help=all"], "all"),
        (["--help", "--seed", "1"], "common"),
    ],
)
def test_which_help_is_wanted(words, expected):
    assert wanted_help(words) == expected


def test_a_program_without_a_page_shows_its_docstring_and_all_flags(capsys):
    @dataclasses.dataclass(frozen=True)
    class Arguments:
        """Count the questions of a file."""

        # The file of questions.
        file: str = "questions.json"

    with pytest.raises(SystemExit):
        override(Arguments(), ["--help"], prog="python -m counting")
    assert capsys.readouterr().out == (
        "Count the questions of a file.\n\nusage: python -m counting [flags]\n\n"
        "Flags without a section:\n  --file TEXT\n"
        "      The file of questions. (default: questions.json)\n\n"
    )


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("/env/bin/mujica", "mujica train"),
        ("/src/mujica_jax/__main__.py", "python -m mujica_jax train"),
        ("/src/mujica_jax/train.py", "python -m mujica_jax.train"),
    ],
)
def test_the_usage_names_the_command_that_was_typed(started, expected, monkeypatch):
    monkeypatch.setattr("sys.argv", [started, "--help"])
    assert program_name("train") == expected


def test_a_negated_flag_has_its_no_in_front_of_the_field():
    assert negated("--sampled") == "--no-sampled"
    assert negated("--agent.split") == "--agent.no-split"


def test_the_first_sentence_of_a_docstring():
    assert first_sentence("ReAct (Yao et al., 2023): thought,\naction. And more.\n\nRest.") == (
        "ReAct (Yao et al., 2023): thought, action."
    )
    assert first_sentence("PopQA.") == "PopQA."


def test_every_section_has_a_docstring_for_its_heading():
    for section, kinds in section_types(Config).items():
        for kind in kinds:
            assert docstring(kind), section
