"""The kind of a dense index follows from its number of passages, is chosen once, and is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.retrieval.manifest import read_manifest
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text.exact import ExactSearch
from mujica_jax.retrieval.text.scann import ScannSearch
from tests.helpers.killed_build import kill_at, small_chunks
from tests.helpers.paths import ROOT
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

PASSAGES = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with a corpus of 60 passages, its first 59, and an embedder."""
    folder = tmp_path_factory.mktemp("kinds")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "fewer.jsonl").write_text("".join(lines[:-1]))
    tiny_embedder(folder / "tiny")
    return folder


def words(root: Path, out: Path, *flags: str, corpus: str = "corpus.jsonl") -> list[str]:
    return [
        "build",
        "--corpus",
        str(root / corpus),
        "--embedder",
        str(root / "tiny"),
        "--out",
        str(out),
        *flags,
    ]


def test_without_a_kind_an_index_is_exact_up_to_the_threshold(root, tmp_path, capsys, monkeypatch):
    assert indexes.MAX_EXACT_PASSAGES == 100_000
    monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", PASSAGES)
    assert index.main(words(root, tmp_path / "index")) == 0
    expected = (
        "60 passages: an exact index (ScaNN above 60; --kind scann builds a ScaNN index anyway)"
    )
    assert expected in capsys.readouterr().err.splitlines()
    manifest = read_manifest(tmp_path / "index")
    assert manifest["kind"] == "exact"
    assert manifest["passages"] == 60
    assert ("recall" in manifest) is False
    assert isinstance(indexes.open_index(tmp_path / "index")._vectors, ExactSearch)


def test_one_passage_more_than_the_threshold_makes_it_scann(root, tmp_path, capsys, monkeypatch):
    pytest.importorskip(
        "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
    )
    monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", PASSAGES - 1)
    assert index.main(words(root, tmp_path / "fewer", "--kind", "auto", corpus="fewer.jsonl")) == 0
    assert index.main(words(root, tmp_path / "index", "--kind", "auto")) == 0
    shown = capsys.readouterr().err.splitlines()
    assert (
        "59 passages: an exact index (ScaNN above 59; --kind scann builds a ScaNN index anyway)"
        in shown
    )
    assert (
        "60 passages: a ScaNN index (exact up to 59; --kind exact builds an exact index anyway)"
        in shown
    )
    assert isinstance(indexes.open_index(tmp_path / "fewer")._vectors, ExactSearch)
    assert isinstance(indexes.open_index(tmp_path / "index")._vectors, ScannSearch)


@pytest.mark.parametrize(("threshold", "kind"), [(60, "exact"), (59, "scann")])
def test_a_kind_that_was_chosen_is_the_index_of_that_kind(
    root, tmp_path, monkeypatch, threshold, kind
):
    if kind == "scann":
        pytest.importorskip(
            "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
        )
    monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", threshold)
    assert (
        index.main(words(root, tmp_path / "chosen"))
        == index.main(words(root, tmp_path / "named", "--kind", kind))
        == 0
    )
    chosen = read_manifest(tmp_path / "chosen")
    named = read_manifest(tmp_path / "named")
    assert chosen["version"] == named["version"]
    assert {**chosen, "seconds": 0} == {**named, "seconds": 0}

    # Either command finds the index of the other there already, also where the rule would choose
    # otherwise by now.
    monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", 119 - threshold)
    assert index.main(words(root, tmp_path / "chosen", "--kind", kind)) == 0
    assert index.main(words(root, tmp_path / "named")) == 0
    assert read_manifest(tmp_path / "named") == named


def test_the_embeddings_of_another_index_are_counted_too(root, tmp_path, capsys, monkeypatch):
    pytest.importorskip(
        "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
    )
    assert index.main(words(root, tmp_path / "exact")) == 0
    monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", 59)
    assert (
        index.main(
            ["build", "--embeddings", str(tmp_path / "exact"), "--out", str(tmp_path / "scann")]
        )
        == 0
    )
    assert "60 passages: a ScaNN index" in capsys.readouterr().err
    assert read_manifest(tmp_path / "scann")["kind"] == "scann"


