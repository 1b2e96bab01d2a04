"""What is estimated before a build is near what the build leaves on the disk."""

import json
from pathlib import Path

import pytest
from tiny_embedder import tiny_embedder, write_corpus

from mujica_jax import index

PASSAGES = 1500
SMALL_BYTES = 50_000  # codebooks and configurations, whatever the size of the corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("estimates")
    write_corpus(root / "corpus.jsonl", PASSAGES)
    tiny_embedder(root / "tiny", hidden_size=64)
    return root


def words(folder: Path, kind: str) -> list[str]:
    chosen = ["--corpus", str(folder / "corpus.jsonl"), "--kind", kind]
    return chosen if kind == "bm25" else [*chosen, "--embedder", str(folder / "tiny")]


@pytest.mark.parametrize(
    ("kind", "extra"), [("bm25", []), ("accelerator", []), ("accelerator", ["--storage", "int8"]), ("scann", [])]
)
def test_the_disk_is_as_full_as_estimated(folder, capsys, kind, extra):
    if kind == "scann":
        pytest.importorskip("scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone")
    assert index.main(["estimate", *words(folder, kind), *extra]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passages"] == PASSAGES and max(found["seconds"].values()) > 0
    out = folder / f"{kind}{''.join(extra)}"
    assert index.main(["build", *words(folder, kind), *extra, "--out", str(out)]) == 0
    files = json.loads((out / "manifest.json").read_text())["files"]

    def of(*beginnings: str) -> int:
        return sum(file["bytes"] for file in files if file["name"].startswith(beginnings))

    built = {"passages": of("passages."), "words": of("bm25/"), "embeddings": of("embeddings."), "scann": of("scann/")}
    assert found["disk_bytes"] == pytest.approx(
        {name: size for name, size in built.items() if size}, rel=0.1, abs=SMALL_BYTES
    )
    assert found["searching_bytes"] <= 1.1 * max(built["words"], built["embeddings"], built["scann"]) + SMALL_BYTES


def test_a_number_of_passages_takes_the_place_of_counting(folder, capsys):
    for passages in (1_000, 1_000_000):
        assert index.main(["estimate", *words(folder, "accelerator"), "--passages", str(passages)]) == 0
    small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert large["disk_bytes"]["embeddings"] == 1000 * small["disk_bytes"]["embeddings"] == 1_000_000 * 64 * 2
    assert index.main(["estimate", *words(folder, "accelerator"), "--passages", "0"]) == 2
    (folder / "empty.json").write_text("[]")
    assert index.main(["estimate", "--corpus", str(folder / "empty.json"), "--kind", "bm25"]) == 2
