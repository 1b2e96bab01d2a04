"""Documents as passages: what is read of each format, how it is cut, and what is refused."""

import json
import sys

import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus import stream_corpus
from mujica_jax.retrieval.text.documents import (
    Chunking,
    chunks_of,
    corpus_files,
    read_document,
)
from tests.helpers.pdf import write_pdf

PAGE = """<html><head><title>The mayor</title><script>track()</script></head><body>
<nav>Home | About</nav><h1>Mayor of Tisby</h1><p>Nils Lomund is the mayor &amp; a poet.</p>
<!-- <search>hidden</search> --><footer>Imprint</footer></body></html>"""


def test_text_markdown_html_and_pdf_are_read_with_their_titles(tmp_path):
    pytest.importorskip("bs4", reason="beautifulsoup4 is not installed")
    pytest.importorskip("pypdf", reason="pypdf is not installed")
    (tmp_path / "notes.txt").write_text("Tisby is a town.\n")
    (tmp_path / "guide.md").write_text(
        "# A guide\n\nSee [the **town**](http://x.y/z) of `Tisby`.\n"
    )
    (tmp_path / "mayor.html").write_text(PAGE)
    write_pdf(tmp_path / "report.pdf", ["Tisby has a port.", "It is old (1250)."], "The report")
    documents = {path.name: read_document(path) for path in tmp_path.iterdir()}
    assert {name: document.title for name, document in documents.items()} == {
        "notes.txt": "notes",
        "guide.md": "A guide",
        "mayor.html": "The mayor",
        "report.pdf": "The report",
    }
    assert documents["notes.txt"].text == "Tisby is a town."
    assert documents["guide.md"].text.endswith("See the town of Tisby.")
    assert documents["mayor.html"].text == "Mayor of Tisby\nNils Lomund is the mayor & a poet."
    assert documents["report.pdf"].text == "Tisby has a port.\n\nIt is old (1250)."


def test_a_first_line_that_repeats_the_title_is_left_out_once(tmp_path):
    (tmp_path / "guide.md").write_text("# A guide\n\nA guide to Tisby.\n")
    (tmp_path / "only.md").write_text("# Only a heading\n")
    assert read_document(tmp_path / "guide.md").text == "A guide to Tisby."
    assert read_document(tmp_path / "only.md").text == "Only a heading"


def test_chunks_are_whole_sentences_that_share_their_borders():
    """Four sentences of 3, 4, 3 and 5 tokens, the full stops counted, by hand."""
    text = "One two. Three four five. Six seven. Eight nine ten eleven."
    assert chunks_of(text, Chunking(chunk_tokens=7, overlap_tokens=0)) == [
        "One two. Three four five.",
        "Six seven.",
        "Eight nine ten eleven.",
    ]
    assert chunks_of(text, Chunking(chunk_tokens=8, overlap_tokens=4)) == [
        "One two. Three four five.",
        "Three four five. Six seven.",
        "Six seven. Eight nine ten eleven.",
    ]
    assert chunks_of(text, Chunking(chunk_tokens=100, overlap_tokens=10)) == [text]
    assert chunks_of("  \n ", Chunking()) == []


def test_a_long_sentence_and_text_without_spaces_are_cut_between_tokens():
    words = " ".join(f"w{number}" for number in range(10))
    assert chunks_of(words, Chunking(chunk_tokens=4, overlap_tokens=0)) == [
        "w0 w1 w2 w3",
        "w4 w5 w6 w7",
        "w8 w9",
    ]
    # Ten characters and three marks are thirteen tokens.
    chinese = "小镇很老。港口也老。海。"
    chunks = chunks_of(chinese, Chunking(chunk_tokens=5, overlap_tokens=0))
    assert chunks == ["小镇很老。", "港口也老。", "海。"]


@pytest.mark.parametrize("overlap_tokens", [0, 3, 9, 29])
def test_no_token_is_lost_and_no_chunk_is_too_long(overlap_tokens):
    sentences = [" ".join(f"s{n}w{word}" for word in range(n % 7 + 1)) + "." for n in range(60)]
    chunking = Chunking(chunk_tokens=30, overlap_tokens=overlap_tokens)
    chunks = chunks_of(" ".join(sentences), chunking)
    counts = [len(chunk.replace(".", " .").split()) for chunk in chunks]
    assert max(counts) <= 30
    seen: list[str] = []
    for chunk in chunks:
        seen += [word for word in chunk.replace(".", "").split() if word not in seen]
    assert seen == " ".join(sentences).replace(".", "").split()


