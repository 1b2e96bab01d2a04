"""Graphs on disk: what files hold is found again, killed loads go on, and damage is named with its
place.
"""

import asyncio
import bz2
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mujica_jax.errors import UserError
from mujica_jax.retrieval import files
from mujica_jax.retrieval import manifest as manifests
from mujica_jax.retrieval.estimates import estimate_graph
from mujica_jax.retrieval.graph import files as graph_files
from mujica_jax.retrieval.graph import index as graph_index
from mujica_jax.retrieval.graph.files import GraphSpec, pieces
from mujica_jax.retrieval.graph.index import build, open_graph
from mujica_jax.retrieval.text import index as indexes
from tests.helpers.fake_bucket import use
from tests.helpers.little_graph import (
    DIRECTOR,
    FILM,
    LINES,
    fact,
    graph_in_memory,
    label,
    texts,
    write_dump,
)
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.retrieval.text.test_bucket_corpus import FaultyRanges
from tests.retrieval.text.test_index import Silent

HEADER = "subject\trelation\tobject\tsubject_qid\tobject_qid\n"
TABLE = HEADER + "".join(f"Film {n}\tdirector\tAnn {n % 7}\tQ{n + 100}\t\n" for n in range(300))


def spec(*files: Path | str, **changes) -> GraphSpec:
    return GraphSpec(files=tuple(map(str, files)), **changes)


def everything(graph) -> set[str]:
    return {str(quad) for quad in graph.store}


def named(graph, key: str) -> list[tuple[str, str, str]]:
    return texts(asyncio.run(graph.triples_of(key)))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("graph")
    build(root / "index", spec(write_dump(root / "dump.nt")), Silent())
    return root / "index"


@pytest.fixture
def copy(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["dump.nt", "dump.nt.gz", "dump.nt.bz2"])
def test_a_dump_is_found_again(tmp_path, name):
    content = write_dump(tmp_path / "plain").read_bytes()
    compressed = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)(content)
    (tmp_path / name).write_bytes(compressed)
    manifest, was_there = build(tmp_path / "index", spec(tmp_path / name), Silent())
    assert manifest["kind"] == "graph"
    assert manifest["triples"] == 8
    assert was_there is False
    graph = open_graph(tmp_path / "index")
    assert graph.version == manifest["version"]
    assert named(graph, "Q1") == FILM
    assert named(graph, "Q2") == DIRECTOR
    assert everything(graph) == everything(graph_in_memory(tmp_path / name))


def test_a_dump_without_line_end_and_with_loose_spaces_and_comments(tmp_path):
    lines = [
        "# a dump",
        "",
        *LINES[:-1],
        "  " + LINES[20].replace("> <", ">\t  <") + " # said twice",
    ]
    (tmp_path / "dump.nt").write_text("\r\n".join(lines))
    graph = graph_in_memory(tmp_path / "dump.nt")
    assert named(graph, "Q1") == FILM
    assert named(graph, "Q2") == DIRECTOR


def test_addresses_that_are_none_as_dumps_hold_some_are_kept_and_never_asked_for(tmp_path):
    bad = [
        "<http://a b> <http://b c> <http://d|e> .",
        "<http://x\\u003E> <http://y\\u003E> <http://z> .",
    ]
    graph = graph_in_memory(write_dump(tmp_path / "dump.nt", [*LINES, *bad]))
    assert named(graph, "Q1") == FILM
    for key in ("http://a b", "http://d|e", "http://x>", "http://z"):
        assert named(graph, key) == []


