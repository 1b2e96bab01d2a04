"""Question sets are prepared for TensorFlow Datasets by one command, and load as from their
official files.
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import sample, train
from mujica_jax.config.files import load_config
from mujica_jax.errors import UserError
from mujica_jax.tasks import prepare
from mujica_jax.tasks.data_folder import (
    VERSION,
    data_folder,
    kind_of,
    with_data_folder,
)
from mujica_jax.tasks.official_files import OFFICIAL_FILES
from mujica_jax.trajectories.store import CONFIG
from tests.helpers import prepared_sets
from tests.helpers.fake_bucket import use
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import DATA, needs_data

PROGRAM = "tests.helpers.prepared_sets"
SEARCHED = ("two_wiki", "hotpotqa", "musique", "qald10")

# Prepares a set, and is killed while the folder is written.
KILLED = """
import os, signal, sys
from mujica_jax.tasks import prepare
from mujica_jax.tasks.open_domain import builders

def killed(self, examples):
    yield examples[0]
    os.kill(os.getpid(), signal.SIGKILL)

builders._Questions._generate_examples = killed
prepare.main(sys.argv[1:])
"""

# Starts programs where a package cannot be imported.
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from mujica_jax.commands import eval, train
from mujica_jax.tasks import prepare
statuses = [
    prepare.main(["hotpotqa", "--from", sys.argv[2]]),
    train.main(["qald10_v5e", "--init", "nowhere", "--run", "run", "--task.data-dir", "tfds:qald10"]),
    eval.main(["qald10_v5e", "--init", "nowhere", "--out", "out", "--task.data-dir", "tfds:qald10"]),
]
print(statuses)
"""

# Builds a task from a plain folder.
PLAIN = """
import sys
from mujica_jax.commands import eval, sample, train
from mujica_jax.config.tasks import HotpotConfig
from mujica_jax.tasks import prepare
from mujica_jax.tasks.data_folder import check_data_dir
from mujica_jax.tasks.open_domain.task import build
config = HotpotConfig(data_dir=sys.argv[1], top_k=2)
check_data_dir(config)
assert build(config).questions("train")
print(sorted({"tensorflow", "tensorflow_datasets"} & sys.modules.keys()))
"""


def hotpot(id: str, **changes: Any) -> dict[str, Any]:
    context = [
        ["Lisma", [f"The mill {id} is in ", "Venford."]],
        ["Kolm &amp; Sons", ["Kolm is a hill."]],
    ]
    fields = {
        "_id": id,
        "type": "bridge",
        "question": f"Where is {id}?",
        "answer": "Venford &amp; Co",
    }
    return (
        fields
        | {"context": context, "supporting_facts": [["Lisma", 0], ["Kolm &amp; Sons", 0]]}
        | changes
    )


def two_wiki_record(id: str, **changes: Any) -> dict[str, Any]:
    evidences = {
        "evidences": [["Lisma", "location", id], [id, "country", "Detroit"]],
        "evidences_id": [["Q1", "location", "Q2"], ["Q2", "country", "Q12439"]],
        "entity_ids": "Q1_Q2",
    }
    fields = {"type": "compositional", "question": f"Where is {id} of Lisma?", "answer": "Detroit"}
    return hotpot(id, answer_id="Q12439") | fields | evidences | changes


def musique(id: str, **changes: Any) -> dict[str, Any]:
    paragraphs = [
        {"title": "Lisma", "paragraph_text": f"Cafe\u0301 {id} is old.", "is_supporting": True},
        {"title": "Lisma", "paragraph_text": "Another Lisma.", "is_supporting": False},
    ]
    fields = {
        "id": id,
        "question": f"How old is {id}?",
        "answer": "12",
        "answer_aliases": ["twelve", "a dozen"],
    }
    return fields | {"answerable": True, "paragraphs": paragraphs} | changes


def qald(number: int, answer: dict[str, str]) -> dict[str, Any]:
    question = [
        {"language": language, "string": f"{word} {number}?"}
        for language, word in (("en", "Who"), ("de", "Wer"))
    ]
    answers = [{"head": {"vars": ["x"]}, "results": {"bindings": [{"x": answer}]}}]
    return {
        "id": str(number),
        "question": question,
        "query": {"sparql": "?x wdt:P1 wd:Q7"},
        "answers": answers,
    }


