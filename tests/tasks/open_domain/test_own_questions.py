"""Questions of your own in the forms of other projects: what is read, and what is refused."""

import json
import sys
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from mujica_jax.config.tasks import OwnQuestionsConfig
from mujica_jax.errors import UserError
from mujica_jax.records import GoldPassage, Question
from mujica_jax.tasks.open_domain.own_questions import build
from mujica_jax.tasks.open_domain.own_records import split_of_name

PASSAGES = {"paragraphs": [{"title": "Rome", "paragraph_text": "Rome is in Italy."}]}


def questions_of(folder: Path, **changes) -> dict[str, dict[str, Question]]:
    """Return the questions of the task over a folder, by split and id."""
    config = OwnQuestionsConfig(data_dir=str(folder), top_k=1, **changes)
    task = build(config)
    return {
        split: {question.id: question for question in task.questions(split)}
        for split in ("train", "dev", "test")
    }


def write_lines(file: Path, *records: dict) -> None:
    """Write JSON Lines. The first record brings a passage, so that there is something to search."""
    first, *others = records
    file.write_text("\n".join(json.dumps(record) for record in (first | PASSAGES, *others)))


FORMS = {
    "plain": {"question": "Where is Rome?", "answer": "Italy"},
    "several answers": {"question": "Where is Rome?", "answers": ["Italy", "Italia"]},
    "FlashRAG": {"id": "test_0", "question": "Where is Rome?", "golden_answers": ["Italy"]},
    "Search-R1": {
        "data_source": "nq",
        "question": "Where is Rome?",
        "prompt": [{"role": "user", "content": "Answer the given question. Where is Rome?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Italy"]}},
    },
    "verl": {"question": "Where is Rome?", "reward_model": {"ground_truth": "Italy"}},
    "BEIR": {"_id": "PLAIN-1", "text": "Where is Rome?", "answer": "Italy"},
    "both fields": {"question": "Where is Rome?", "answer": "Italy", "golden_answers": ["italy"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_question_and_its_answer_are_read_from_every_form(form, tmp_path):
    write_lines(tmp_path / "train.jsonl", FORMS[form])
    (question,) = questions_of(tmp_path)["train"].values()
    assert question.text == "Where is Rome?"
    assert question.answers[0] == "Italy"
    assert question.gold_passages == ()


def test_a_parquet_file_of_search_r1_is_read(tmp_path):
    rows = [{**FORMS["Search-R1"], "id": f"train_{number}"} for number in range(3)]
    table = pyarrow.Table.from_pylist([rows[0] | PASSAGES, *rows[1:]])
    parquet.write_table(table, tmp_path / "train.parquet")
    questions = questions_of(tmp_path)["train"]
    assert questions.keys() == {"train_0", "train_1", "train_2"}
    assert questions["train_2"].answers == ("Italy",)


def test_a_table_is_read_and_a_cell_may_hold_a_list(tmp_path):
    write_lines(tmp_path / "train.jsonl", FORMS["plain"])
    (tmp_path / "test.csv").write_text(
        'qid,question,answers\n7,Where is Rome?,"[""Italy"", ""Italia""]"\n8,When?,1901\n'
    )
    questions = questions_of(tmp_path)["test"]
    assert questions["7"].answers == ("Italy", "Italia")
    assert questions["8"].answers == ("1901",)


def test_one_file_is_enough(tmp_path):
    file = tmp_path / "questions.jsonl"
    write_lines(file, FORMS["plain"])
    splits = questions_of(file)
    assert sum(len(questions) for questions in splits.values()) == 1


def test_gold_passages_of_flashrag_are_read_from_its_metadata(tmp_path):
    context = {"title": ["Rome", "Oslo"], "sentences": [["It is in Italy."], ["It is not."]]}
    facts = {"title": ["Rome"], "sent_id": [0]}
    record = FORMS["FlashRAG"] | {"metadata": {"context": context, "supporting_facts": facts}}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    (question,) = questions_of(tmp_path, setting="distractor")["train"].values()
    assert question.gold_passages == (GoldPassage(title="Rome", text="It is in Italy."),)


def test_names_of_files_and_records_decide_the_split(tmp_path):
    write_lines(tmp_path / "my_train.jsonl", {"id": "a", **FORMS["plain"]})
    (tmp_path / "validation.jsonl").write_text(json.dumps({"id": "b", **FORMS["plain"]}))
    (tmp_path / "test.jsonl").write_text(json.dumps({"id": "c", **FORMS["plain"]}))
    marked = {"id": "d", "split": "validation", **FORMS["plain"]}
    (tmp_path / "more.jsonl").write_text(json.dumps(marked))
    splits = questions_of(tmp_path)
    assert {split: set(questions) for split, questions in splits.items()} == {
        "train": {"a"},
        "dev": {"b", "d"},
        "test": {"c"},
    }
    names = ("questions.jsonl", "latest.jsonl", "nq_test-2.jsonl", "NQ-open.dev.jsonl.gz")
    assert [split_of_name(name) for name in names] == [None, None, "test", "dev"]


def test_other_questions_are_split_by_their_ids(tmp_path):
    records = [{"id": f"q{number}", **FORMS["plain"]} for number in range(400)]
    write_lines(tmp_path / "questions.jsonl", *records)
    splits = questions_of(tmp_path, hold_out_percent=50, dev_percent=50)
    sizes = [len(splits[split]) for split in ("train", "dev", "test")]
    assert sum(sizes) == 400
    # Half of 400 are held out, and half of those are dev: 200, 100, 100 with a deviation of 10.
    assert 160 < sizes[0] < 240
    assert all(60 < size < 140 for size in sizes[1:])
    without_dev = questions_of(tmp_path, hold_out_percent=0)
    assert len(without_dev["train"]) == 400


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"question": "Where is Rome?"}, r"line 2: the question has no answer \(fields question;"),
        ({"answer": "Italy"}, r"line 2: there is no question \(fields answer;"),
        (
            {"question": "Where is Rome?", "answer": "Italy", "golden_answers": ["Norway"]},
            r"answer is \['Italy'\] and golden_answers is \['Norway'\], and they share no answer",
        ),
        (
            {"question": "Where?", "reward_model": {"ground_truth": {"answer": "x"}}},
            "reward_model.ground_truth has the fields answer and no target",
        ),
        ({**FORMS["plain"], "split": "holdout"}, "split is 'holdout' and must be one of train,"),
        ({**FORMS["plain"], "answer_aliases": "Italia"}, "the aliases are a string and must be"),
        ({"question": ["Where?"], "answer": "Italy"}, "the question is .* and must be a string"),
        ({"id": "first", "question": "When?", "answer": "1"}, "the question first is 'When"),
        (["Where is Rome?", "Italy"], "the record is a list and must be an object"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_with_its_place(record, sentence, tmp_path):
    write_lines(tmp_path / "train.jsonl", {"id": "first", **FORMS["plain"]}, record)
    with pytest.raises(UserError, match=sentence):
        questions_of(tmp_path)


def test_one_question_in_two_splits_is_refused(tmp_path):
    write_lines(tmp_path / "train.jsonl", {"id": "a", **FORMS["plain"]})
    (tmp_path / "test.jsonl").write_text(json.dumps({"id": "a", **FORMS["plain"]}))
    with pytest.raises(UserError, match=r"a is for train here and for test in .*test\.jsonl"):
        questions_of(tmp_path)


def test_folders_without_questions_are_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(UserError, match="has no file of questions: give a JSON array"):
        questions_of(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        questions_of(tmp_path / "nothing")
    (tmp_path / "train.jsonl").write_text(" \n")
    with pytest.raises(UserError, match="is blank"):
        questions_of(tmp_path)


def test_questions_without_passages_need_an_index(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(FORMS["plain"]))
    with pytest.raises(UserError, match=r"give --task\.index with an index of passages"):
        questions_of(tmp_path)


def test_a_data_set_of_the_hub_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        build(OwnQuestionsConfig(data_dir="hf:nobody/nothing", top_k=1))
    assert str(caught.value) == (
        "task.data_dir hf:nobody/nothing needs the package datasets, but datasets is not installed: "
        "install the extra `datasets`, as in `pip install -e '.[datasets]'` where mujica_jax was "
        "cloned, or download the data set and give its folder"
    )


def test_a_data_set_of_the_hub_needs_the_network(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    # This is what HF_HUB_OFFLINE=1 sets when the two packages are imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"the data set nobody/nothing cannot be loaded \(.*folder"):
        build(OwnQuestionsConfig(data_dir="hf:nobody/nothing", top_k=1))