@pytest.mark.parametrize("fault", [None, "503", "cut download"])
@pytest.mark.parametrize("name", ["dump.nt", "dump.nt.gz"])
def test_a_dump_in_a_bucket_is_read_as_from_the_disk(tmp_path, monkeypatch, name, fault):
    bucket = use(monkeypatch)
    monkeypatch.setattr(files, "RANGE_BYTES", 300)
    monkeypatch.setattr(graph_files, "READ_BYTES", 500)
    bucket.put("mine", f"folder/{name}", write_dump(tmp_path / name).read_bytes())
    if fault is not None:
        bucket.faults = FaultyRanges(3, fault)
    manifest, _ = build(tmp_path / "index", spec(f"gs://mine/folder/{name}"), Silent())
    assert manifest["triples"] == 8
    assert everything(open_graph(tmp_path / "index")) == everything(
        graph_in_memory(tmp_path / name)
    )
    assert sum(request.query.get("alt") == "media" for request in bucket.requests) > 2, (
        "in ranges, not as a whole"
    )


def test_only_chosen_properties_and_languages_are_kept(tmp_path):
    dump = write_dump(tmp_path / "dump.nt")
    directors = graph_in_memory(dump, properties=("P57",))
    assert named(directors, "Q2") == [("The Purple Shore", "director", "Ilse Vand")]
    assert not any("P19>" in quad and "direct/" in quad for quad in everything(directors))
    german = graph_in_memory(dump, languages=("de",))
    quads = everything(german)
    assert any("@de" in quad for quad in quads)
    assert not any("@en" in quad or "@mul" in quad for quad in quads)
    with_about = graph_in_memory(dump, properties=("http://schema.org/about",))
    assert named(with_about, "Q3") == [("Ghent", "about", "Ghent")], (
        "an address that is left out unless it is asked for"
    )


def test_what_describes_and_what_nobody_knows_is_left_out(tmp_path):
    quads = everything(graph_in_memory(write_dump(tmp_path / "dump.nt")))
    for word in ("schema.org", "rdf-syntax-ns", "direct-normalized", "genid", "dbpedia", "_:"):
        assert not any(word in quad for quad in quads), word


