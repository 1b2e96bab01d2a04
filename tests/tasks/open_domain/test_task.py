"""Official question sets are read as their files hold them, split by their ids, and answered over
passages.
"""

import asyncio
import csv
import functools
import gzip
import http.server
import json
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from mujica_jax.config.command_line import override
from mujica_jax.config.files import load_config
from mujica_jax.config.schema import TaskConfig
from mujica_jax.errors import UserError
from mujica_jax.records import Question
from mujica_jax.tasks.open_domain.records import read_open_records, read_set
from mujica_jax.tasks.open_domain.task import OpenDomain, build
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import DATA, needs_data

KINDS = {
    member.kind: member
    for member in TaskConfig.__args__
    if member.kind not in ("tiny_world", "two_wiki", "qald10")
}


def task(kind: str, folder: Path, **changes) -> OpenDomain:
    return build(KINDS[kind](**{"data_dir": str(folder), "top_k": 3, **changes}))


def titles_found(open_domain: OpenDomain, question: Question, query: str) -> list[str]:
    return [
        material.title
        for material in asyncio.run(open_domain.environment(question).search(query, None))
    ]


@needs_data
def test_hotpotqa_as_it_comes():
    hotpot = task("hotpotqa", DATA / "hotpotqa")
    assert len(hotpot.questions("train")) == 100
    assert len(hotpot.questions("dev")) + len(hotpot.questions("test")) == 338
    assert 70 < len(hotpot.questions("dev")) < 135, "about 30%"
    assert hotpot.name == "hotpotqa"
    assert hotpot.rule == "hotpot"
    assert hotpot.environment_kind == "text"
    by_id = {
        question.id: question for split in ("dev", "test") for question in hotpot.questions(split)
    }
    viva = by_id["5a7613c15542994ccc9186bf"]
    assert (
        viva.text
        == "VIVA Media AG changed it's name in 2004. What does their new acronym stand for?"
    )
    assert viva.answers == ("Gesellschaft mit beschränkter Haftung",)
    assert viva.kind == "bridge"
    assert [passage.title for passage in viva.gold_passages] == [
        "VIVA Media",
        "Gesellschaft mit beschränkter Haftung",
    ]
    assert [bool(passage.text) for passage in viva.gold_passages] == [True, False], (
        "the file lacks the second one"
    )
    assert len(titles_found(hotpot, viva, viva.text)) == 3
    own = task("hotpotqa", DATA / "hotpotqa", setting="distractor", top_k=20, keep_incomplete=True)
    titles = titles_found(own, viva, viva.text)
    assert len(titles) == 10
    assert {"VIVA Media", "VIVA Poland", "WWE One Night Stand"} <= set(titles)


@needs_data
def test_of_hotpotqa_only_questions_with_their_gold_passages_are_asked_in_the_distractor_setting():
    """The sample comes from the fullwiki file.

    92 of its 338 questions have both gold passages among their ten.
    """
    distractor = task("hotpotqa", DATA / "hotpotqa", setting="distractor")
    asked = [question for split in ("dev", "test") for question in distractor.questions(split)]
    assert len(asked) == 92
    assert len(distractor.questions("train")) == 100
    assert len(distractor.left_out) == 338 - 92
    assert distractor.shown == "3 of 2 to 10 passages"
    assert distractor.notes == (
        "246 of 438 questions lack a gold passage among their own passages; they are left out, and "
        "--task.keep-incomplete would keep them",
    )
    complete = task("hotpotqa", DATA / "hotpotqa", setting="distractor", keep_incomplete=True)
    assert len(complete.questions("dev")) + len(complete.questions("test")) == 338
    assert not complete.left_out
    assert complete.notes[0].startswith("246 of 438 questions")
    assert "they are asked" in complete.notes[0]


@needs_data
def test_musique_as_it_comes():
    musique = task("musique", DATA / "musique", setting="distractor", top_k=30)
    assert len(musique.questions("train")) == 100
    assert len(musique.questions("dev")) + len(musique.questions("test")) == 74
    assert Counter(question.kind[:4] for question in musique.questions("test")).keys() <= {
        "2hop",
        "3hop",
        "4hop",
    }
    by_id = {
        question.id: question for split in ("dev", "test") for question in musique.questions(split)
    }
    common = by_id["2hop__269766_43945"]
    first = "crystallized the rebellious demand for independence from Great Britain"
    assert common.answers == (first, "Great Britain")
    assert musique.rule == "musique"
    assert [passage.title for passage in common.gold_passages] == [
        "The Age of Reason",
        "Thomas Paine",
    ]
    records = (
        record
        for file in (DATA / "musique").glob("dev*")
        for record in read_open_records(file, "musique")
    )
    contexts = {record.id: record.context for record in records}
    assert {len(passages) for passages in contexts.values()} == {20}
    titles = titles_found(
        musique, common, "the independence of Great Britain, a father and a mother of this island"
    )
    assert titles[0] == "Common sense"
    assert set(titles) <= {passage.title for passage in contexts["2hop__269766_43945"]}


