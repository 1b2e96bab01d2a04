"""2WikiMultihopQA as its authors released it: official splits, and the aliases that the official
script v1.1 counts.
"""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.checks import check
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, TwoWikiConfig
from mujica_jax.config.stored import from_dict
from mujica_jax.errors import UserError
from mujica_jax.metrics import score
from mujica_jax.records import Conversation, StopReason, Trajectory
from mujica_jax.rewards.reward import find_reward
from mujica_jax.runs.evaluation import held_out_questions
from mujica_jax.runs.setup import about_questions, build_task
from mujica_jax.tasks.two_wiki import task as two_wiki
from tests.helpers.paths import ROOT

ALIASES = [
    {"Q_id": "Q30", "aliases": ["USA", "U.S.", "the States"], "demonyms": ["American", "Yank"]},
    {"Q_id": "Q12439", "aliases": ["Motor City", "Detroit, Michigan"], "demonyms": ["Detroiter"]},
    {"Q_id": "Q5", "aliases": [], "demonyms": []},
    {"Q_id": "Q12439000", "aliases": ["Nowhere"], "demonyms": []},
]
# Gold answer, its id, a prediction, and what 2wikimultihop_evaluate_v1.1.py gives for it with the
# aliases above.
SCORED = [
    (
        "Detroit",
        "Q12439",
        "the Motor City",
        {"em": 1.0, "f1": 1.0, "precision": 1.0, "recall": 1.0},
    ),
    (
        "United States of America",
        "Q30",
        "an American citizen",
        {"em": 0.0, "f1": 2 / 3, "precision": 0.5, "recall": 1.0},
    ),
    ("14 May 1931", None, "May 14, 1931", {"em": 0.0, "f1": 1.0, "precision": 1.0, "recall": 1.0}),
    ("no", "Q99", "no", {"em": 1.0, "f1": 1.0, "precision": 1.0, "recall": 1.0}),
    (
        "Arthur Percy",
        "Q5",
        "Percy, Earl Arthur",
        {"em": 0.0, "f1": 0.8, "precision": 2 / 3, "recall": 1.0},
    ),
]


def record(id: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "_id": id,
        "type": "compositional",
        "question": f"Where is {id}?",
        "answer": "Detroit",
        "answer_id": "Q12439",
    }
    context = [["Lisma", [f"The mill {id} is in Detroit."]], ["Kolm", ["Kolm is a hill."]]]
    return fields | {"supporting_facts": [["Lisma", 0]], "context": context} | changes


def write(folder: Path, name: str, records: list[dict[str, Any]], *, lines: bool = False) -> None:
    text = (
        "".join(json.dumps(fields) + "\n" for fields in records) if lines else json.dumps(records)
    )
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def config(folder: Path, **changes: Any) -> TwoWikiConfig:
    fields = {
        "environment": "text",
        "data_dir": str(folder),
        "hold_out_percent": 50,
        "top_k": 2,
    } | changes
    return TwoWikiConfig(**fields)


def ids(task: two_wiki.TwoWiki, *splits: Any) -> set[str]:
    return {question.id for split in splits for question in task.questions(split)}


def record_without_answer(question_id: str) -> dict:
    return record(question_id, answer="", answer_id=None, supporting_facts=[], evidences=[])


@pytest.fixture
def official(tmp_path) -> Path:
    """Return a folder as the release has it. The test file has no answers."""
    write(tmp_path, "train.json", [record(f"t{n}") for n in range(30)])
    write(tmp_path, "dev.json", [record(f"d{n}") for n in range(40)])
    write(tmp_path, "test.json", [record_without_answer(f"h{n}") for n in range(5)])
    write(tmp_path, "id_aliases.json", ALIASES, lines=True)
    return tmp_path


@pytest.mark.parametrize("hold_out_percent", [1, 50, 99])
def test_train_is_trained_on_and_dev_is_held_out_whatever_the_share(official, hold_out_percent):
    task = two_wiki.build(config(official, hold_out_percent=hold_out_percent))
    assert ids(task, "train") == {f"t{n}" for n in range(30)}
    assert ids(task, "dev", "test") == {f"d{n}" for n in range(40)}
    assert len(ids(task, "dev")) > 5
    assert len(ids(task, "test")) > 5
    assert not ids(task, "dev") & ids(task, "test")


def test_all_of_the_dev_file_can_be_the_test(official):
    task = two_wiki.build(config(official, test_percent=100))
    assert len(task.questions("test")) == 40
    assert not task.questions("dev")