def write_official_files(root: Path) -> dict[str, Path]:
    """Write small files in the official formats. Return the folder of each set by its name."""
    folders = {name: root / name for name in (*SEARCHED, "corpus")}
    for folder in folders.values():
        folder.mkdir(parents=True)

    # The question t1 stands in both files, with other paragraphs.
    other = [["Elsewhere", ["Another text."]], ["Lisma", ["The mill t1 burnt down."]]]
    write_json(folders["hotpotqa"] / "hotpot_train_v1.1.json", [hotpot(f"t{n}") for n in range(4)])
    write_json(
        folders["hotpotqa"] / "hotpot_dev_distractor_v1.json",
        [*(hotpot(f"d{n}") for n in range(4)), hotpot("t1", context=other)],
    )

    lines = [musique(f"2hop__{n}_1") for n in range(3)]
    write_lines(folders["musique"] / "musique_ans_v1.0_train.jsonl", lines)
    lines = [musique(f"3hop__{n}_1") for n in range(3)] + [musique("2hop__9_9", answerable=False)]
    write_lines(folders["musique"] / "musique_ans_v1.0_dev.jsonl", lines)

    entity = {"type": "uri", "value": "http://www.wikidata.org/entity/Q42"}
    date = {
        "type": "literal",
        "value": "1996-06-15T00:00:00Z",
        "datatype": "http://www.w3.org/2001/XMLSchema#dateTime",
    }
    write_json(folders["qald10"] / "qald_10.json", {"questions": [qald(2, entity), qald(1, date)]})

    two_wiki = folders["two_wiki"]
    write_json(two_wiki / "train.json", [two_wiki_record(f"t{n}") for n in range(6)])
    dev = [two_wiki_record(f"d{n}") for n in range(6)] + [two_wiki_record("t1", context=other)]
    write_json(two_wiki / "dev.json", dev)
    write_json(
        two_wiki / "test.json",
        [two_wiki_record("h1", answer="", evidences=[], supporting_facts=[])],
    )
    aliases = [
        {
            "Q_id": "Q12439",
            "aliases": ["Motor City", "Detroit &amp; suburbs"],
            "demonyms": ["Detroiter"],
        },
        {"Q_id": "Q5", "aliases": [], "demonyms": []},
    ]
    write_lines(two_wiki / "id_aliases.json", aliases)

    # The same with a corpus and a graph of its own, and questions that were made for the corpus.
    corpus = folders["corpus"]
    write_json(corpus / "dev.json", dev)
    write_lines(corpus / "questions.jsonl", [two_wiki_record("d1"), two_wiki_record("q1")])
    write_json(
        corpus / "corpus.json",
        [
            {"title": "Lisma", "text": "The mill d1 is in Venford."},
            {"title": "Kolm & Sons", "text": "Kolm is a hill."},
            {"title": "Lisma", "text": "The mill q1 is in Venford."},
        ],
    )
    row = "Lisma\tlocation\td1\tQ1\tQ2\nLisma\tfounded by\tAnn\tQ1\tQ99\n"
    (corpus / "triples.tsv").write_text(
        f"subject\trelation\tobject\tsubject_qid\tobject_qid\n{row}"
    )
    return folders


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def write_lines(file: Path, values: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


def run(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the data sets of TensorFlow Datasets and the cache of questions
    below it.
    """
    variables = os.environ | {
        "TFDS_DATA_DIR": str(folder / "sets"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=variables | environment,
    )


def prepare_and_load(folders: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Prepare the sets, each twice, and return what `prepared_sets.py` has loaded and said."""
    write_json(folder / "folders.json", {name: str(path) for name, path in folders.items()})
    ran = run(["-m", PROGRAM, "folders.json", "loaded.json"], folder)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "loaded.json").read_text()) | {
        "output": ran.stdout,
        "errors": ran.stderr,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    folder: Path
    official: dict[str, Path]
    killed: subprocess.CompletedProcess[str]
    after_kill: list[str]  # files of the killed set
    after_kill_error: str
    results: dict[str, Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    """Return all four sets, of which one was killed first."""
    folder = tmp_path_factory.mktemp("prepared")
    official = write_official_files(folder / "official")
    killed = run(["-c", KILLED, "musique", "--from", str(official["musique"])], folder)
    after_kill = [path.name for path in (folder / "sets" / "mujica_musique").iterdir()]
    with pytest.raises(UserError) as refusal:
        data_folder(f"tfds:{folder}/sets/musique", "musique")
    named = {
        "2wiki": "two_wiki",
        "mujica_hotpotqa": "hotpotqa",
        "musique": "musique",
        "qald10": "qald10",
    }
    folders = {name: official[kind] for name, kind in named.items()}
    folders[f"{folder}/other/two_wiki"] = official["corpus"]
    return Prepared(
        folder=folder,
        official=official,
        killed=killed,
        after_kill=after_kill,
        after_kill_error=str(refusal.value),
        results=prepare_and_load(folders, folder),
    )


@pytest.fixture
def sets(prepared, tmp_path, monkeypatch) -> Path:
    """Return a copy of the prepared sets, which is the folder of TensorFlow Datasets."""
    shutil.copytree(prepared.folder / "sets", tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sets"


def refusal(data_dir: str, kind: str) -> str:
    with pytest.raises(UserError) as refused:
        data_folder(data_dir, kind)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", ["2wiki", "mujica_hotpotqa", "musique", "qald10", "corpus"])
def test_a_prepared_set_gives_what_its_official_files_give(prepared, name):
    kind = "two_wiki" if name == "corpus" else kind_of(name)
    key = f"{prepared.folder}/other/two_wiki" if name == "corpus" else name
    source = prepared.official["corpus" if name == "corpus" else kind]
    loaded = json.dumps(prepared.results[key]["loaded"])
    expected = json.dumps(prepared_sets.loaded(kind, str(source)))
    assert (
        loaded.replace(f"{prepared.folder}/other/mujica_two_wiki/{VERSION}", str(source))
        == expected
    )


def test_the_official_splits_and_aliases_of_2wiki_are_kept(prepared):
    questions, _, notes = prepared.results["2wiki"]["loaded"]["text False"]

    def ids_of(split: str) -> set[str]:
        return {question["id"] for question in questions[split]}

    assert ids_of("train") == {"t0", "t2", "t3", "t4", "t5"}, "t1 stands in dev.json too"
    assert ids_of("dev") | ids_of("test") == {"t1", *(f"d{n}" for n in range(6))}
    answers = ["Detroit", "Motor City", "Detroit & suburbs", "Detroiter"]
    assert all(
        question["answers"] == answers for of_split in questions.values() for question in of_split
    )
    assert notes == ["id_aliases.json adds aliases to the gold answers of 12 of 12 questions"]


def test_the_questions_of_a_corpus_and_its_graph_are_kept(prepared):
    loaded = prepared.results[f"{prepared.folder}/other/two_wiki"]["loaded"]
    asked = [
        question["id"] for of_split in loaded["text False"][0].values() for question in of_split
    ]
    assert sorted(asked) == ["d1", "q1"], "other questions of dev.json were not made for the corpus"
    assert len(loaded["records"]) == 8


def test_the_command_says_how_to_load_and_a_second_time_that_the_set_is_there(prepared):
    lines = prepared.results["output"].splitlines()
    assert all(
        set(result["statuses"]) == {0}
        for result in prepared.results.values()
        if isinstance(result, dict)
    )
    folder = prepared.folder / "sets" / "mujica_hotpotqa" / VERSION
    loading = "(4 in train, 5 in validation): --task.kind hotpotqa --task.data-dir tfds:hotpotqa"
    assert f"{folder} is prepared {loading}" in lines
    assert f"{folder} was already prepared {loading}" in lines
    assert (
        sum(f"--task.data-dir tfds:{prepared.folder}/other/two_wiki" in line for line in lines) == 2
    )
    assert "DEBUG" not in prepared.results["errors"]


def test_a_killed_preparation_leaves_nothing_that_loads_and_starts_again(prepared):
    assert prepared.killed.returncode == -9, prepared.killed.stderr
    assert any(name.startswith("incomplete.") for name in prepared.after_kill)
    assert VERSION not in prepared.after_kill
    assert "holds no prepared mujica_musique: prepare it with" in prepared.after_kill_error
    names = {path.name for path in (prepared.folder / "sets" / "mujica_musique").iterdir()}
    assert names == {VERSION, ".lock"}


def test_a_changed_byte_is_found_when_the_set_is_read(prepared):
    folder = prepared.folder / "sets" / "mujica_qald10" / VERSION
    assert prepared.results["changed byte"].startswith(
        f"the prepared data set {folder} is damaged (DataLossError: "
    )
    assert "\n" not in prepared.results["changed byte"]


@needs_data
@pytest.mark.slow
def test_prepared_samples_of_the_real_sets_give_the_same_questions(tmp_path):
    folders = {name: DATA / name for name in ("hotpotqa", "musique", "qald10")} | {
        "2wiki": DATA / "2wikimultihopqa"
    }
    results = prepare_and_load(folders, tmp_path)
    for name, folder in folders.items():
        expected = json.loads(json.dumps(prepared_sets.loaded(kind_of(name), str(folder))))
        assert results[name]["loaded"] == expected, name
    assert "(100 in train, 74 in validation): --task.kind musique" in results["output"]
    assert "(276 in validation): --task.kind qald10" in results["output"]


@pytest.mark.parametrize(
    "name",
    [
        "hotpotqa",
        "mujica_hotpotqa",
        f"hotpotqa:{VERSION}",
        f"hotpotqa/{VERSION}",
        "HotpotQA",
        "hotpot",
    ],
)
def test_a_set_is_found_by_each_of_its_names(sets, name):
    assert data_folder(f"tfds:{name}", "hotpotqa") == sets / "mujica_hotpotqa" / VERSION
    assert data_folder(f"tfds:{sets}/{name}", "hotpotqa") == sets / "mujica_hotpotqa" / VERSION


def test_the_newest_version_is_loaded(sets):
    home = sets / "mujica_hotpotqa"
    for version in ("2.0.9", "2.10.0"):
        shutil.copytree(home / VERSION, home / version)
    assert data_folder("tfds:hotpotqa", "hotpotqa") == home / "2.10.0"
    assert data_folder("tfds:hotpotqa:2.0.9", "hotpotqa") == home / "2.0.9"


def test_the_folder_of_tensorflow_datasets_is_searched(sets, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(sets.parent))
    assert f"{sets.parent}/tensorflow_datasets holds no prepared" in refusal(
        "tfds:hotpotqa", "hotpotqa"
    )
    sets.rename(sets.parent / "tensorflow_datasets")
    expected = sets.parent / "tensorflow_datasets" / "mujica_hotpotqa" / VERSION
    assert data_folder("tfds:hotpotqa", "hotpotqa") == expected
    assert data_folder("tfds:~/tensorflow_datasets/hotpotqa", "hotpotqa") == expected


@pytest.mark.parametrize(
    ("data_dir", "sentence"),
    [
        (
            "tfds:hotpotq",
            "unknown data set 'hotpotq': did you mean hotpotqa? choose from two_wiki, hotpotqa,",
        ),
        (
            "tfds:imagenet",
            "unknown data set 'imagenet': choose from two_wiki, hotpotqa, musique, qald10,",
        ),
        ("tfds:", "unknown data set '': choose from"),
        (
            "tfds:musique",
            "task.kind is hotpotqa: give --task.kind musique, or --task.data-dir tfds:hotpotqa",
        ),
        (
            "tfds:hotpotqa:1.0.0",
            f"has no version '1.0.0': choose from {VERSION}, or leave out the version",
        ),
        ("tfds:hotpotqa:", f"has no version '': choose from {VERSION}"),
        ("tfds:hotpotqa/9.0.0", f"has no version '9.0.0': choose from {VERSION}"),
        (
            "tfds:/nowhere/hotpotqa",
            "`python -m mujica_jax.tasks.prepare hotpotqa --from DIR --data-dir /nowhere`",
        ),
        (
            "tfds:s3://bucket/hotpotqa",
            "s3://bucket is neither a local folder nor a bucket: give a local folder or gs://",
        ),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused(sets, data_dir, sentence):
    message = refusal(data_dir, "hotpotqa")
    assert message.startswith(f"task.data_dir is {data_dir}")
    assert sentence in message


def test_a_set_that_is_not_prepared_says_the_command_and_the_folder(sets):
    message = refusal("tfds:nq", "nq")
    assert f"{sets} holds no prepared mujica_nq: prepare it with" in message
    assert (
        "`python -m mujica_jax.tasks.prepare nq --from DIR`, where DIR holds NQ-open.train.jsonl"
        in message
    )


def test_a_set_in_a_bucket_is_fetched(sets, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = use(monkeypatch)
    folder = sets / "mujica_two_wiki" / VERSION
    for file in folder.iterdir():
        bucket.put("bucket", f"sets/mujica_two_wiki/{VERSION}/{file.name}", file.read_bytes())
    copy = data_folder("tfds:gs://bucket/sets/two_wiki", "two_wiki")
    assert {(copy / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir()} == {
        True
    }
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/sets")
    assert data_folder(f"tfds:two_wiki:{VERSION}", "two_wiki") == copy
    assert "has no version '1.0.0'" in refusal("tfds:two_wiki:1.0.0", "two_wiki")
    message = refusal("tfds:hotpotqa", "hotpotqa")
    assert (
        "hotpotqa --from DIR --data-dir FOLDER` and copy FOLDER to gs://bucket/sets, where DIR"
        in message
    )


def test_two_processes_do_not_prepare_one_set_at_once(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare.data_folder, "require_tensorflow", lambda purpose: None)
    home = tmp_path / "mujica_musique"
    home.mkdir()
    with (home / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [
            "musique",
            "--from",
            str(prepared.official["musique"]),
            "--data-dir",
            str(tmp_path),
        ]
        assert f"another process is preparing {home}: wait for it" in command_error(capsys, *words)


def overwrite(file: Path, content: str) -> None:
    file.write_text(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no description": ("dataset_info.json", Path.unlink, "dataset_info.json is missing"),
    "half a description": (
        "dataset_info.json",
        lambda file: overwrite(file, file.read_text()[:99]),
        "dataset_info.json cannot be read: JSONDecodeError",
    ),
    "another description": (
        "dataset_info.json",
        lambda file: overwrite(file, "[]"),
        "cannot be read: TypeError",
    ),
    "no features": ("features.json", Path.unlink, "features.json is missing"),
    "no records": ("*.tfrecord*", Path.unlink, "is missing"),
    "half the records": (
        "*.tfrecord*",
        lambda file: os.truncate(file, 99),
        "has 99 bytes but should have",
    ),
    "no aliases": ("id_aliases.json", Path.unlink, "id_aliases.json is missing"),
    "other aliases": (
        "id_aliases.json",
        lambda file: overwrite(file, "{}"),
        "id_aliases.json should have",
    ),
    "no list of files": (
        "official_files.json",
        lambda file: overwrite(file, "["),
        "official_files.json cannot be",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name_and_by_path(sets, damage):
    folder = sets / "mujica_two_wiki" / VERSION
    pattern, break_file, sentence = DAMAGES[damage]
    break_file(sorted(folder.glob(pattern))[-1])
    for data_dir in ("tfds:two_wiki", str(folder)):
        message = refusal(data_dir, "two_wiki")
        assert message.startswith(f"the prepared data set {folder} is damaged (")
        assert sentence in message
        assert (
            f"`python -m mujica_jax.tasks.prepare two_wiki --from DIR --data-dir {sets}`" in message
        )


def test_the_path_of_another_set_is_refused(sets):
    folder = sets / "mujica_musique" / VERSION
    assert (
        f"{folder} holds the data set mujica_musique of TensorFlow Datasets, but task.kind is "
        "hotpotqa: give" in (refusal(str(folder), "hotpotqa"))
    )


@pytest.mark.parametrize("program", ["train", "eval", "sample"])
def test_programs_refuse_a_name_before_they_load_or_write_anything(sets, program, capsys):
    if program == "train":
        words = [
            "hotpotqa_v5e",
            "--init",
            "nowhere",
            "--run",
            "run",
            "--task.data-dir",
            "tfds:hotpotq",
        ]
        status = train.main(words)
    elif program == "eval":
        words = [
            "hotpotqa_v5e",
            "--init",
            "smollm2",
            "--out",
            "out",
            "--task.data-dir",
            "tfds:hotpotq",
        ]
        status = evaluation.main(words)
    else:
        config = dataclasses.replace(load_config("hotpotqa_v5e"), run="run")
        (sets.parent / "begun").mkdir()
        write_json(sets.parent / "begun" / CONFIG, {"config": dataclasses.asdict(config)})
        status = sample.main(["--run", "begun", "--data-dir", "tfds:hotpotq"])
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("error: task.data_dir is tfds:hotpotq: unknown data set 'hotpotq'")
    assert {path.name for path in sets.parent.iterdir()} <= {"sets", "begun"}


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow_datasets"])
def test_without_tensorflow_datasets_the_extra_to_install_is_named(prepared, tmp_path, package):
    shutil.copytree(prepared.folder / "sets" / "mujica_qald10", tmp_path / "sets" / "mujica_qald10")
    ran = run(["-c", WITHOUT, package, str(prepared.official["hotpotqa"])], tmp_path)
    assert ran.stdout.strip() == "[2, 2, 2]", ran.stderr
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3, ran.stderr
    message = (
        f"needs the package {package}, but {package} is not installed: install the extra `tfds`"
    )
    assert all(message in error for error in errors), ran.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"sets", "cache"}


def test_a_plain_folder_is_read_without_tensorflow(prepared, tmp_path):
    ran = run(["-c", PLAIN, str(prepared.official["hotpotqa"])], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    """The limit of a file's size stands in for a full disk: TensorFlow reports both in its own
    way.
    """
    official = tmp_path / "official"
    official.mkdir()
    paragraphs = [{"title": "Lisma", "paragraph_text": "A mill. " * 40_000, "is_supporting": True}]
    write_lines(
        official / "musique_ans_v1.0_train.jsonl", [musique("2hop__1_1", paragraphs=paragraphs)]
    )
    program = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    )
    program += "from mujica_jax.tasks import prepare\nraise SystemExit(prepare.main(sys.argv[1:]))"
    ran = run(["-c", program, "musique", "--from", str(official)], tmp_path)
    assert ran.returncode == 2, ran.stderr
    (error,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert f"musique could not be prepared in {tmp_path / 'sets'} (" in error
    assert "give another --data-dir" in error
    assert [path.name for path in (tmp_path / "sets" / "mujica_musique").iterdir()] == [".lock"]


def command_error(capsys, *words: str) -> str:
    """Return the one line that the command says before it ends with status 2."""
    assert prepare.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    return output.err


def test_the_command_refuses_what_it_cannot_prepare(sets, prepared, tmp_path, capsys):
    needs = (
        "put musique_ans_v1.0_train.jsonl and musique_ans_v1.0_dev.jsonl (about 0.3 GB, from "
        "https://github.com/StonyBrookNLP/musique), plain or .gz, into a folder"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "musique_v1.0.zip").touch()
    assert "unknown data set 'musiqe': did you mean musique?" in command_error(
        capsys, "musiqe", "--from", "empty"
    )
    assert f"musique cannot be downloaded: {needs} and give it with --from" in command_error(
        capsys, "musique"
    )
    missing = command_error(capsys, "musique", "--from", "nowhere")
    assert f"--from is nowhere, which does not exist: {needs}" in missing
    empty = command_error(capsys, "musique", "--from", "empty")
    assert f"--from is empty, which has no file with questions of musique: {needs}" in empty
    packed = command_error(capsys, "musique", "--from", "packed")
    assert "has no file with questions of musique: unpack musique_v1.0.zip there" in packed
    official = str(prepared.official["musique"])
    assert "on a local disk, but the folder is gs://b/sets" in command_error(
        capsys, "musique", "--from", official, "--data-dir", "gs://b/sets"
    )


def test_a_set_of_other_files_is_not_mistaken_for_this_one(sets, prepared, tmp_path, capsys):
    changed = tmp_path / "changed"
    shutil.copytree(prepared.official["two_wiki"], changed)
    write_lines(
        changed / "id_aliases.json", [{"Q_id": "Q12439", "aliases": ["Motown"], "demonyms": []}]
    )
    error = command_error(capsys, "two_wiki", "--from", str(changed))
    assert (
        f"was already prepared, but from other files than those in {changed} (id_aliases.json): "
        "remove" in error
    )
    assert prepare.main(["two_wiki"]) == 2, "2WikiMultihopQA is not downloaded"


def test_the_help_says_what_each_set_needs(capsys):
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--help"])
    assert ended.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for kind, official in OFFICIAL_FILES.items():
        assert kind in text
        assert official.page in text
        assert official.size in text
        assert all(name in text for name in official.names)


def test_a_configuration_keeps_the_name_and_the_task_gets_the_folder(sets):
    task = dataclasses.replace(load_config("hotpotqa_v5e").task, data_dir="tfds:hotpotqa")
    assert with_data_folder(task) == dataclasses.replace(
        task, data_dir=str(sets / "mujica_hotpotqa" / VERSION)
    )
    assert with_data_folder(dataclasses.replace(task, data_dir="plain")).data_dir == "plain"