@needs_data
def test_natural_questions_need_an_index():
    with pytest.raises(UserError, match=r"nq has no passages of its own, but task\.index is None"):
        task("nq", DATA / "nq_open")
    records = [
        record for file in (DATA / "nq_open").iterdir() for record in read_open_records(file, "nq")
    ]
    moon = next(
        record
        for record in records
        if record.text == "when was the last time anyone was on the moon"
    )
    assert len(records) == 500
    assert moon.answers == ("14 December 1972 UTC", "December 1972")


OTHERS = {  # a record in its official form, question, answers
    "triviaqa": (
        "unfiltered-web-dev.json",
        json.dumps(
            {
                "Data": [
                    {
                        "QuestionId": "tc_3",
                        "Question": "Where was she born?",
                        "Answer": {"Value": "Ghent", "Aliases": ["Gent"]},
                    }
                ],
                "Version": 1.0,
            }
        ),
        ("Where was she born?", ("Ghent", "Gent")),
    ),
    "popqa": (
        "popQA.tsv",
        "id\tprop\tquestion\tpossible_answers\n"
        '42\tcapital\tWhat is its capital?\t"[""The"", ""Ghent"", ""Gent""]"\n',
        ("What is its capital?", ("The", "Ghent", "Gent")),
    ),
    "ambigqa": (
        "dev_light.json",
        json.dumps(
            [
                {
                    "id": "-4469503464110108318",
                    "question": "When did it open?",
                    "annotations": [
                        {
                            "type": "multipleQAs",
                            "qaPairs": [
                                {"question": "In Ghent?", "answer": ["1961", "In 1961"]},
                                {"question": "In Bruges?", "answer": ["1972"]},
                            ],
                        },
                        {"type": "singleAnswer", "answer": ["1961"]},
                    ],
                }
            ]
        ),
        ("When did it open?", ("1961", "In 1961", "1972")),
    ),
    "bamboogle": (
        "Bamboogle Prerelease.csv",
        "Question,Answer\nWho came first?,James Madison\n",
        ("Who came first?", ("James Madison",)),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_other_sets_as_they_come(kind, packed, tmp_path):
    name, content, (text, answers) = OTHERS[kind]
    file = tmp_path / (name + ".gz" * packed)
    file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    (record,) = read_open_records(file, kind)
    assert record.text == text
    assert record.answers == answers
    if kind == "ambigqa":
        assert record.answer_sets == ((("1961", "In 1961"), ("1972",)), (("1961",),))


def test_what_is_no_record_is_named_with_its_place(tmp_path):
    file = tmp_path / "dev.jsonl"
    file.write_text(
        '{"question": "Who?", "answer": ["Ann"]}\n{"question": "Who?", "answer": "Ann"}\n'
    )
    with pytest.raises(
        UserError,
        match=r"dev\.jsonl, line 2: this is not a record of nq \(TypeError: answer is a string",
    ):
        list(read_open_records(file, "nq"))
    file.write_text('{"question": " ", "answer": ["Ann"]}\n')
    with pytest.raises(
        UserError, match=r"line 1: the question is blank, with the answers \['Ann'\]"
    ):
        list(read_open_records(file, "nq"))
    file.write_text('["no object"]\n')
    with pytest.raises(UserError, match=r"line 1: this is not a record of hotpotqa \(TypeError"):
        list(read_open_records(file, "hotpotqa"))
    trivia = tmp_path / "dev.json"
    trivia.write_text('{\n"Version": 1}')
    with pytest.raises(
        UserError, match="neither a list of records nor an object whose field Data is a list"
    ):
        list(read_open_records(trivia, "triviaqa"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "hotpotqa",
            {"data_dir": "nowhere"},
            "data_dir nowhere does not exist: put hotpot_train_v1.1.json and",
        ),
        (
            "popqa",
            {},
            "has no file with questions: put popQA.tsv from AlexTMallen/adaptive-retrieval there",
        ),
    ],
)
def test_what_a_task_lacks_is_said(tmp_path, kind, changes, message):
    with pytest.raises(UserError, match=message):
        task(kind, tmp_path, **changes)


@needs_data
def test_a_subset_is_the_same_on_every_machine():
    few = task("hotpotqa", DATA / "hotpotqa", max_questions=5)
    all_of_them = task("hotpotqa", DATA / "hotpotqa")
    for split in ("train", "dev", "test"):
        assert [q.id for q in few.questions(split)] == [q.id for q in all_of_them.questions(split)][
            :5
        ]
    everything = task("hotpotqa", DATA / "hotpotqa", dev_percent=0)
    assert not everything.questions("dev")
    assert len(everything.questions("test")) == 338


def test_a_question_in_both_files_is_not_trained_on(tmp_path):
    rows = [{"question": f"Who is {n}?", "answer": ["Ann"]} for n in range(4)]
    (tmp_path / "NQ-open.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "NQ-open.dev.jsonl").write_text(json.dumps(rows[1]) + "\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Ann", "text": "She is 1."}) + "\n")
    from mujica_jax.commands import index

    assert (
        index.main(
            ["build", "--corpus", str(corpus), "--kind", "bm25", "--out", str(tmp_path / "index")]
        )
        == 0
    )
    natural_questions = task(
        "nq", tmp_path, index=str(tmp_path / "index"), top_k=1, dev_percent=100
    )
    assert [q.text for q in natural_questions.questions("dev")] == ["Who is 1?"]
    expected = ["Who is 0?", "Who is 2?", "Who is 3?"]
    assert sorted(q.text for q in natural_questions.questions("train")) == expected
    assert titles_found(natural_questions, natural_questions.questions("dev")[0], "Ann") == ["Ann"]


def test_tasks_are_chosen_on_the_command_line():
    flags = ["--task.kind", "musique", "--task.data-dir", "musique", "--task.setting", "distractor"]
    chosen = override(load_config("two_wiki_text_smollm2"), flags, prog="eval").task
    assert chosen == KINDS["musique"](data_dir="musique", setting="distractor", top_k=3)


def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(b"[" * 1000)[:-20])
    (tmp_path / "test.csv").write_bytes(b"Question,Answer\n\xff,x\n")
    for name, kind, message in (
        ("dev.json.gz", "musique", "cannot be read"),
        ("test.csv", "bamboogle", "is not UTF-8"),
    ):
        with pytest.raises(UserError, match=message):
            list(read_open_records(tmp_path / name, kind))


def test_a_csv_of_another_set_is_refused(tmp_path):
    with (tmp_path / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["Q", "A"], ["Who?", "Ann"]])
    with pytest.raises(
        UserError,
        match=r"test\.csv, line 2: this is not a record of bamboogle \(KeyError: 'Question'\)",
    ):
        list(read_open_records(tmp_path / "test.csv", "bamboogle"))