@pytest.mark.parametrize(
    ("function", "call"),
    [
        # The corpus is read, and what was chosen is not written yet.
        pytest.param("text.index.write_json", 2, marks=pytest.mark.slow),
        ("text.vectors.write_json", 2),
    ],
)
def test_a_killed_build_without_a_kind_goes_on_as_the_kind_it_chose(
    root, tmp_path, capsys, monkeypatch, function, call
):
    small_chunks(monkeypatch)
    folder = tmp_path / "killed"
    assert index.main(words(root, tmp_path / "whole")) == 0
    kill_at(function, call, words(root, folder))
    chosen = json.loads((folder / "plan.json").read_text())["kind"]
    if function.startswith("text.vectors"):
        assert chosen == "exact"
        # as if another rule held where it is started again
        monkeypatch.setattr(indexes, "MAX_EXACT_PASSAGES", 59)
    else:
        assert chosen == "auto"
    capsys.readouterr()
    assert index.main(words(root, folder)) == 0
    continued = f"{folder} was started as an index of kind exact; continuing with it"
    assert (continued in capsys.readouterr().err.splitlines()) == (chosen == "exact")
    assert read_manifest(folder)["version"] == read_manifest(tmp_path / "whole")["version"]


def test_a_kind_that_size_does_not_choose_is_not_continued(root, tmp_path, capsys):
    bm25 = [
        "build",
        "--corpus",
        str(root / "corpus.jsonl"),
        "--kind",
        "bm25",
        "--out",
        str(tmp_path / "index"),
    ]
    assert index.main(bm25) == 0
    assert index.main(words(root, tmp_path / "index")) == 2
    assert "was started with kind 'bm25', but this build has 'auto'" in capsys.readouterr().err


