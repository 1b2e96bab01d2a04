"""Indexes on disk: what is built is found again, killed builds go on, and damage is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.retrieval import manifest as manifests
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.text import exact
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text.corpus import PassageFile, read_corpus, write_passages
from mujica_jax.retrieval.text.dense import DenseIndex, best_rows, ranked
from mujica_jax.retrieval.text.vectors import compressed, encoded_rows, open_embeddings
from tests.helpers.killed_build import kill_at, small_chunks
from tests.helpers.paths import ROOT
from tests.helpers.tiny_embedder import WORDS, tiny_embedder, write_corpus

PASSAGES = 90
QUERIES = ["word1 word2", "word50", "word7 word8 word9 word7"]


class Silent:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.told: dict[str, list[int]] = {}

    def line(self, text: str) -> None:
        pass

    def stage(self, name: str, *, total: int | None = None, unit: str) -> "Silent":
        self.told[name] = []
        self.name = name
        return self

    def __enter__(self):
        return SimpleNamespace(update=self.told[self.name].append)

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Path:
    return tiny_embedder(tmp_path_factory.mktemp("embedder") / "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES)


def spec(corpus: Path, embedder: Path, **changes) -> indexes.IndexSpec:
    fields = {
        "kind": "exact",
        "corpus": (str(corpus),),
        "embedder": find_embedder(str(embedder)),
    } | changes
    return indexes.IndexSpec(**fields)


@pytest.fixture(scope="module")
def built(tmp_path_factory, corpus, embedder) -> Path:
    folder = tmp_path_factory.mktemp("index") / "dense"
    indexes.build(folder, spec(corpus, embedder), Silent())
    return folder


@pytest.fixture
def copy(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_dense_index_finds_what_numpy_finds(tmp_path, corpus, embedder, storage):
    reporter = Silent()
    manifest, was_there = indexes.build(
        tmp_path / "index", spec(corpus, embedder, storage=storage), reporter
    )
    assert manifest["passages"] == PASSAGES
    assert was_there is False
    assert reporter.told["embedding"][-1] == PASSAGES
    index = indexes.open_index(tmp_path / "index")
    model = find_embedder(str(embedder)).load()
    embeddings = compressed(
        model.embed([passage.contents for passage in read_corpus([corpus])], "passage"), storage
    )
    scores, positions = best_rows(model.embed(QUERIES, "query"), embeddings.float32(), 4)
    for hits, expected, expected_scores in zip(
        index.search(QUERIES, 4), positions, scores, strict=True
    ):
        assert [position for position, _ in hits] == list(expected)
        assert [score for _, score in hits] == pytest.approx(list(expected_scores), rel=1e-4)
    assert index.passages[3] == read_corpus([corpus])[3]


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_bm25_from_the_disk_finds_what_bm25_in_memory_finds(tmp_path, corpus, tokeniser):
    spec = indexes.IndexSpec(kind="bm25", corpus=(str(corpus),), tokeniser=tokeniser)
    indexes.build(tmp_path / "index", spec, Silent())
    index = indexes.open_index(tmp_path / "index")
    memory = indexes.Bm25Index(read_corpus([corpus]), tokeniser)
    assert index.search(QUERIES, 5) == memory.search(QUERIES, 5)
    assert any(index.search(QUERIES, 5))


def test_an_exact_index_that_does_not_fit_on_the_devices_names_index_serve(built, monkeypatch):
    """90 rows of 16 bfloat16 numbers are padded to 128 on one device. They take 4,096 bytes."""
    monkeypatch.setattr(exact, "free_device_bytes", lambda: 4096)
    assert indexes.open_index(built).search(QUERIES, 1)
    monkeypatch.setattr(exact, "free_device_bytes", lambda: 4095)
    sentence = (
        r"dense of kind exact needs 0\.0 GB on each of 1 devices, but 0\.0 GB are free: run "
        r"`python -m mujica_jax\.index serve` on a machine with more memory"
    )
    with pytest.raises(UserError, match=sentence):
        indexes.open_index(built)


def test_a_corpus_without_words_is_an_index_that_finds_nothing(tmp_path):
    (tmp_path / "corpus.json").write_text('[{"title": "!", "text": "?"}]')
    indexes.build(
        tmp_path / "index",
        indexes.IndexSpec(kind="bm25", corpus=(str(tmp_path / "corpus.json"),)),
        Silent(),
    )
    assert indexes.open_index(tmp_path / "index").search(["cat"], 1) == [[]]


def test_eight_bits_are_near_and_a_row_of_zeros_stays_one():
    vectors = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    vectors[3] = 0
    rounded = compressed(vectors, "int8")
    assert rounded.vectors.dtype == np.int8
    assert not rounded.float32(3, 4).any()
    assert (
        np.abs(rounded.float32() - vectors) <= np.abs(vectors).max(1, keepdims=True) / 253
    ).all()


def test_the_same_build_again_finds_the_index_there(copy, corpus, embedder):
    before = {
        path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != manifests.LOCK
    }
    manifest, was_there = indexes.build(copy, spec(corpus, embedder), Silent())
    assert was_there
    assert manifest["passages"] == PASSAGES
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_build_into_the_same_directory_is_refused(copy, corpus, embedder):
    with pytest.raises(
        UserError, match=r"was started with storage 'bfloat16', but this build has 'int8'"
    ):
        indexes.build(copy, spec(corpus, embedder, storage="int8"), Silent())
    (copy / "elsewhere").mkdir()
    (copy / "elsewhere" / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds letter\.txt, but no index"):
        indexes.build(copy / "elsewhere", spec(corpus, embedder), Silent())


@pytest.mark.parametrize("file", ["embeddings.bfloat16", "passages.arrow", "encoded.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named(copy, file, damage):
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(content if damage == "flipped" else content[:-3])
    complaint = {"flipped": "is damaged", "cut": "the manifest says", "gone": "is missing"}[damage]
    with pytest.raises(UserError, match=rf"{file} .*{complaint}|{file} {complaint}"):
        indexes.open_index(copy)


def test_a_half_built_index_and_an_unreadable_manifest_are_refused(copy, tmp_path):
    (copy / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        indexes.open_index(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="is half-built"):
        indexes.open_index(copy)
    with pytest.raises(UserError, match="there is no index"):
        indexes.open_index(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no index"):
        indexes.open_index(tmp_path)


def test_an_empty_corpus_is_refused(tmp_path, embedder):
    (tmp_path / "corpus.json").write_text("[]")
    with pytest.raises(UserError, match="there is no passage in it"):
        indexes.build(tmp_path / "index", spec(tmp_path / "corpus.json", embedder), Silent())
    (tmp_path / "corpus.json").write_text('[{"title": "word1", "text": "word2"}]')
    manifest, _ = indexes.build(
        tmp_path / "index", spec(tmp_path / "corpus.json", embedder), Silent()
    )
    assert manifest["passages"] == 1, "the mended corpus into the same directory"


def test_skipped_passages_are_counted(tmp_path):
    records = [
        {"title": "a", "text": "b"},
        {"title": "b", "text": ""},
        {"title": "c", "text": "d", "id": 0},
        {"title": "e", "text": "f"},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, records)))
    spec = indexes.IndexSpec(kind="bm25", corpus=(str(tmp_path / "corpus.jsonl"),), skip=True)
    manifest, _ = indexes.build(tmp_path / "index", spec, Silent())
    assert manifest["passages"] == 2
    assert manifest["skipped"] == 2
    assert "line 2: the passage's text is ''" in manifest["first_skipped"]
    assert [passage.id for passage in indexes.open_index(tmp_path / "index").passages] == ["0", "1"]


MOMENTS = [
    ("text.vectors.write_json", 3, 40),  # the third chunk is written, and that is not said yet
    ("text.index.write_json", 1, 0),  # the corpus is read, and is not named yet
    ("text.vectors.write_json", 1, 0),
    ("text.index.commit", 1, PASSAGES),  # all but the manifest
]


@pytest.mark.parametrize(
    ("function", "call", "rows"),
    [MOMENTS[0], *(pytest.param(*moment, marks=pytest.mark.slow) for moment in MOMENTS[1:])],
)
def test_a_killed_build_goes_on_and_ends_the_same(
    tmp_path, corpus, embedder, monkeypatch, function, call, rows
):
    """Until the end nothing can be opened."""
    small_chunks(monkeypatch)
    whole = tmp_path / "whole"
    folder = tmp_path / "index"
    indexes.build(whole, spec(corpus, embedder), Silent())
    words = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", str(embedder)]
    kill_at(function, call, [*words, "--out", str(folder)])
    assert encoded_rows(folder) == rows
    with pytest.raises(UserError, match="is half-built"):
        indexes.open_index(folder)
    reporter = Silent()
    indexes.build(folder, spec(corpus, embedder), reporter)
    assert reporter.told.get("embedding", [rows])[0] == rows
    for name in ("embeddings.bfloat16", "passages.arrow"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert indexes.open_index(folder).search(QUERIES, 3) == indexes.open_index(whole).search(
        QUERIES, 3
    )


PEAK = """
import sys
from pathlib import Path
from mujica_jax.retrieval.text.corpus import stream_corpus
from mujica_jax.retrieval.text.corpus import PassageFile, write_passages

def kibibytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])

large, small, out = map(Path, sys.argv[1:])
write_passages(stream_corpus([small]), out)
Path("/proc/self/clear_refs").write_text("5")
before = kibibytes("VmRSS")
write_passages(stream_corpus([large]), out)
print((kibibytes("VmHWM") - before) * 1024, len(PassageFile(out)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json"])
def test_the_corpus_is_not_read_into_memory(tmp_path, name):
    line = json.dumps({"title": "title", "text": "word " * 500})
    for file, passages in ((tmp_path / name, 30_000), (tmp_path / f"small_{name}", 5000)):
        begin, between, end = ("[", ",", "]") if name.endswith(".json") else ("", "\n", "")
        file.write_text(begin + between.join([line] * passages) + end)
    command = [
        sys.executable,
        "-c",
        PEAK,
        str(tmp_path / name),
        str(tmp_path / f"small_{name}"),
        str(tmp_path / "out"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    grown, passages = map(int, run.stdout.split())
    assert passages == 30_000
    assert grown < (tmp_path / name).stat().st_size / 4


def test_two_builders_of_one_directory(tmp_path, corpus, embedder):
    plan = spec(corpus, embedder).plan()
    with (
        manifests.building(tmp_path / "index", plan),
        pytest.raises(UserError, match="another process is building"),
        manifests.building(tmp_path / "index", plan),
    ):
        pass


def test_passages_are_mapped_and_found_by_position_and_title(tmp_path, monkeypatch):
    from mujica_jax.retrieval.text import corpus as module

    monkeypatch.setattr(module, "BATCH_ROWS", 7)
    corpus = read_corpus([write_corpus(tmp_path / "corpus.jsonl", 30)])
    assert write_passages(corpus, tmp_path / "passages.arrow") == 30
    file = PassageFile(tmp_path / "passages.arrow")
    assert list(file) == corpus == [file[position] for position in range(len(file))]
    assert file[5:9] == corpus[5:9]
    assert file[-1] == corpus[-1]
    assert file.titled(["title 3", "title 29", "nowhere"]) == [corpus[3], corpus[29]]
    with pytest.raises(IndexError):
        file[30]


def test_a_few_texts_are_ranked_without_an_index(embedder):
    model = find_embedder(str(embedder)).load()
    vectors = model.embed(WORDS[:10], "passage")
    expected = np.argsort(-(vectors @ model.embed(["word3"], "query")[0]), kind="stable")
    assert ranked(model, "word3", WORDS[:10]) == list(expected)


def test_embeddings_are_read_back_as_they_were_written(built):
    embeddings = open_embeddings(built, PASSAGES, 16, "bfloat16")
    assert isinstance(indexes.open_index(built), DenseIndex)
    assert embeddings.float32(10, 20).shape == (10, 16)
    assert len(embeddings) == PASSAGES
    assert embeddings.dimension == 16
