"""Disks that are full, and directories that are damaged or somebody else's: one sentence, and what
it says to do helps.
"""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mujica_jax.commands import index
from mujica_jax.retrieval import manifest as manifests
from mujica_jax.retrieval.text import index as indexes
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

PASSAGES = 1100  # so many that ScaNN learns partitions


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return corpora and an embedder, and whole indexes of embeddings and of words."""
    root = tmp_path_factory.mktemp("disk")
    tiny_embedder(root / "tiny", hidden_size=64)
    write_corpus(root / "corpus.jsonl", PASSAGES)
    (root / "short.jsonl").write_text('{"title": "a", "text": "b"}\n' * PASSAGES)
    # its numbers take more room than its text
    vocabulary = " ".join(f"{number:03x}" for number in range(2000))
    (root / "words.jsonl").write_text(json.dumps({"title": "all", "text": vocabulary}))
    header = "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
    (root / "graph.tsv").write_text(
        header + "".join(f"Film {n}\tdirector\tAnn\tQ{n}\tQ0\n" for n in range(1, 3000))
    )
    assert index.main(command(root, "exact", root / "dense")) == 0
    assert index.main(command(root, "bm25", root / "bm25")) == 0
    return root


def command(root: Path, kind: str, out: Path) -> list[str]:
    build = ["build", "--kind", kind, "--out", str(out)]
    if kind == "scann":
        return [*build, "--embeddings", str(root / "dense")]
    if kind == "exact":
        build += ["--embedder", str(root / "tiny")]
    corpus = {"graph": "graph.tsv", "bm25": "words.jsonl", "exact": "short.jsonl"}[kind]
    return [*build, "--corpus", str(root / corpus)]


@pytest.fixture
def limited():
    """Return a function that limits how large a file may become during a call.

    The error is another one than of a full disk, and reaches the same places.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def call(most_bytes: int, program: Callable[[], int]) -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
        try:
            return program()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return call


@pytest.mark.parametrize(
    ("kind", "most_bytes", "done"),
    [
        ("bm25", 4_000, ()),
        ("bm25", 14_000, ("passages.arrow",)),
        ("exact", 100_000, ("passages.arrow",)),
        ("scann", 10_000, ("passages.arrow", "embeddings.bfloat16")),
        ("graph", 100_000, ("plan.json",)),
    ],
)
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(
    folder, tmp_path, capsys, limited, kind, most_bytes, done
):
    if kind == "scann":
        pytest.importorskip(
            "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
        )
    out = tmp_path / "out"
    words = command(folder, kind, out)
    assert limited(most_bytes, lambda: index.main(words)) == 2
    shown = capsys.readouterr().err
    last = shown.splitlines()[-1]
    assert last.startswith(f"error: {out} cannot be written (")
    assert "Traceback" not in shown
    assert "free some space" in last
    assert last.endswith("start the same command again; it continues where this one stopped")
    inodes = {name: (out / name).stat().st_ino for name in done}
    assert not (out / "manifest.json").exists()
    assert index.main(words) == 0
    assert kind == "graph" or inodes == {name: (out / name).stat().st_ino for name in done}, (
        "what was done is not again"
    )
    manifests.read_manifest(out)


@pytest.mark.parametrize("finished", [True, False])
def test_what_a_damaged_directory_is_said_to_need_helps(folder, tmp_path, capsys, finished):
    out = Path(shutil.copytree(folder / "bm25", tmp_path / "out"))
    if finished:
        content = bytearray((out / "passages.arrow").read_bytes())
        content[len(content) // 2] ^= 1
        (out / "passages.arrow").write_bytes(content)
    else:
        (out / "manifest.json").unlink()
        (out / "passages.arrow").write_bytes(b"")
    words = command(folder, "bm25", out)
    # Nothing is mended in place.
    for _ in range(2):
        assert index.main(words) == 2
        assert f"remove {out} and build the index again" in capsys.readouterr().err
    shutil.rmtree(out)
    assert index.main(words) == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (None, "is damaged (its version is None, but "),
        ({"tokeniser": ...}, "is damaged (its version is "),
        ({"tokeniser": 3}, "is damaged (its version is "),
        ({"passages": "many"}, "is damaged (its version is "),
        ({"files": "none"}, "is damaged (its version is "),
        ({"files": [{"name": "passages.arrow"}]}, "is damaged (its version is "),
        (
            {"version": "../../elsewhere"},
            "is damaged (its version is '../../elsewhere', but its content has version ",
        ),
        ({"version": ["a"]}, "is damaged (its version is ['a'], but its content has version "),
        ({"embedder": 3}, "has the embedder 3, which is not a name"),
        ({"prefixes": ["query: "]}, "has the prefixes ['query: '], which is not a name"),
    ],
)
def test_a_manifest_that_was_changed_is_named(folder, tmp_path, capsys, change, complaint):
    copy = Path(shutil.copytree(folder / "bm25", tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    changed = {"format": 1} if change is None else manifest | change
    fields = {name: value for name, value in changed.items() if value is not ...}
    (copy / "manifest.json").write_text(json.dumps(fields))
    assert index.main(["query", "--index", str(copy), "001"]) == 2
    shown = capsys.readouterr().err
    assert f"manifest.json {complaint}" in shown
    assert f"remove {copy} and build the index again" in shown


def test_a_directory_whose_lock_cannot_be_written_is_refused(folder, tmp_path, capsys):
    """The index may be another user's.

    Root may write there, so that the lock is a directory here.
    """
    out = tmp_path / "out"
    (out / ".lock").mkdir(parents=True)
    assert index.main(command(folder, "bm25", out)) == 2
    assert (
        f"{out}/.lock cannot be written (Is a directory): choose another --out"
        in capsys.readouterr().err
    )


def test_the_version_is_that_of_the_content(folder, tmp_path):
    """It does not depend on where an embedder lies, on its name or on the time of a build."""
    versions = set()
    for fields in (
        {"seconds": 1, "embedder": "/a", "prefixes": None},
        {"seconds": 2, "embedder": "/b"},
    ):
        versions.add(manifests.commit(tmp_path, {"kind": "exact", **fields})["version"])
    assert len(versions) == 1
    versions.add(manifests.commit(tmp_path, {"kind": "scann"})["version"])
    assert len(versions) == 2
    (tmp_path / "file").write_text("another content")
    versions.add(manifests.commit(tmp_path, {"kind": "scann"})["version"])
    assert len(versions) == 3


def test_an_embedder_that_lies_elsewhere_by_now_is_the_same_build(folder, tmp_path, capsys):
    out = Path(shutil.copytree(folder / "dense", tmp_path / "out"))
    shutil.copytree(folder / "tiny", tmp_path / "moved")
    words = [*command(folder, "exact", out), "--embedder", str(tmp_path / "moved")]
    assert index.main(words) == 0
    assert "already built" in capsys.readouterr().err
    plan = json.loads((out / "plan.json").read_text())
    assert plan.pop("prefixes") is None
    # Older plans have no prefixes.
    (out / "plan.json").write_text(json.dumps(plan))
    assert index.main(words) == 0
    other = str(tiny_embedder(tmp_path / "other", hidden_size=64, seed=1))
    assert index.main([*words, "--embedder", other]) == 2
    assert (
        f"was started with embedder '{folder}/tiny', but this build has '{other}'"
        in capsys.readouterr().err
    )
    assert (
        indexes.open_index(out, str(tmp_path / "moved")).version
        == indexes.open_index(folder / "dense").version
    )
