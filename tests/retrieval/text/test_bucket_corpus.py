"""A corpus in a bucket is read as the same file on disk is, whatever breaks on the way; what is
wrong with it is one sentence.
"""

import bz2
import gzip
import io
import itertools
import json
import re
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import StoreUnavailableError, UserError
from mujica_jax.retrieval import files
from mujica_jax.retrieval.graph import files as graph_files
from mujica_jax.retrieval.graph.files import pieces
from mujica_jax.retrieval.text import index as indexes
from mujica_jax.retrieval.text.corpus import read_corpus
from mujica_jax.storage import gcs
from tests.helpers.fake_bucket import FakeBucket, Request, use

RECORDS = [{"title": f"title {n}", "text": f"of number {n}, é"} for n in range(200)]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), file)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for number in range(2):
            content = bz2.compress(
                b"\n".join(LINES.splitlines()[100 * number : 100 * number + 100])
            )
            member = tarfile.TarInfo(f"part_{number}.bz2")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


FILES = {
    "corpus.jsonl": LINES,
    "corpus.json": json.dumps(RECORDS).encode(),
    "corpus.jsonl.gz": gzip.compress(LINES),
    "corpus.jsonl.bz2": bz2.compress(LINES),
    "corpus.parquet": parquet(),
    "corpus.tar.gz": archive(),
}


@pytest.fixture
def bucket(monkeypatch) -> FakeBucket:
    fake = use(monkeypatch)
    monkeypatch.setattr(files, "RANGE_BYTES", 300)
    for name, content in FILES.items():
        fake.put("mine", f"folder/{name}", content)
    return fake


class FaultyRanges:
    """A fault at the first of every `period` ranges that are asked for."""

    def __init__(self, period: int, fault: str) -> None:
        self._period = period
        self._fault = fault
        self._ranges = 0

    def __call__(self, request: Request) -> str | None:
        if request.query.get("alt") != "media":
            return None
        self._ranges += 1
        return self._fault if self._ranges % self._period == 1 else None


@pytest.mark.parametrize("fault", [None, "503", "cut download", "lost answer"])
@pytest.mark.parametrize("name", list(FILES))
def test_it_is_read_as_from_the_disk(bucket, tmp_path, name, fault):
    (tmp_path / name).write_bytes(FILES[name])
    if fault is not None:
        bucket.faults = FaultyRanges(3, fault)
    assert read_corpus([f"gs://mine/folder/{name}"]) == read_corpus([tmp_path / name])
    ranges = sum(request.query.get("alt") == "media" for request in bucket.requests)
    assert ranges >= max(2, len(FILES[name]) // 300), "in ranges, not as a whole"


def test_it_is_built_and_another_content_is_another_corpus(bucket, tmp_path):
    words = [
        "build",
        "--corpus",
        "gs://mine/folder/corpus.jsonl.gz",
        "--kind",
        "bm25",
        "--out",
        str(tmp_path / "index"),
    ]
    assert index.main(words) == 0
    hits = indexes.open_index(tmp_path / "index").search(["number 77"], 1)
    assert hits[0][0][0] == 77
    bucket.put("mine", "folder/corpus.jsonl.gz", gzip.compress(LINES[:-1] + b" "))
    with pytest.raises(UserError, match="was started with corpus"):
        indexes.build(
            tmp_path / "index",
            indexes.IndexSpec(kind="bm25", corpus=("gs://mine/folder/corpus.jsonl.gz",)),
            reporter=None,
        )


def test_a_bucket_that_never_answers_ends_in_one_sentence(bucket):
    bucket.faults = lambda request: "503" if request.query.get("alt") == "media" else None
    with pytest.raises(
        StoreUnavailableError,
        match=r"gs://mine/folder/corpus\.jsonl could not be read in 8 attempts",
    ):
        read_corpus(["gs://mine/folder/corpus.jsonl"])


def test_an_object_that_is_replaced_while_it_is_read_is_said(bucket):
    ranges = itertools.count(1)

    def replaced(request: Request) -> None:
        if request.query.get("alt") == "media" and next(ranges) == 4:
            bucket.put("mine", "folder/corpus.jsonl", LINES)

    bucket.faults = replaced
    with pytest.raises(UserError, match="was replaced while it was read"):
        read_corpus(["gs://mine/folder/corpus.jsonl"])


def test_bytes_that_changed_on_the_way_are_noticed(bucket, monkeypatch):
    mine = gcs.open_bucket("mine")
    whole = mine.read_range
    monkeypatch.setattr(
        mine, "read_range", lambda *asked: whole(*asked).replace(b"number 19", b"number 91")
    )
    with pytest.raises(UserError, match="was damaged during the download"):
        read_corpus(["gs://mine/folder/corpus.jsonl"])


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "gs://mine/nothing.jsonl",
            r"gs://mine/nothing\.jsonl cannot be read \(there is no such object",
        ),
        ("gs://no-bucket/corpus.jsonl", "or no such bucket"),
        (
            "gs://closed-bucket/corpus.jsonl",
            r"access to gs://closed-bucket/corpus\.jsonl is denied",
        ),
        ("gs://mine", "is not the address of an object in a bucket"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(bucket, tmp_path, capsys, address, sentence):
    assert (
        index.main(
            ["build", "--corpus", address, "--kind", "bm25", "--out", str(tmp_path / "index")]
        )
        == 2
    )
    message = capsys.readouterr().err
    assert re.search(sentence, message)
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    with pytest.raises(UserError):
        read_corpus([address])


def test_an_index_is_no_object_of_a_bucket(capsys, tmp_path):
    words = ["build", "--corpus", "x.jsonl", "--kind", "bm25", "--out", "gs://mine/index"]
    assert index.main(words) == 2
    assert "--out is gs://mine/index" in capsys.readouterr().err
    assert index.main(["query", "--index", "gs://mine/index", "who?"]) == 2
    assert "copy it into a local directory" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_triples_are_read_in_pieces_as_from_the_disk(bucket, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(graph_files, "READ_BYTES", 500)
    lines = "".join(f"<urn:a:{n}> <urn:b> <urn:c> .\n" for n in range(200)).encode()
    content = gzip.compress(lines) if suffix else lines
    (tmp_path / f"triples.nt{suffix}").write_bytes(content)
    bucket.put("mine", f"triples.nt{suffix}", content)
    bucket.faults = FaultyRanges(3, "cut download")
    parts = list(pieces(f"gs://mine/triples.nt{suffix}"))
    assert len(parts) > 5
    assert b"".join(line for piece in parts for line in piece.lines) == lines
    assert parts == list(pieces(str(tmp_path / f"triples.nt{suffix}")))
    rest = list(pieces(f"gs://mine/triples.nt{suffix}", parts[2].end, parts[3].first_line))
    assert [piece.lines for piece in parts[3:]] == [piece.lines for piece in rest]