DOWNLOAD = """
import hashlib, sys, pathlib, tensorflow_datasets as tfds
from mujica_jax.tasks.open_domain import builders
addresses = {address for kind in builders.DOWNLOADS.values() for address, _ in kind.values()}
assert addresses == builders.BUILDERS["nq"].url_infos.keys()
folder, served = map(pathlib.Path, sys.argv[1:3])
base, files = sys.argv[3], sorted(served.iterdir())
info = tfds.core.download.checksums.UrlInfo
known = {f"{base}/{f.name}": info(f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest(), f.name) for f in files}
names = (("train", "train"), ("validation", "dev"))
builders.DOWNLOADS = {
    "nq": {split: (f"{base}/NQ-open.{name}.jsonl", "") for split, name in names},
    "ambigqa": {split: (f"{base}/light.zip", f"{name}_light.json") for split, name in names},
}
for kind in builders.DOWNLOADS:
    builders.BUILDERS[kind].url_infos = known
    made = builders.BUILDERS[kind](data_dir=folder)
    made.download_and_prepare()
    print("made", made.info.splits["train"].num_examples, made.info.splits["validation"].num_examples, made.data_dir)
(served / "NQ-open.dev.jsonl").write_text("tampered")
try:
    builders.BUILDERS["nq"](data_dir=folder / "again").download_and_prepare()
except tfds.core.download.download_manager.NonMatchingChecksumError:
    print("refused")
builders.DOWNLOADS["ambigqa"]["train"] = f"{base}/light.zip", "renamed.json"
try:
    builders.BUILDERS["ambigqa"](data_dir=folder / "again").download_and_prepare()
except builders.UserError as error:
    print("named", error)
"""


@pytest.mark.slow
def test_builders_download_what_has_a_checksum_and_refuse_what_differs(tmp_path):
    served = tmp_path / "served"
    folder = tmp_path / "data"
    served.mkdir()
    lines = {"train": ["who is it", "what is it"], "dev": ["where is it"]}
    with zipfile.ZipFile(served / "light.zip", "w") as archive:
        for name, questions in lines.items():
            rows = [{"question": question, "answer": ["Oslo"]} for question in questions]
            (served / f"NQ-open.{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            annotations = [{"type": "singleAnswer", "answer": ["Oslo"]}]
            ambiguous = [{"id": q, "question": q, "annotations": annotations} for q in questions]
            archive.writestr(f"{name}_light.json", json.dumps(ambiguous))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [str(folder), str(served), f"http://127.0.0.1:{server.server_port}"]
        ran = subprocess.run(
            [sys.executable, "-c", DOWNLOAD, *words], capture_output=True, text=True, cwd=ROOT
        )
        server.shutdown()
    assert ran.returncode == 0, ran.stderr
    commands = [
        line.split()
        for line in ran.stdout.splitlines()
        if line.startswith(("made", "refused", "named"))
    ]
    assert [words[:3] for words in commands[:3]] == [
        ["made", "2", "1"],
        ["made", "2", "1"],
        ["refused"],
    ]
    assert commands[3][2:6] == ["has", "no", "file", "renamed.json:"]
    of_split = [
        (training, record.text) for training, record in read_set(Path(commands[1][3]), "ambigqa")
    ]
    assert sorted(of_split) == [(False, "where is it"), (True, "what is it"), (True, "who is it")]