def test_tables_and_dumps_are_one_graph(tmp_path):
    (tmp_path / "more.tsv").write_text(
        HEADER + "Ilse Vand\tspouse\tTom Reed\tQ2\t\nTom Reed\tchild\tAda\t\t\n"
    )
    graph = graph_in_memory(write_dump(tmp_path / "dump.nt"), tmp_path / "more.tsv")
    assert ("Ilse Vand", "spouse", "Tom Reed") in named(graph, "Q2")
    assert named(graph, "Tom Reed") == [
        ("Tom Reed", "child", "Ada"),
        ("Ilse Vand", "spouse", "Tom Reed"),
    ]


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_pieces_are_whole_lines_from_any_of_them_on(tmp_path, monkeypatch, size):
    monkeypatch.setattr(graph_files, "READ_BYTES", size)
    lines = [f"line {number} ".encode() * (number % 5) + b"\n" for number in range(40)] + [
        b"the last"
    ]
    (tmp_path / "file.nt.gz").write_bytes(gzip.compress(b"".join(lines)))
    parts = list(pieces(str(tmp_path / "file.nt.gz")))
    assert [line for piece in parts for line in piece.lines] == lines
    assert (len(parts) > 1) == (size < 10**6)
    assert parts[-1].first_line + len(parts[-1].lines) == 42
    assert parts[-1].end == sum(map(len, lines))
    for piece, following in itertools.pairwise(parts):
        assert following.first_line == piece.first_line + len(piece.lines)
        after = list(pieces(str(tmp_path / "file.nt.gz"), piece.end, following.first_line))
        assert [line for rest in after for line in rest.lines] == lines[following.first_line - 1 :]
        assert after[0].first_line == following.first_line


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.nt", b"", "there is no triple in it; give a graph"),
        ("a.nt", f"{label('Q1', 'A')}\n".encode(), "there is no triple in it; give a graph"),
        ("a.tsv", HEADER.encode(), "there is no triple in it"),
        (
            "a.nt",
            b"\n".join([fact("Q1", "P1", "Q2").encode()] * 3 + [b"hello"]),
            r"a\.nt, line 4: not a triple",
        ),
        (
            "a.nt",
            b'<http://a> <http://b> "\xff" .\n',
            r"a\.nt, line 1: not a triple in N-Triples \(Invalid UTF-8",
        ),
        ("a.nt", b'<http://a> <http://b> "x\n', r"a\.nt, line 1: not a triple"),
        ("a.nt", b'<http://a> <http://b> "x"@', r"a\.nt, line 1: not a triple"),
        ("a.nt", b"<http://a> <http://b", r"a\.nt, line 1: not a triple"),
        ("a.nt", b"<http://a> <http://b> <http://c", r"a\.nt, line 1: not a triple"),
        ("a.tsv", b"a\tb\n", r"a\.tsv, line 1: the header is 'a, b'"),
        ("a.tsv", HEADER.encode() + b"A\tb\t\xff\t\t\n", r"a\.tsv, line 2: it is not UTF-8 text"),
        (
            "a.tsv",
            HEADER.encode() + b"A\tb\n",
            r"a\.tsv, line 2: the line has 2 columns instead of 5",
        ),
        (
            "a.tsv",
            HEADER.encode() + b"A\t\tB\t\t\n",
            r"a\.tsv, line 2: subject, relation and object must not be empty",
        ),
        (
            "a.nt.gz",
            gzip.compress(b"x" * 10**5)[:-20],
            r"a\.nt\.gz cannot be read after line 0 .*cut off or damaged",
        ),
        ("a.nt.bz2", b"no bz2", r"a\.nt\.bz2 cannot be read"),
        ("a.json", b"{}", r"a\.json is not a file of triples: expected triples as \.tsv or \.nt"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        build(tmp_path / "index", spec(tmp_path / name), Silent())
    with pytest.raises(UserError, match=r"is half-built|there is no index"):
        open_graph(tmp_path / "index")


def test_other_refusals(tmp_path, built):
    with pytest.raises(UserError, match=r"nowhere\.nt cannot be read"):
        build(tmp_path / "index", spec(tmp_path / "nowhere.nt"), Silent())
    with pytest.raises(UserError, match="'P' is not a property: give one such as P57"):
        GraphSpec(files=(), properties=("P",))
    with pytest.raises(UserError, match="'en_US' is not a language tag"):
        GraphSpec(files=(), languages=("en", "en_US"))
    with pytest.raises(UserError, match="no language is given"):
        GraphSpec(files=(), languages=())
    with pytest.raises(UserError, match="there is no triple in it among the properties P9999"):
        build(
            tmp_path / "none",
            spec(write_dump(tmp_path / "dump.nt"), properties=("P9999",)),
            Silent(),
        )
    with pytest.raises(UserError, match="is of kind graph and holds no passages"):
        indexes.open_index(built)
    with pytest.raises(UserError, match="is of kind graph and has no embeddings"):
        indexes.IndexSpec(kind="scann", source=str(built)).plan()
    (tmp_path / "corpus.json").write_text('[{"title": "a", "text": "b"}]')
    words = indexes.IndexSpec(kind="bm25", corpus=(str(tmp_path / "corpus.json"),))
    indexes.build(tmp_path / "words", words, Silent())
    with pytest.raises(UserError, match="is of kind bm25, but a graph is needed"):
        open_graph(tmp_path / "words")


def test_a_mended_file_goes_into_the_same_directory(tmp_path):
    (tmp_path / "a.nt").write_bytes(b"hello\n")
    with pytest.raises(UserError, match="line 1: not a triple"):
        build(tmp_path / "index", spec(tmp_path / "a.nt"), Silent())
    write_dump(tmp_path / "a.nt")
    with pytest.raises(UserError, match="was started with corpus"):
        build(tmp_path / "index", spec(tmp_path / "a.nt"), Silent())


def test_bad_lines_are_left_out_and_counted_where_that_is_asked_for(tmp_path):
    content = [*LINES[:20], "hello", *LINES[20:], f'<{LINES[0][1:]} "x', fact("Q1", "P57", '"\\q"')]
    (tmp_path / "dump.nt").write_text("\n".join(content))
    (tmp_path / "more.tsv").write_text(HEADER + "A\tb\nA\tfather\tB\t\t\n")
    manifest, _ = build(
        tmp_path / "index", spec(tmp_path / "dump.nt", tmp_path / "more.tsv", skip=True), Silent()
    )
    assert manifest["triples"] == 9
    assert manifest["skipped"] == 4
    assert "dump.nt, line 21: not a triple" in manifest["first_skipped"]
    graph = open_graph(tmp_path / "index")
    assert named(graph, "Q2") == DIRECTOR
    assert named(graph, "A") == [("A", "father", "B")]


# --- the directory ---


def test_a_damaged_file_is_named(copy):
    table = max((copy / "graph").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    with pytest.raises(UserError, match=rf"{table.name} is damaged"):
        open_graph(copy)
    table.unlink()
    with pytest.raises(
        UserError, match=rf"{table.name} is missing: remove .* and build the index again"
    ):
        open_graph(copy)


def test_opening_and_asking_changes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    graph = open_graph(copy)
    assert named(graph, "Q1") == FILM
    with pytest.raises(RuntimeError):
        graph.store.update("DELETE WHERE { ?s ?p ?o }")
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    assert named(open_graph(copy), "Q1") == FILM, "two at the same time"


def test_the_same_build_again_finds_the_index_there_and_another_is_refused(copy, tmp_path):
    dump = write_dump(tmp_path / "dump.nt")
    _, was_there = build(copy, spec(dump), Silent())
    assert was_there
    with pytest.raises(
        UserError, match=r"was started with languages .*'en', 'mul'.*, but this build has \['de'\]"
    ):
        build(copy, spec(dump, languages=("de",)), Silent())


# --- killed loads ---


@pytest.fixture
def dump_and_table(tmp_path) -> tuple[Path, Path]:
    """Return a dump and a table, for a load of many chunks."""
    lines = [
        line
        for n in range(100, 400)
        for line in (label(f"Q{n}", f"thing {n}"), fact(f"Q{n}", "P1", f"Q{n % 90 + 100}"))
    ]
    (tmp_path / "table.tsv").write_text(TABLE)
    return write_dump(tmp_path / "dump.nt.gz", [*LINES, *lines]), tmp_path / "table.tsv"


KILLED = """
import sys, time
from mujica_jax.commands import index
from mujica_jax.retrieval.graph import dumps as graph_dumps
from mujica_jax.retrieval.graph import files as graph_files
from mujica_jax.retrieval.graph import index as graph_index
from mujica_jax.retrieval.graph import tables as graph_tables
graph_files.READ_BYTES, graph_index.CHUNK_BYTES = 1000, 3000
where = sys.argv.pop(1)
def slowly(of, name, wait=0.03):
    function = getattr(of, name)
    def slow(*arguments):
        found = function(*arguments)
        time.sleep(wait)
        return found
    setattr(of, name, slow)
if where != "nowhere":
    slowly(graph_dumps.Lines, "load")
    slowly(graph_tables.Table, "statements")
    slowly(graph_tables.Table, "names")
    slowly(graph_index, "_read_up_to")
    slowly(graph_index, "_remove", 0.5)
raise SystemExit(index.main(sys.argv[1:]))
"""


def killed(folder: Path, files: tuple[Path, ...], where: str, ready) -> None:
    """Kill a build as soon as `ready`. Where `where` is "nowhere" it ends by itself."""
    arguments = ["build", "--corpus", *map(str, files), "--kind", "graph", "--out", str(folder)]
    command = [sys.executable, "-c", KILLED, where, *arguments]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while where != "nowhere" and not ready():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.005)
        if where != "nowhere":
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=HANG_SECONDS)
        assert where != "nowhere" or process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()


