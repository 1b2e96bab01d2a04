"""Sections of several kinds: how a command line and a config.json choose one, and which code each
kind leads to.
"""

import dataclasses
import json
import re

import pytest

from mujica_jax.config.checks import check
from mujica_jax.config.command_line import command_line
from mujica_jax.config.files import load_config
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import AgentConfig, Config, MethodConfig, TaskConfig, TwoWikiConfig
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError

KINDS = [
    kind
    for union in (TaskConfig, AgentConfig, MethodConfig)
    for kind in getattr(union, "__args__", (union,))
]
GIVEN = [
    "--task.environment",
    "graph",
    "--task.data-dir",
    "data",
    "--task.hold-out-percent",
    "20",
    "--task.top-k",
    "3",
]


def json_of(config: Config) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(config)))


@pytest.fixture
def tiny_world() -> Config:
    return load_config("tiny_world")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_leads_to_its_code(kind):
    assert callable(implementation(kind))
    (field,) = (field for field in dataclasses.fields(kind) if field.name == "kind")
    assert re.fullmatch(r"[a-z0-9_]+", field.default)


# The command line


def test_another_kind_keeps_the_fields_that_both_have(tiny_world):
    for flag in (
        ["--task.kind", "two_wiki"],
        ["--task.kind=two_wiki"],
        ["--task.kind=web", "--task.kind=two_wiki"],
    ):
        config = command_line([*flag, *GIVEN, "--task.test-questions", "7"], default="tiny_world")
        assert config == dataclasses.replace(tiny_world, task=config.task)
        assert isinstance(config.task, TwoWikiConfig)
        assert config.task.environment == "graph"
        assert config.task.top_k == 3
        assert config.task.retriever == "bm25"
        assert config.task.dev_questions == tiny_world.task.dev_questions
        assert (config.task.test_questions, config.task.augmented_copies) == (7, 1)


def test_another_kind_asks_for_the_fields_that_are_missing(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line(
            ["--task.kind", "two_wiki", "--task.environment", "text"], default="tiny_world"
        )
    assert ended.value.code == 2
    printed = capsys.readouterr()
    for flag in ("data-dir", "hold-out-percent"):
        assert f"--task.{flag}" in printed.out + printed.err
    assert "--task.dev-questions" not in printed.out + printed.err


def test_the_own_kind_changes_nothing(tiny_world):
    assert command_line(["--task.kind", "tiny_world"], default="tiny_world") == tiny_world


@pytest.mark.parametrize("words", [["--task.facts-per-entity", "5"], ["--task.facts_per_entity=5"]])
def test_a_field_of_another_kind_is_answered_with_the_kind_that_has_it(words):
    with pytest.raises(UserError) as refused:
        command_line(words, default="two_wiki_kg_nano")
    assert str(refused.value) == (
        "--task.facts-per-entity is a setting of task.kind tiny_world, but task.kind is two_wiki: "
        "leave it out, or add --task.kind tiny_world"
    )


# config.json


def test_the_kind_chooses_the_class_whatever_else_is_wrong(tiny_world):
    """Most fields here belong to the other class."""
    values = json_of(tiny_world)
    with pytest.raises(
        UserError, match=r"unknown field 'train_questions' of a stored TwoWikiConfig"
    ):
        from_dict(Config, values | {"task": values["task"] | {"kind": "two_wiki"}})
    with pytest.raises(
        UserError, match=r"the stored TwoWikiConfig cannot be read back: .*'environment'"
    ):
        from_dict(Config, values | {"task": {"kind": "two_wiki", "dev_questions": 3}})
    with pytest.raises(
        UserError,
        match=r"unknown field 'paraphrase' of a stored TinyWorldConfig; did you mean paraphrases\?",
    ):
        from_dict(Config, values | {"task": values["task"] | {"paraphrase": 3}})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"task": {"kind": "two_wikki"}},
            "Config.task has the unknown kind 'two_wikki'; did you mean two_wiki?",
        ),
        ({"task": {"kind": ["two_wiki"]}}, "has the unknown kind \"['two_wiki']\""),
        ({"trainer": {"kind": "fast"}}, "unknown field 'kind' of a stored TrainerConfig"),
        ({"engine": 3}, "Config.engine is 3 and must be an object with the fields of EngineConfig"),
        ({"seed": {"a": 3}}, "Config.seed is {'a': 3} and must be a single value"),
    ],
)
def test_a_config_json_that_was_changed_by_hand_is_explained(tiny_world, changed, sentence):
    with pytest.raises(UserError) as refused:
        from_dict(Config, json_of(tiny_world) | changed)
    assert sentence in str(refused.value)


# Methods that learn files

SFT = ["--method.kind", "sft", "--method.data", "a.jsonl"]
DPO = ["--method.kind", "dpo", "--method.data", "a.jsonl"]


def test_a_method_that_learns_a_file_starts_at_the_checkpoint_itself():
    for words in (SFT, DPO):
        config = command_line(["two_wiki_text_smollm2", "--init", "smollm2", *words], default="")
        assert config.warmup.steps == 0
        assert config.method.data == ("a.jsonl",)


def test_a_flag_brings_the_warm_up_back():
    words = ["two_wiki_text_smollm2", "--init", "smollm2", *SFT]
    assert command_line([*words, "--warmup.steps", "40"], default="").warmup.steps == 40
    kept = command_line([*words, "--warmup.epochs", "2"], default="").warmup
    assert (kept.steps, kept.epochs) == (300, 2)


def test_a_model_from_scratch_keeps_its_warm_up(tiny_world):
    assert command_line(SFT, default="tiny_world").warmup == tiny_world.warmup


def test_other_methods_keep_the_warm_up():
    words = ["two_wiki_text_smollm2", "--init", "smollm2", "--method.rounds", "1"]
    assert command_line(words, default="").warmup.steps == 300


def test_sft_keeps_the_learning_rates_of_the_configuration_and_dpo_has_its_own(tiny_world):
    sft = command_line(SFT, default="tiny_world").method
    assert sft.learning_rate == tiny_world.method.learning_rate
    assert sft.epochs == tiny_world.method.epochs
    dpo = command_line(DPO, default="tiny_world").method
    assert (dpo.learning_rate, dpo.end_learning_rate, dpo.epochs) == (5e-7, 0.0, 1)


def test_several_files_are_named_by_one_flag():
    words = ["--method.kind", "sft", "--method.data", "a.jsonl", "b", "--seed", "3"]
    config = command_line(words, default="tiny_world")
    assert config.method.data == ("a.jsonl", "b")
    assert from_dict(Config, json_of(config)) == config


def test_a_method_that_learns_a_file_asks_for_it(capsys, tiny_world):
    with pytest.raises(SystemExit):
        command_line(["--method.kind", "sft"], default="tiny_world")
    printed = capsys.readouterr()
    assert "--method.data" in printed.out + printed.err
    config = command_line(SFT, default="tiny_world")
    without = dataclasses.replace(config, method=dataclasses.replace(config.method, data=()))
    with pytest.raises(UserError, match=r"method.data is \(\), but method.kind sft learns a file"):
        check(without)
