"""Published corpora are read as they are: which field is the title, which the text, what is refused
with its place.
"""

import bz2
import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mujica_jax.commands import index
from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.text.corpus import (
    Passage,
    PassageFile,
    read_corpus,
    stream_corpus,
    write_passages,
)
from mujica_jax.retrieval.text.corpus_records import read_records
from tests.helpers.patience import HANG_SECONDS

BLANK = "\n  \n\t\r\n\ufeff\n"


def lines(folder: Path, *records: object, name: str = "corpus.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def only_passage(folder: Path, **record: object) -> Passage:
    (passage,) = read_corpus([lines(folder, record)])
    return passage


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_corpus([path])
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["corpus.jsonl", "corpus.json", "corpus.jsonl.gz", "corpus.json.bz2", "corpus.tsv"]
)
@pytest.mark.parametrize("content", ["", " ", BLANK])
def test_a_blank_file_holds_no_record_and_is_read_to_its_end(tmp_path, name, content):
    path = tmp_path / name
    pack = {"gz": gzip.compress, "bz2": bz2.compress}.get(name.rpartition(".")[2], bytes)
    path.write_bytes(pack(content.encode()))
    assert list(read_records(path)) == []


def test_a_blank_file_in_a_tar_holds_no_record(tmp_path):
    path = tmp_path / "corpus.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("blank.jsonl", BLANK),
            ("one.jsonl", '{"title": "Cat", "text": "Cats purr."}'),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    assert [passage.title for passage in read_corpus([path])] == ["Cat"]


def test_an_index_of_a_blank_file_is_refused_at_once(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n\n")
    words = [
        *"-m mujica_jax.index build --kind bm25 --corpus".split(),
        "blank.jsonl",
        "--out",
        "out",
    ]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "blank.jsonl: there is no passage in it; give a corpus with at least one"
    )


