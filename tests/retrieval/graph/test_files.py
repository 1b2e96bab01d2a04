"""Files of triples that are not quite as dumps write them: spacing, a byte order mark, quoted
triples.
"""

import gzip

import pyoxigraph
import pytest

from mujica_jax.errors import UserError
from mujica_jax.retrieval.graph import files as graph_files
from mujica_jax.retrieval.graph.files import GraphSpec
from mujica_jax.retrieval.graph.index import Loaded, load
from tests.helpers.little_graph import LINES, WD, WDT, graph_in_memory, write_dump

TABLE = "subject\trelation\tobject\tsubject_qid\tobject_qid\nIlse Vand\tborn in\tGhent\tQ2\tQ3\n"


def everything(graph) -> set[str]:
    return {str(quad) for quad in graph.store}


def quoting(depth: int, innermost: str = '"x"') -> str:
    quoted = f"<<( <{WD}Q1> <{WDT}P1> " * depth + innermost + " )>>" * depth
    return f"<{WD}Q1> <{WDT}P9> {quoted} ."


@pytest.mark.parametrize("depth", [2, 200_000])
def test_a_quoted_triple_in_another_one_never_reaches_the_parser(tmp_path, depth):
    """It would recurse until the process dies."""
    for line in (
        quoting(depth),
        quoting(depth).replace("> <<(", ">\t<<(", 1),
        quoting(depth).replace("> <<(", "><<(", 1),
    ):
        dump = write_dump(tmp_path / "dump.nt", [*LINES, line])
        with pytest.raises(
            UserError,
            match=rf"line {len(LINES) + 1}: .*\(a quoted triple in a quoted triple\): correct it",
        ):
            graph_in_memory(dump)
        counts = Loaded()
        store = pyoxigraph.Store()
        assert list(load(store, GraphSpec(files=(str(dump),), skip=True), counts))
        assert counts.skipped == 1
        assert counts.triples == 8


def test_one_quoted_triple_is_kept_whatever_its_text_says(tmp_path):
    dump = write_dump(tmp_path / "dump.nt", [*LINES, quoting(1, r'"a << b \" << c"')])
    assert (
        len(graph_in_memory(dump).store)
        == len(graph_in_memory(write_dump(tmp_path / "less.nt")).store) + 2
    )


@pytest.mark.parametrize("between", [" ", "  ", "\t", ""])
def test_any_space_may_stand_between_the_terms(tmp_path, between):
    dump = write_dump(
        tmp_path / "dump.nt", [line.replace("> <", f">{between}<", 1) for line in LINES]
    )
    assert everything(graph_in_memory(dump)) == everything(
        graph_in_memory(write_dump(tmp_path / "plain.nt"))
    )


@pytest.mark.parametrize("name", ["table.tsv", "dump.nt", "table.tsv.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, name):
    content = TABLE if ".tsv" in name else "".join(f"{line}\n" for line in LINES)
    for folder, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / folder).mkdir()
        raw = mark + content.encode()
        (tmp_path / folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    marked, plain = (tmp_path / folder / name for folder in ("marked", "plain"))
    assert everything(graph_in_memory(marked)) == everything(graph_in_memory(plain))
    pairs = zip(graph_files.pieces(str(marked)), graph_files.pieces(str(plain)), strict=True)
    for marked_piece, plain_piece in pairs:
        assert marked_piece.first_line == plain_piece.first_line
        assert marked_piece.end - 3 == plain_piece.end, "a place in the file counts all bytes"
        assert len(marked_piece.lines) == len(plain_piece.lines)