def test_an_estimate_without_a_kind_is_of_the_kind_that_a_build_chooses(root, capsys, monkeypatch):
    pytest.importorskip(
        "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
    )
    estimate = [
        "estimate",
        "--corpus",
        str(root / "corpus.jsonl"),
        "--embedder",
        str(root / "tiny"),
    ]
    assert (
        index.main([*estimate, "--passages", "100000"])
        == index.main([*estimate, "--passages", "100001"])
        == 0
    )
    small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert small["kind"] == "exact"
    assert set(small["disk_bytes"]) == {"passages", "embeddings"}
    assert large["kind"] == "scann"
    assert set(large["disk_bytes"]) == {"passages", "embeddings", "scann"}
    assert small["why"].startswith("100,000 passages: an exact")
    assert large["why"].startswith("100,001 passages: a ScaNN")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--tokenizer default", (
            "--tokenizer is default, but an index of kind auto does not use it: leave it out, or "
            "give --kind bm25"
        )),
        ("--recall-target 0.9", (
            "--recall-target is 0.9, but an index of kind auto does not use it: leave it out, or "
            "give --kind exact"
        )),
        ("--languages en", "or give --kind graph"),
        (
            "--corpus dump.nt.gz",
            "dump.nt.gz holds triples, but --kind is auto, which builds an index of passages: give "
            "--kind graph",
        ),
        ("--corpus a.jsonl b.nt", "b.nt holds triples"),
    ],
)  # fmt: skip
def test_a_flag_or_a_file_of_another_kind_names_that_kind(root, tmp_path, capsys, flags, complaint):
    assert index.main([*words(root, tmp_path / "index"), *flags.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last
    assert not (tmp_path / "index").exists()


# A process in which ScaNN is not installed runs some commands, each on the platform that it names.
WITHOUT_SCANN = """
import contextlib, io, json, platform, sys
sys.modules["scann"] = None
from mujica_jax.commands import index
from mujica_jax.retrieval.text import index as indexes
indexes.MAX_EXACT_PASSAGES = 59
for command in json.loads(sys.argv[1]):
    platform.system, platform.machine = lambda: command["system"], lambda: command["machine"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = index.main(command["arguments"])
    print(json.dumps({"status": status, "out": out.getvalue(), "lines": err.getvalue().splitlines()}))
"""
MAC = ("Darwin", "arm64")
ARM = ("Linux", "aarch64")
LINUX = ("Linux", "x86_64")
WHERE_IT_WORKS = "build and search the index on Linux x86-64, for which ScaNN has wheels"


def without_scann(*commands: tuple[tuple[str, str], list[str]]) -> list[dict]:
    """Return what each command, with its platform, ended with and printed."""
    runs = [
        {"system": machine[0], "machine": machine[1], "arguments": arguments}
        for machine, arguments in commands
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WITHOUT_SCANN, json.dumps(runs)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def one_sentence(ended: dict) -> str:
    assert ended["status"] == 2
    assert ended["out"] == ""
    (line,) = ended["lines"]
    assert line.startswith("error: ")
    return line


def test_where_scann_is_missing_its_kind_is_refused_before_anything_is_read_and_auto_is_exact(
    root, tmp_path
):
    scann = words(root, tmp_path / "index", "--kind", "scann")
    on_mac, on_linux, auto = without_scann(
        (MAC, scann), (LINUX, scann), (ARM, words(root, tmp_path / "index"))
    )
    message = one_sentence(on_mac)
    assert "ScaNN cannot be imported on Darwin arm64 with Python 3." in message
    assert (
        "use --kind exact, which searches on any platform (approximately on an accelerator with "
        "--recall-target" in message
    )
    assert message.endswith(f", or {WHERE_IT_WORKS}")

    # Where ScaNN has wheels, the extra that installs it is named.
    assert one_sentence(on_linux).endswith(
        ", or install the extra `scann`, as in `pip install -e '.[scann]'` where mujica_jax was cloned"
    )

    assert auto["status"] == 0
    why = (
        "60 passages: an exact index, because ScaNN cannot be imported on Linux aarch64 with "
        "Python 3."
    )
    (line,) = [line for line in auto["lines"] if line.startswith(why)]
    assert line.endswith(f"; for a ScaNN index, {WHERE_IT_WORKS}")
    assert read_manifest(tmp_path / "index")["kind"] == "exact"
    assert len(indexes.open_index(tmp_path / "index").search(["word1"], 3)[0]) == 3


def test_where_scann_is_missing_an_index_of_it_is_not_opened_and_its_embeddings_are_of_use(
    root, tmp_path
):
    pytest.importorskip(
        "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
    )
    folder = tmp_path / "scann"
    questions = tmp_path / "questions.jsonl"
    assert index.main(words(root, folder, "--kind", "scann")) == 0
    questions.write_text('{"question": "word1?", "supporting_facts": ["title 1"]}\n')
    *opened, copied = without_scann(
        (MAC, ["query", "--index", str(folder), "word1"]),
        (LINUX, ["recall", "--index", str(folder), "--questions", str(questions)]),
        (ARM, ["serve", "--index", str(folder), "--port", "0"]),
        (
            MAC,
            [
                "build",
                "--embeddings",
                str(folder),
                "--kind",
                "exact",
                "--out",
                str(tmp_path / "exact"),
            ],
        ),
    )
    for message in map(one_sentence, opened):
        assert f"the index {folder} is of kind scann, but ScaNN cannot be imported on " in message
        assert (
            f"`python -m mujica_jax.index build --embeddings {folder} --kind exact --out DIR`"
            in message
        )

    # What the sentence says helps.
    assert copied["status"] == 0
    assert len(indexes.open_index(tmp_path / "exact").search(["word1"], 3)[0]) == 3


@pytest.mark.slow
def test_a_build_that_was_begun_as_scann_stays_one_where_scann_is_missing(root, tmp_path):
    """It stays one without --kind too.

    An exact index would be another one than the machine before has begun.
    """
    pytest.importorskip(
        "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
    )
    begun = tmp_path / "begun"
    kill_at("text.vectors.write_json", 2, words(root, begun, "--kind", "scann"))
    (continued,) = without_scann((ARM, words(root, begun)))
    assert "ScaNN cannot be imported on Linux aarch64" in one_sentence(continued)
    assert index.main(words(root, begun)) == 0
    assert read_manifest(begun)["kind"] == "scann"


LOADED = """
import sys
from mujica_jax.commands import index, train, eval, serve
def heavy():
    return {"scann", "tensorflow"} & {name.split(".")[0] for name in sys.modules}
at_start = heavy()
assert index.main(sys.argv[1:]) == 0
print(at_start, heavy())
"""


def test_scann_is_not_imported_before_it_is_needed(root, tmp_path):
    """Neither the entry points import it, nor the build of an index below the threshold."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LOADED, *words(root, tmp_path / "index")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "set() set()\n", run.stderr