def test_dev_files_alone_train_nothing_unless_a_sample_is_to_be_split(official):
    (official / "train.json").unlink()
    (official / "dev.json").rename(official / "dev_part.json")
    assert not two_wiki.build(config(official)).questions("train")
    sample = two_wiki.build(config(official, split_dev_files=True))
    split = {id: two_wiki.split_of(id, 50) for id in (f"d{n}" for n in range(40))}
    assert (
        ids(sample, "train")
        == {id for id, split_name in split.items() if split_name == "train"}
        != set()
    )
    assert any(
        "not scores of the official dev set" in sentence for sentence in about_questions(sample)
    )
    whole = dataclasses.replace(load_config("two_wiki_text_v5e"), task=config(official))
    with pytest.raises(
        UserError,
        match=r"has 0 training questions and \d+ dev questions.* Questions in files called dev\* are never trained",
    ):
        build_task(whole)


def test_a_sample_of_dev_is_not_split_beside_a_train_file(official):
    task = two_wiki.build(config(official, split_dev_files=True))
    assert ids(task, "train") == {f"t{n}" for n in range(30)}


def test_a_split_of_the_record_wins_and_a_question_of_both_files_is_of_dev(official):
    write(official, "train.json", [record("t1", split="test"), record("d1"), record("t2")])
    write(official, "dev.json", [record("d1"), record("d2", split="train")])
    task = two_wiki.build(config(official))
    assert ids(task, "train") == {"t2", "d2"}
    assert "t1" in ids(task, "test")
    assert "d1" in ids(task, "dev", "test")


def test_a_hash_decides_about_questions_of_no_official_file(official):
    write(
        official,
        "questions.jsonl",
        [record(f"q{n}") for n in range(20)] + [record("d3"), record("t3")],
        lines=True,
    )
    task = two_wiki.build(config(official))
    own = {f"q{n}": two_wiki.split_of(f"q{n}", 50) for n in range(20)}
    assert {id for id in ids(task, "train") if id in own} == {
        id for id, split in own.items() if split == "train"
    }
    assert "t3" in ids(task, "train")
    assert "d3" in ids(task, "dev", "test")


def test_several_files_of_one_split_packed_or_not(tmp_path):
    write(tmp_path, "train_1.json.gz", [record("t1")])
    write(tmp_path, "train_2.jsonl", [record("t2")], lines=True)
    write(tmp_path, "dev_1.json", [record("d1")])
    write(tmp_path, "dev_2.jsonl.gz", [record("d2")], lines=True)
    write(tmp_path, "id_aliases.json.gz", ALIASES, lines=True)
    task = two_wiki.build(config(tmp_path))
    assert ids(task, "train") == {"t1", "t2"}
    assert ids(task, "dev", "test") == {"d1", "d2"}
    assert "Motor City" in task.questions("train")[0].answers


def test_scores_with_aliases_are_those_of_the_official_script(tmp_path):
    records = [
        record(f"q{n}", answer=gold, answer_id=answer_id)
        for n, (gold, answer_id, _, _) in enumerate(SCORED)
    ]
    write(tmp_path, "dev.json", records)
    write(tmp_path, "id_aliases.json", ALIASES, lines=True)
    task = two_wiki.build(config(tmp_path))
    asked = {
        question.id: question for split in ("dev", "test") for question in task.questions(split)
    }
    for number, (gold, _, prediction, expected) in enumerate(SCORED):
        question = asked[f"q{number}"]
        assert question.answers[0] == gold
        scores = score(prediction, question.answers, task.rule)
        assert dataclasses.asdict(scores) == pytest.approx(expected), prediction
    assert asked["q1"].answers == (
        "United States of America",
        "USA",
        "U.S.",
        "the States",
        "American",
        "Yank",
    )


def test_the_reward_counts_aliases_too(official):
    question = two_wiki.build(config(official)).questions("train")[0]
    played = Trajectory(
        question_id=question.id,
        attempt=0,
        policy_version=0,
        seed=0,
        conversations=(Conversation(role="planner", turns=()),),
        answer="Detroiter",
        stop_reason=StopReason.ANSWERED,
        searches=(),
        seconds=0.0,
    )
    assert find_reward("f1", "two_wiki")(played, question).total == 1.0