PLACES = {  # where a load is killed, by what it last said
    "before the first chunk": lambda progress: progress["stage"] == "",
    "names": lambda progress: progress["stage"] == "names" and progress["lines"] > 100,
    "the dump": lambda progress: (
        progress["stage"] == "statements" and progress["file"] == 0 and progress["lines"] > 100
    ),
    "the table": lambda progress: (
        progress["stage"] == "statements" and progress["file"] == 1 and progress["lines"] > 150
    ),
    "closing": lambda progress: progress["stage"] == "done",
}


@pytest.mark.parametrize(
    "places", [("the dump", "closing"), pytest.param(tuple(PLACES), marks=pytest.mark.slow)]
)
def test_a_killed_load_goes_on_and_ends_the_same(tmp_path, dump_and_table, places):
    """It gets SIGKILL while it reads and writes. Until the end nothing can be opened."""
    folder = tmp_path / "index"

    def so_far() -> dict:
        progress = folder / "loaded.json"
        return json.loads(progress.read_text()) if progress.exists() else {"stage": ""}

    for name in places:
        killed(
            folder,
            dump_and_table,
            name,
            lambda name=name: (folder / "graph" / "CURRENT").exists() and PLACES[name](so_far()),
        )
        (folder / "graph" / f"bulk-{len(name)}.sst").write_bytes(b"the beginning of a table")
        assert name == "closing" or so_far()["stage"] != "done", "the end is still to come"
        with pytest.raises(UserError, match="is half-built"):
            open_graph(folder)
    killed(folder, dump_and_table, "nowhere", None)
    manifest = manifests.read_manifest(folder)
    assert not [path for name in ("bulk-*", "LOG.old.*") for path in (folder / "graph").glob(name)]
    graph = open_graph(folder)
    whole = graph_in_memory(*dump_and_table)
    assert everything(graph) == everything(whole)
    # Nothing is counted twice.
    assert manifest["triples"] == 8 + 300 + 300
    assert manifest["names"] == 14 + 300
    assert named(graph, "Q2") == DIRECTOR