def test_lines_are_counted_from_the_beginning_of_the_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('\ufeff\n\n{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    assert [number for number, _ in read_records(path)] == [3, 5]


@pytest.mark.parametrize("title", ["", "  ", None, float("nan")])
def test_beir_passages_may_have_no_title(tmp_path, title):
    passage = only_passage(tmp_path, _id="7", title=title, text="Ann Ode built lamps.", metadata={})
    assert passage == Passage(id="7", title="", text="Ann Ode built lamps.")
    assert passage.contents == "Ann Ode built lamps."


def test_contents_alone_are_a_text_or_title_and_text(tmp_path):
    assert only_passage(tmp_path, id="1", contents="Ann Ode built lamps.") == Passage(
        id="1", title="", text="Ann Ode built lamps."
    )
    assert only_passage(
        tmp_path, id="1", contents='"Ann Ode"\nShe built lamps.\nShe sold them.'
    ) == Passage(id="1", title="Ann Ode", text="She built lamps.\nShe sold them.")
    assert only_passage(tmp_path, id="1", contents="Ann Ode\nShe built lamps.") == Passage(
        id="1", title="Ann Ode", text="She built lamps."
    )
    assert (
        only_passage(tmp_path, id="1", contents="Ann Ode built lamps.\n").text.strip()
        == "Ann Ode built lamps."
    )


def test_the_title_that_a_record_gives_stays_beside_contents(tmp_path):
    text = "She was born in Ghent.\nShe built lamps."
    expected = Passage(id="1", title="Ann Ode", text=text)
    assert only_passage(tmp_path, id="1", title="Ann Ode", contents=text) == expected
    # FlashRAG repeats the title in quotes, which is no text of the passage.
    assert (
        only_passage(tmp_path, id="1", title="Ann Ode", contents=f'"Ann Ode"\n{text}') == expected
    )
    # MedRAG: `contents` is title and content in one.
    assert (
        only_passage(tmp_path, id="1", title="Ann Ode", content=text, contents=f"Ann Ode. {text}")
        == expected
    )
    assert only_passage(tmp_path, id="1", title="Ann Ode", text="", contents=text) == expected


def test_contents_that_repeat_the_title_inside_a_sentence_stay_whole(tmp_path):
    passage = only_passage(tmp_path, id="1", title="Ann Ode", contents="Ann Ode. She built lamps.")
    assert passage.title == "Ann Ode"
    assert passage.text == "Ann Ode. She built lamps."
    longer = only_passage(tmp_path, id="1", title="Ann", contents="Ann Ode\nShe built lamps.")
    assert longer.title == "Ann"
    assert longer.text == "Ann Ode\nShe built lamps."


def test_contents_without_a_title_beside_a_text_give_the_title(tmp_path):
    passage = only_passage(
        tmp_path, id="1", text="She built lamps.", contents='"Ann Ode"\nShe built lamps.'
    )
    assert passage == Passage(id="1", title="Ann Ode", text="She built lamps.")


@pytest.mark.parametrize(
    ("sentences", "text"),
    [
        (["She built lamps.", " She sold them."], "She built lamps. She sold them."),
        (["She built lamps.", "She sold them."], "She built lamps. She sold them."),
        (["She built lamps. ", "She sold them."], "She built lamps. She sold them."),
        (
            [["She built lamps.", "She sold them."], ["She died."]],
            "She built lamps. She sold them. She died.",
        ),
    ],
)
def test_a_list_of_sentences_is_one_text(tmp_path, sentences, text):
    assert only_passage(tmp_path, title="Ann Ode", text=sentences).text == text
    assert only_passage(tmp_path, title="Ann Ode", sentences=sentences).text == text


@pytest.mark.parametrize("bad", [[], [""], [1], ["a", None], [[]], {"0": "a"}])
def test_a_list_without_a_sentence_is_refused_with_its_line(tmp_path, bad):
    assert "corpus.jsonl, line 1: the passage's text is" in refusal(
        lines(tmp_path, {"title": "Ann", "text": bad})
    )


def test_titles_that_are_equal_or_begin_alike_are_passages_of_their_own(tmp_path):
    records = [
        {"id": "1", "title": "Ann", "text": "a river"},
        {"id": "2", "title": "Ann", "text": "a queen"},
        {"id": "3", "title": "Ann Ode", "text": "a builder of lamps"},
    ]
    passages = read_corpus([lines(tmp_path, *records)])
    write_passages(passages, tmp_path / "passages.arrow")
    assert [
        passage.text for passage in PassageFile(tmp_path / "passages.arrow").titled(["Ann"])
    ] == ["a river", "a queen"]


@pytest.mark.parametrize(
    ("identifier", "shown"), [(7, "7"), (7.0, "7"), (-3, "-3"), (1.5, "1.5"), (10**30, f"{10**30}")]
)
def test_numbers_are_ids(tmp_path, identifier, shown):
    assert only_passage(tmp_path, id=identifier, text="a").id == shown
    assert only_passage(tmp_path, _id=identifier, text="a").id == shown
    assert only_passage(tmp_path, id=None, _id=identifier, text="a").id == shown


@pytest.mark.parametrize("identifier", [float("nan"), float("inf"), True, ["1"], {"a": 1}])
def test_an_id_that_is_no_text_and_no_number_is_refused_or_skipped(tmp_path, identifier):
    path = lines(tmp_path, {"id": "1", "text": "a"}, {"id": identifier, "text": "b"})
    assert "corpus.jsonl, line 2: the passage's id is" in refusal(path)
    skipped = Skipped()
    assert [passage.id for passage in stream_corpus([path], skipped)] == ["1"]
    assert skipped.skipped == 1


def test_a_column_of_parquet_with_missing_ids_is_refused_with_its_row(tmp_path):
    path = tmp_path / "corpus.parquet"
    ids = pyarrow.array([1.0, float("nan")])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "id": ids}), path)
    assert "corpus.parquet, row 2: the passage's id is nan" in refusal(path)


def test_html_entities_are_the_characters_that_they_stand_for(tmp_path):
    passage = only_passage(
        tmp_path,
        id="1",
        title="Key &amp; Peele",
        text="&quot;Q&#39;s&quot; caf&eacute; &#x4e2d; R&D; a&para=1",
    )
    assert passage.title == "Key & Peele"
    assert passage.text == '"Q\'s" café 中 R&D; a&para=1'


def test_accents_are_composed_wherever_a_text_stands(tmp_path):
    path = lines(tmp_path, {"title": "Cafe\u0301", "facts": [["Cafe\u0301", 0]], "n": 1})
    assert list(read_records(path)) == [(1, {"title": "Café", "facts": [["Café", 0]], "n": 1})]