def test_aliases_of_the_record_and_of_the_release_are_both_counted(tmp_path):
    write(tmp_path, "dev.json", [record("a"), record("b")])
    own = {
        name: record("a", answer_aliases=["D-Town"])[name]
        for name in ("_id", "question", "answer", "answer_aliases")
    }
    write(tmp_path, "questions.jsonl", [own], lines=True)
    write(tmp_path, "id_aliases.json", ALIASES, lines=True)
    (merged,) = (
        question for question in two_wiki._read_records(config(tmp_path))[0] if question.id == "a"
    )
    assert merged.answers == ("Detroit", "D-Town", "Motor City", "Detroit, Michigan", "Detroiter")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (
            [{"Q_id": "Q1", "aliases": ["x"], "demonyms": []}],
            "belongs to another release .* none of its ids is the answer_id",
        ),
        (
            [{"Q_id": "Q12439", "aliases": ["x"]}],
            r"line 1: this is not a line of id_aliases\.json of 2WikiMultihopQA v1\.1",
        ),
        (
            [ALIASES[0], {"Q12439": ["Motor City"]}],
            r"line 2: this is not a line of id_aliases\.json",
        ),
        (
            [{"Q_id": "Q12439", "aliases": "Motor City", "demonyms": []}],
            "line 1: this is not a line",
        ),
        ([{"Q_id": 12439, "aliases": [], "demonyms": []}], "line 1: this is not a line"),
        ([{"Q_id": "Q12439", "aliases": [1], "demonyms": []}], "line 1: this is not a line"),
        (["Motor City"], "line 1: this is not a line"),
        ([], "is blank and contains no alias"),
    ],
)
def test_an_alias_file_of_another_release_is_refused(official, lines, complaint):
    write(official, "id_aliases.json", lines, lines=True)
    with pytest.raises(UserError, match=rf"id_aliases\.json.*{complaint}"):
        two_wiki.build(config(official))


def test_aliases_beside_questions_of_the_first_release_are_refused(tmp_path):
    write(
        tmp_path,
        "dev.json",
        [{name: value for name, value in record("a").items() if name != "answer_id"}],
    )
    write(tmp_path, "id_aliases.json", ALIASES, lines=True)
    with pytest.raises(
        UserError,
        match="another release than the questions in its folder: the questions have no answer_id",
    ):
        two_wiki.build(config(tmp_path))


def test_what_counts_as_gold_is_said(official):
    assert about_questions(two_wiki.build(config(official)))[0] == (
        "id_aliases.json adds aliases to the gold answers of 70 of 70 questions"
    )
    (official / "id_aliases.json").unlink()
    (message,) = about_questions(two_wiki.build(config(official)))
    assert "has no id_aliases.json, but 70 answers have an id" in message
    assert "the official script accepts their aliases as answers" in message


@pytest.mark.parametrize("flags", [[], ["--eval.split", "test"]])
def test_eval_scores_as_many_questions_as_it_is_asked_for(official, flags):
    """The configuration's splits have the sizes of training.

    In an evaluation eval.questions counts.
    """
    words = ["two_wiki_text_smollm2", "--init", "smollm2", "--task.data-dir", str(official), *flags]
    for questions, expected in ((10_000, 40), (3, 3)):
        counts = []
        for test_percent in (100, 0):
            further = ["--eval.questions", str(questions), "--task.test-percent", str(test_percent)]
            _, chosen = evaluation.command_line([*words, *further])
            small = dataclasses.replace(
                chosen, task=dataclasses.replace(chosen.task, triple_demonstrations=0)
            )
            counts.append(len(held_out_questions(two_wiki.build(small.task), small)))
        assert sorted(counts) == [0, expected]


def test_a_flag_still_caps_what_eval_scores_and_other_tasks_are_not_capped_either(official):
    words = [
        "two_wiki_text_smollm2",
        "--init",
        "smollm2",
        "--task.data-dir",
        str(official),
        "--eval.questions",
        "10000",
    ]
    options, chosen = evaluation.command_line(
        [*words, "--task.test-questions", "4", "--tasks", "two_wiki_kg_v5e"]
    )
    assert chosen.task.dev_questions is None
    assert chosen.task.test_questions == 4
    _, other = evaluation.all_configs(options, chosen)
    assert other.task.dev_questions is None
    assert other.task.test_questions is None


@pytest.mark.parametrize("field", ["dev_questions", "test_questions"])
def test_sizes_of_splits_are_at_least_one(field):
    whole = load_config("two_wiki_text_v5e")
    check(dataclasses.replace(whole, task=dataclasses.replace(whole.task, **{field: None})))
    with pytest.raises(UserError, match=rf"task\.{field} is 0 and must be at least 1"):
        check(dataclasses.replace(whole, task=dataclasses.replace(whole.task, **{field: 0})))


def test_a_configuration_that_was_stored_before_official_splits_means_what_it_meant():
    stored = json.loads((ROOT / "adapters" / "two_wiki_text_smollm2" / "config.json").read_text())[
        "config"
    ]
    assert "split_dev_files" not in stored["task"]
    assert from_dict(Config, stored).task.split_dev_files  # pyright: ignore[reportAttributeAccessIssue]
    assert not load_config("two_wiki_text_v5e").task.split_dev_files