def test_a_folder_is_indexed_and_searched(tmp_path, capsys):
    folder = tmp_path / "documents"
    (folder / "more").mkdir(parents=True)
    (folder / "a.md").write_text("# Tisby\n\nTisby is a town by the sea.\n")
    (folder / "more" / "b.txt").write_text("Nils Lomund was born in Corham.\n")
    (folder / ".hidden.txt").write_text("secret")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    build = ["build", "--corpus", str(folder), "--kind", "bm25", "--out", str(tmp_path / "index")]
    assert index.main(build) == 0
    capsys.readouterr()
    assert (
        index.main(
            ["query", "--index", str(tmp_path / "index"), "--k", "1", "Where was Nils born?"]
        )
        == 0
    )
    (hit,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert hit["title"] == "b"
    assert hit["text"] == "Nils Lomund was born in Corham."
    # Another size of chunks is another index.
    assert index.main([*build, "--chunk-tokens", "5", "--chunk-overlap", "1"]) == 2
    assert "chunking" in capsys.readouterr().err


def test_a_text_file_of_json_records_is_no_document(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text('\n{"id": "1", "title": "Tisby", "text": "A town."}\n')
    (passage,) = stream_corpus([str(file)])
    assert (passage.id, passage.title, passage.text) == ("1", "Tisby", "A town.")


def test_a_folder_of_beir_stands_for_its_corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "title": "T", "text": "x"}')
    (tmp_path / "readme.md").write_text("# BEIR")
    assert corpus_files([str(tmp_path)]) == (str(tmp_path / "corpus.jsonl"),)


def test_what_holds_no_text_is_refused_or_skipped(tmp_path, capsys):
    pytest.importorskip("pypdf", reason="pypdf is not installed")
    scan = write_pdf(tmp_path / "scan.pdf", ["", ""])
    (tmp_path / "good.txt").write_text("Tisby is a town.")
    (tmp_path / "cut.pdf").write_bytes(scan.read_bytes()[:60])
    (tmp_path / "empty.md").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, sentence in (
        ("scan.pdf", r"scan\.pdf has 2 pages and no text in them \(a scan\?\): recognise its text"),
        ("cut.pdf", r"cut\.pdf cannot be read as a PDF \("),
        ("empty.md", r"empty\.md holds no text: remove it"),
        ("latin.txt", r"latin\.txt is not UTF-8 text"),
        ("missing.txt", r"missing\.txt does not exist"),
    ):
        with pytest.raises(UserError, match=sentence):
            list(stream_corpus([str(tmp_path / name)]))
    build = ["build", "--corpus", str(tmp_path), "--kind", "bm25", "--out", str(tmp_path / "index")]
    assert index.main(build) == 2
    assert index.main([*build[:-1], str(tmp_path / "skipped"), "--skip"]) == 0
    assert "4 passages were skipped" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "name"), [("bs4", "page.html"), ("pypdf", "page.pdf")])
def test_without_the_package_of_a_format_its_extra_is_named(tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_text(PAGE)
    with pytest.raises(UserError) as caught:
        read_document(tmp_path / name)
    assert str(caught.value).endswith(
        f" and needs the package {package}, but {package} is not installed: install the extra "
        "`documents`, as in `pip install -e '.[documents]'` where mujica_jax was cloned, or leave "
        "the file out with --skip"
    )


def test_folders_and_flags_that_fit_no_document_are_refused(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"empty is empty: give a folder with files \.txt, \.md"):
        corpus_files([str(empty)])
    (empty / "picture.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no document \(picture\.png\)"):
        corpus_files([str(empty)])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "x"}')
    build = ["build", "--corpus", str(corpus), "--kind", "bm25", "--out", str(tmp_path / "index")]
    assert index.main([*build, "--chunk-tokens", "5"]) == 2
    assert "are for documents (.txt, .md, " in capsys.readouterr().err
    build[2] = str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("x")
    assert index.main([*build, "--chunk-tokens", "5", "--chunk-overlap", "5"]) == 2
    assert "--chunk-tokens is 5 and --chunk-overlap is 5" in capsys.readouterr().err