def test_an_older_index_finds_its_titles_by_every_spelling(tmp_path):
    """The file of that index holds titles as the corpus wrote them."""
    written = ["Key &amp; Peele", "Cafe\u0301", "Eddie &quot;The Eagle&quot;", "Plain"]
    passages = [
        Passage(id=str(number), title=title, text="a") for number, title in enumerate(written)
    ]
    write_passages(passages, tmp_path / "passages.arrow")
    titles = ["Key & Peele", "Café", 'Eddie "The Eagle"', "Plain"]
    assert [
        passage.title for passage in PassageFile(tmp_path / "passages.arrow").titled(titles)
    ] == titles


DPR = 'id\ttext\ttitle\n1\t"Ann Ode built ""big"" lamps."\tAnn Ode\n2\tShe said "no".\t\n'
DPR_PASSAGES = [
    Passage(id="1", title="Ann Ode", text='Ann Ode built "big" lamps.'),
    Passage(id="2", title="", text='She said "no".'),
]


def test_the_table_of_dpr_is_read(tmp_path):
    path = tmp_path / "psgs.tsv"
    path.write_text(DPR)
    assert read_corpus([path]) == DPR_PASSAGES
    path = tmp_path / "psgs.tsv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + DPR.replace("\n", "\r\n").encode()))
    assert read_corpus([path]) == DPR_PASSAGES


def test_columns_are_known_by_their_names(tmp_path):
    path = tmp_path / "corpus.csv"
    path.write_text(
        '\ufeff"title", text ,id\n"Ode, Ann","Ann\nbuilt lamps.",1\n\n,He sold them.,2\n',
        encoding="utf-8",
    )
    assert read_corpus([path]) == [
        Passage(id="1", title="Ode, Ann", text="Ann\nbuilt lamps."),
        Passage(id="2", title="", text="He sold them."),
    ]
    assert [number for number, _ in read_records(path)] == [2, 5]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "1\tAnn built lamps.\tAnn\n",
            "line 1: the first line of a table must name its columns, but this one is 1, Ann built",
        ),
        (
            "id\ttext\ttext\n",
            "line 1: two columns of the table have the same name (id, text, text)",
        ),
        (
            "id\ttext\n1\ta\n2\tb\tc\n",
            "line 3: the row has 3 fields, but the first line names 2 columns (id, text)",
        ),
        ("id\ttext\n1\ta\n2\n", "line 3: the row has 1 fields"),
        ('id\ttext\n1\t"a" b\n', "line 2: not a row of a table"),
        ('id\ttext\n1\ta\n2\t"open\n3\tb\n', "line 3: not a row of a table"),
        ("id\ttext\n1\t\n", "line 2: the passage's text is ''"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_its_line(tmp_path, content, problem):
    path = tmp_path / "corpus.tsv"
    path.write_text(content)
    assert problem in refusal(path)


@pytest.mark.parametrize("name", ["beir.jsonl", "pyserini.jsonl", "dpr.tsv"])
def test_a_corpus_without_titles_is_indexed_and_searched(tmp_path, capsys, name):
    written = {
        "beir.jsonl": '{"_id": "1", "title": "", "text": "Ann Ode built lamps.", "metadata": {}}\n',
        "pyserini.jsonl": '{"id": "1", "contents": "Ann Ode built lamps."}\n',
        "dpr.tsv": DPR,
    }
    (tmp_path / name).write_text(written[name])
    out = str(tmp_path / "out")
    assert (
        index.main(["build", "--corpus", str(tmp_path / name), "--kind", "bm25", "--out", out]) == 0
    )
    capsys.readouterr()
    assert index.main(["query", "--index", out, "--k", "1", "lamps"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["id"] == "1"


def test_what_macos_writes_beside_the_files_of_an_archive_is_left_out(tmp_path):
    path = tmp_path / "corpus.tar"
    passage = json.dumps({"id": "1", "title": "Lisma", "text": "A town."}).encode()
    members = {
        "._corpus": b"\0\5\x16\7",
        "corpus/._wiki_00.bz2": b"\0\5\x16\7",
        "corpus/wiki_00.bz2": bz2.compress(passage),
        "corpus/.DS_Store": b"\0\0\0\1Bud1",
        "__MACOSX/corpus/wiki_00.bz2": b"\0",
    }
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert read_corpus([path]) == [Passage(id="1", title="Lisma", text="A town.")]
