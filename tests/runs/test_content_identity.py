"""What was played of some questions counts for these questions alone, whatever their files are
called.
"""

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest

from mujica_jax.config.cache_folders import cache_folder
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, TwoWikiConfig
from mujica_jax.errors import RunMismatchError
from mujica_jax.records import Question
from mujica_jax.retrieval.client import RemoteRetriever
from mujica_jax.runs.evaluate import _identity, _read_or_play
from mujica_jax.runs.policies import Checkpoint
from mujica_jax.runs.setup import check_content
from mujica_jax.storage.run_directory import RunDirectory
from mujica_jax.tasks.content import (
    content_version,
    fingerprint_of_questions,
    fingerprint_of_searches,
)
from mujica_jax.tasks.environment import TextEnvironment
from mujica_jax.tasks.open_domain.records import read_set
from mujica_jax.tasks.two_wiki.task import TwoWiki, build
from mujica_jax.trajectories.store import Store
from tests.helpers.little_agent import ToldPolicy, answer, play

MIDNIGHT = 1_577_836_800  # a fixed time of change, as archives give their files


def write(path: Path, text: str) -> None:
    """Write a file whose time of change says nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (MIDNIGHT, MIDNIGHT))


def folder_of_questions(folder: Path, *, verb: str = "built", passage: str = "A mill.") -> Path:
    """Write twelve questions of the user's own and their passages.

    Four of them are for training.
    """
    rows = [
        {
            "_id": f"q{number}",
            "question": f"Who {verb} mill number {number}?",
            "answer": "Ann Ode",
            "supporting_facts": ["Lisma"],
            "split": ("train", "dev", "test")[number % 3],
        }
        for number in range(12)
    ]
    write(folder / "questions.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(folder / "corpus.jsonl", json.dumps({"title": "Lisma", "text": passage}) + "\n")
    return folder


def config_for(folder: Path) -> Config:
    config = load_config("two_wiki_text_smollm2")
    return dataclasses.replace(
        config, task=dataclasses.replace(config.task, data_dir=str(folder), index=None)
    )


def two_wiki(folder: Path) -> TwoWiki:
    task = config_for(folder).task
    assert isinstance(task, TwoWikiConfig)
    return build(task)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_questions_are_known_by_all_that_they_say():
    question = Question(id="1", text="Who?", answers=("Ann",))
    changes = (
        {"id": "2"},
        {"text": "Who else?"},
        {"answers": ("Bo",)},
        {"answers": ("Ann", "Bo")},
        {"kind": "x"},
    )
    prints = [
        fingerprint_of_questions([dataclasses.replace(question, **change)])
        for change in ({}, *changes)
    ]
    assert len(set(prints)) == len(prints)
    assert prints[0] == fingerprint_of_questions([dataclasses.replace(question)])
    other = dataclasses.replace(question, id="2")
    assert fingerprint_of_questions([question, other]) != fingerprint_of_questions(
        [other, question]
    )


def test_what_is_searched_is_known_by_its_passages(tmp_path):
    first = two_wiki(folder_of_questions(tmp_path / "a"))
    same = two_wiki(folder_of_questions(tmp_path / "b"))
    other = two_wiki(folder_of_questions(tmp_path / "c", passage="A barn."))
    prints = [
        fingerprint_of_searches(task, task.questions("test")) for task in (first, same, other)
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("change", [{"verb": "burnt"}, {"passage": "A barn."}])
def test_an_interrupted_evaluation_does_not_go_on_with_other_questions_or_passages(
    change, tmp_path
):
    folder = folder_of_questions(tmp_path / "data")
    config = config_for(folder)
    model = tmp_path / "model"
    write(model / "model.safetensors", "weights")
    policy = Checkpoint(
        place="here", version=0, model=model, adapter=None, run=None, name="policy", out=tmp_path
    )
    before = _identity(config, two_wiki(folder), policy, None)
    assert before == _identity(config, two_wiki(folder), policy, None)
    folder_of_questions(folder, **change)
    assert _identity(config, two_wiki(folder), policy, None) != before


def test_an_interrupted_evaluation_does_not_go_on_with_other_weights(tmp_path):
    folder = folder_of_questions(tmp_path / "data")
    config = config_for(folder)
    model = tmp_path / "model"
    write(model / "model.safetensors", "weights")
    policy = Checkpoint(
        place="here", version=0, model=model, adapter=None, run=None, name="policy", out=tmp_path
    )
    before = _identity(config, two_wiki(folder), policy, None)
    write(model / "model.safetensors", "WEIGHTS")
    assert _identity(config, two_wiki(folder), policy, None) != before


@pytest.mark.parametrize("change", [{"verb": "burnt"}, {"passage": "A barn."}])
def test_a_run_does_not_go_on_with_other_questions_or_passages(change, tmp_path):
    folder = folder_of_questions(tmp_path / "data")
    config = config_for(folder)
    store = Store(tmp_path / "run")
    check_content(store, config, two_wiki(folder))
    # The same data in a start that goes on.
    check_content(store, config, two_wiki(folder))
    folder_of_questions(folder, **change)
    with pytest.raises(
        RunMismatchError, match=r"was started with other data than .* holds now"
    ) as refused:
        check_content(store, config, two_wiki(folder))
    assert "give the same data, or choose another --run directory" in str(refused.value)
    assert "evaluation questions was" in str(refused.value), (
        "gold passages are a part of their question"
    )
    assert ("searched was" in str(refused.value)) == ("passage" in change)


def test_a_run_does_not_go_on_with_other_paragraphs_of_its_training_questions(tmp_path):
    """In the distractor setting each question has paragraphs of its own.

    Those of the evaluated ones stay the same.
    """

    def task(other: str) -> TwoWiki:
        rows = []
        for number in range(12):
            split = ("train", "dev", "test")[number % 3]
            context = [
                ["Lisma", ["A mill."]],
                ["Other", [other if split == "train" else "A pier."]],
            ]
            row = {
                "_id": f"q{number}",
                "question": "Who?",
                "answer": "Ann",
                "split": split,
                "context": context,
            }
            rows.append(json.dumps(row | {"supporting_facts": [["Lisma", 0]]}))
        write(tmp_path / "data" / "questions.jsonl", "\n".join(rows) + "\n")
        return build(config.task)

    config = config_for(tmp_path / "data")
    assert isinstance(config.task, TwoWikiConfig)
    config = dataclasses.replace(
        config, task=dataclasses.replace(config.task, setting="distractor", top_k=1)
    )
    store = Store(tmp_path / "run")
    check_content(store, config, task("A barn."))
    check_content(store, config, task("A barn."))
    with pytest.raises(RunMismatchError, match=r"paragraphs of the training questions was"):
        check_content(store, config, task("A shed."))


def nq(folder: Path, question: str, answer: str) -> Path:
    write(
        folder / "NQ-open.dev.jsonl", json.dumps({"question": question, "answer": [answer]}) + "\n"
    )
    return folder


def test_folders_that_agree_in_names_sizes_and_times_are_read_each(cache, tmp_path):
    first = nq(tmp_path / "a", "who built it", "Ann Ode")
    second = nq(tmp_path / "b", "who broke it", "Bo Rask")
    sizes = {(folder / "NQ-open.dev.jsonl").stat().st_size for folder in (first, second)}
    assert len(sizes) == 1
    assert [record.answers for _, record in read_set(first, "nq")] == [("Ann Ode",)]
    assert [record.answers for _, record in read_set(second, "nq")] == [("Bo Rask",)]
    assert [record.answers for _, record in read_set(first, "nq")] == [("Ann Ode",)]


def test_questions_that_were_read_are_found_again(cache, monkeypatch, tmp_path):
    folder = nq(tmp_path / "a", "who built it", "Ann Ode")
    before = read_set(folder, "nq")
    monkeypatch.setattr("mujica_jax.tasks.open_domain.records.read_open_records", None)
    assert read_set(folder, "nq") == before


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"PAR1 no parquet PAR1"])
def test_a_damaged_cache_of_questions_is_read_anew_and_replaced(damage, cache, caplog, tmp_path):
    folder = nq(tmp_path / "a", "who built it", "Ann Ode")
    before = read_set(folder, "nq")
    (cached,) = (cache / "mujica_jax" / "questions").glob("*.parquet")
    cached.write_bytes(damage)
    assert read_set(folder, "nq") == before
    assert "is damaged" in caplog.text
    caplog.clear()
    assert read_set(folder, "nq") == before
    assert not caplog.text


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    folder = nq(tmp_path / "a", "who built it", "Ann Ode")
    assert [record.answers for _, record in read_set(folder, "nq")] == [("Ann Ode",)]
    cache = cache_folder("questions")
    assert cache.is_dir()
    assert os.access(cache, os.W_OK)
    assert "/proc/none" not in str(cache)
    assert cache == cache_folder("questions"), "one folder for a process"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_hidden_files_of_an_archive_are_no_questions(cache, tmp_path):
    folder = nq(tmp_path / "a", "who built it", "Ann Ode")
    (folder / "._NQ-open.dev.jsonl").write_bytes(b"\0\5\26\7 Mac OS X")
    assert len(read_set(folder, "nq")) == 1
    own = folder_of_questions(tmp_path / "own")
    (own / "._questions.jsonl").write_bytes(b"\0\5\26\7 Mac OS X")
    (own / "._corpus.jsonl").write_bytes(b"\0\5\26\7 Mac OS X")
    assert len(two_wiki(own).questions("test")) == 4


def test_a_service_of_passages_is_known_by_the_version_that_it_serves():
    environments = []
    for version in ("first", "second"):
        retriever = RemoteRetriever("http://127.0.0.1:1")
        # A health check sets it when the service is opened.
        retriever.version = version
        environments.append(TextEnvironment(retriever, top_k=1))
    assert [content_version(environment) for environment in environments] == ["first", "second"]


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"no shard"])
def test_a_part_of_an_evaluation_that_is_damaged_is_played_again(damage, caplog, tmp_path):
    parts = RunDirectory(tmp_path)
    played = [play(ToldPolicy([answer("Ghent")]))]
    assert _read_or_play(parts, "greedy.parquet", lambda: played) == played
    (tmp_path / "greedy.parquet").write_bytes(damage)
    assert _read_or_play(parts, "greedy.parquet", lambda: played) == played
    assert "greedy.parquet" in caplog.text
    assert "these episodes are played again" in caplog.text
    assert [
        trajectory.answer for trajectory in _read_or_play(parts, "greedy.parquet", lambda: [])
    ] == ["Ghent"], "and kept"