def test_a_load_goes_on_from_every_chunk(tmp_path, dump_and_table, monkeypatch):
    """It is interrupted after each chunk. The next chunk is already in the store then."""
    monkeypatch.setattr(graph_index, "CHUNK_BYTES", 12_000)
    monkeypatch.setattr(graph_files, "READ_BYTES", 2000)
    write = manifests.write_json
    written = []

    def writing(path: Path, value) -> None:
        if path.name == graph_index.PROGRESS and value["stage"] != "done":
            # The chunk is in the store, and no file says so.
            if len(written) % 2:
                written.append(None)
                raise KeyboardInterrupt
            write(path, value)
            written.append(value)
            raise KeyboardInterrupt
        write(path, value)

    monkeypatch.setattr(graph_index, "write_json", writing)
    for _ in range(300):
        try:
            manifest, _ = build(tmp_path / "index", spec(*dump_and_table), Silent())
            break
        except KeyboardInterrupt:
            continue
    assert len(written) > 12
    assert manifest["triples"] == 8 + 300 + 300
    assert manifest["names"] == 14 + 300
    assert everything(open_graph(tmp_path / "index")) == everything(
        graph_in_memory(*dump_and_table)
    )


def test_an_estimate_is_near_what_is_built(tmp_path, dump_and_table):
    dump, _ = dump_and_table
    manifest, _ = build(tmp_path / "index", spec(dump), Silent())
    whole = estimate_graph(spec(dump))
    assert whole["triples"] == manifest["triples"]
    assert whole["names"] == manifest["names"]
    lines = [
        line
        for n in range(20_000)
        for line in (label(f"Q{n + 1}", "x"), fact(f"Q{n + 1}", "P1", f"Q{n + 2}"))
    ]
    large = write_dump(tmp_path / "large.nt", lines)
    part = estimate_graph(spec(large), sample_bytes=2**20)
    assert 15_000 < part["triples"] < 30_000
    assert part["disk_bytes"]["graph"] > 0
    with pytest.raises(UserError, match="there is no triple in the sample that was read"):
        estimate_graph(spec(large, properties=("P9",)))
