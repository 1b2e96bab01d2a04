"""What is estimated before a build is near what the build leaves on the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mujica_jax.commands import index
from tests.helpers.paths import ROOT
from tests.helpers.tiny_embedder import tiny_embedder, write_corpus

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
    ("kind", "extra"),
    [("bm25", []), ("exact", []), ("exact", ["--storage", "int8"]), ("scann", [])],
)
def test_the_disk_is_as_full_as_estimated(folder, capsys, kind, extra):
    if kind == "scann":
        pytest.importorskip(
            "scann", reason="ScaNN is not installed: it has wheels for Linux on x86-64 alone"
        )
    assert index.main(["estimate", *words(folder, kind), *extra]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["passages"] == PASSAGES
    out = folder / f"{kind}{''.join(extra)}"
    assert index.main(["build", *words(folder, kind), *extra, "--out", str(out)]) == 0
    files = json.loads((out / "manifest.json").read_text())["files"]

    def bytes_of(*beginnings: str) -> int:
        return sum(file["bytes"] for file in files if file["name"].startswith(beginnings))

    built = {
        "passages": bytes_of("passages."),
        "words": bytes_of("bm25/"),
        "embeddings": bytes_of("embeddings."),
        "scann": bytes_of("scann/"),
    }
    assert estimate["disk_bytes"] == pytest.approx(
        {name: size for name, size in built.items() if size}, rel=0.1, abs=SMALL_BYTES
    )
    assert (
        estimate["searching_bytes"]
        <= 1.1 * max(built["words"], built["embeddings"], built["scann"]) + SMALL_BYTES
    )


def test_the_rows_lie_on_the_devices_of_a_host(folder, capsys):
    """21 million rows of 64 bfloat16 numbers lie on 8 devices.

    They are padded to blocks of 16,384 rows, which are 161 a device.
    """
    host = ["--passages", "21000000", "--devices", "8"]
    assert index.main(["estimate", *words(folder, "exact"), *host]) == 0
    assert json.loads(capsys.readouterr().out)["device_bytes"] == 161 * 16_384 * 128
    assert index.main(["estimate", *words(folder, "exact"), "--devices", "0"]) == 2
    assert "--devices is 0: give at least 1" in capsys.readouterr().err
    assert index.main(["estimate", *words(folder, "bm25"), "--devices", "4"]) == 2
    assert "--devices is 4, but an index of kind bm25 does not use it" in capsys.readouterr().err


PEAK = """
import dataclasses, sys
from pathlib import Path
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import Passage, stream_corpus
from mujica_jax.retrieval.estimates import WORDS_SAMPLE, estimate_sample
from mujica_jax.retrieval.text.index import IndexSpec
from mujica_jax.retrieval.text.corpus import PassageFile, write_passages

def kibibytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])

corpus, out, tokeniser = sys.argv[1:]
write_passages(stream_corpus([corpus]), Path(out))
passages = PassageFile(Path(out))
estimated = estimate_sample(IndexSpec(kind="bm25", tokeniser=tokeniser), passages[:WORDS_SAMPLE], len(passages))
Path("/proc/self/clear_refs").write_text("5")
before = kibibytes("VmRSS")
Bm25Index(passages, tokeniser)
print((kibibytes("VmHWM") - before) * 1024, estimated["building_bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_an_index_of_words_takes_as_much_memory_as_estimated(tmp_path, tokeniser):
    line = [
        json.dumps({"title": f"title {n}", "text": " ".join(f"w{n * k % 977}" for k in range(60))})
        for n in range(20_000)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(line))
    command = [
        sys.executable,
        "-c",
        PEAK,
        str(tmp_path / "corpus.jsonl"),
        str(tmp_path / "out"),
        tokeniser,
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    grown, estimated = map(int, run.stdout.split())
    assert estimated / 1.6 < grown < 1.6 * estimated, (grown, estimated)


def test_a_number_of_passages_takes_the_place_of_counting(folder, capsys):
    for passages in (1_000, 1_000_000):
        assert index.main(["estimate", *words(folder, "exact"), "--passages", str(passages)]) == 0
    small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (
        large["disk_bytes"]["embeddings"]
        == 1000 * small["disk_bytes"]["embeddings"]
        == 1_000_000 * 64 * 2
    )
    assert index.main(["estimate", *words(folder, "exact"), "--passages", "0"]) == 2
    (folder / "empty.json").write_text("[]")
    assert index.main(["estimate", "--corpus", str(folder / "empty.json"), "--kind", "bm25"]) == 2


def test_an_estimate_counts_what_a_build_would_leave_out(folder, capsys, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    good = {"title": "a title", "text": "a text"}
    corpus.write_text(
        "".join(
            json.dumps(passage) + "\n"
            for passage in (good, {"title": "no text"}, good | {"text": "b"})
        )
    )
    assert index.main(["estimate", "--kind", "bm25", "--corpus", str(corpus)]) == 2
    assert "corpus.jsonl, line 2: the passage's text is None" in capsys.readouterr().err
    assert index.main(["estimate", "--kind", "bm25", "--corpus", str(corpus), "--skip"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["passages"] == 2
    assert estimate["skipped"] == 1
