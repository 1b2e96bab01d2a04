import bz2
import gzip
import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.errors import UserError
from mujica_jax.retrieval.files import Skipped
from mujica_jax.retrieval.text import corpus, corpus_records
from mujica_jax.retrieval.text.corpus import Passage, PassageIds, read_corpus, stream_corpus
from mujica_jax.retrieval.text.corpus_records import open_text, read_records
from tests.helpers.shared_data import TWO_WIKI, needs_data

CAT = {"title": "Cat", "text": "Cats purr."}
DOG = {"title": "Dog", "text": "Dogs bark."}


def test_array_and_lines_give_the_same_passages(tmp_path):
    array = tmp_path / "corpus.json"
    lines = tmp_path / "corpus.jsonl"
    array.write_text(json.dumps([CAT, DOG], indent=2))
    lines.write_text(f"{json.dumps(CAT)}\n\n{json.dumps(DOG)}\n")
    assert read_corpus([array]) == read_corpus([lines])
    assert read_corpus([array])[1] == Passage(id="1", title="Dog", text="Dogs bark.")


def test_gzip_and_explicit_ids(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps(CAT | {"id": 7}) + "\n" + json.dumps(DOG | {"_id": "d"}) + "\n")
    assert [passage.id for passage in read_corpus([path])] == ["7", "d"]


def test_ids_count_over_all_files(tmp_path):
    first = tmp_path / "a.jsonl"
    second = tmp_path / "b.jsonl"
    first.write_text(json.dumps(CAT))
    second.write_text(json.dumps(DOG))
    assert [passage.id for passage in read_corpus([first, second])] == ["0", "1"]


@pytest.mark.parametrize(
    "bad",
    [
        {"title": "Dog"},
        {"title": "Dog", "text": "  "},
        {"text": None},
        {"title": 3, "text": "x"},
        "dog",
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_passage_without_text_or_with_a_wrong_title_is_refused_with_its_line(
    tmp_path, bad, indent
):
    lines = tmp_path / "corpus.jsonl"
    lines.write_text(f"{json.dumps(CAT)}\n{json.dumps(bad)}\n")
    with pytest.raises(UserError, match=r"corpus\.jsonl, line 2: "):
        read_corpus([lines])
    array = tmp_path / "corpus.json"
    array.write_text(json.dumps([CAT, bad], indent=indent))
    with pytest.raises(UserError, match=rf"corpus\.json, line {1 if indent is None else 6}: "):
        read_corpus([array])


def test_a_repeated_id_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f"{json.dumps(CAT | {'id': 'x'})}\n{json.dumps(DOG | {'id': 'x'})}\n")
    with pytest.raises(UserError, match=r"line 2: the passage id 'x' was already used in .*line 1"):
        read_corpus([path])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"title": "Cat"', 1),
        ('[{"title": "Cat", "text": "x"}\n{"title"', 2),
        ('[\n{"title": "Cat",\n oops}]', 3),
        ("[\n", 2),
    ],
)
def test_broken_json_is_refused_with_its_line(tmp_path, content, line):
    path = tmp_path / "corpus.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"line {line}: "):
        read_corpus([path])


def test_a_missing_or_truncated_file_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_corpus([tmp_path / "none.jsonl"])
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(CAT).encode() * 1000)[:-20])
    with pytest.raises(UserError, match="cannot be read"):
        read_corpus([path])


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2), max_size=5),
    st.sampled_from([None, 0, 3]),
)
def test_an_array_gives_what_json_gives(tmp_path_factory, records, indent):
    path = tmp_path_factory.mktemp("array") / "records.json"
    path.write_text(json.dumps(records, indent=indent), encoding="utf-8")
    for (_, record), written in zip(read_records(path), records, strict=True):
        assert record == {key: corpus_records.in_one_form(text) for key, text in written.items()}


def test_parquet_rows_are_passages_and_bad_ones_have_their_row(tmp_path):
    path = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([CAT | {"id": "c"}, DOG | {"id": "d"}]), path
    )
    assert [(passage.id, passage.title) for passage in read_corpus([path])] == [
        ("c", "Cat"),
        ("d", "Dog"),
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([CAT, {"title": "Dog", "text": None}]), path
    )
    with pytest.raises(UserError, match=r"corpus\.parquet, row 2: the passage's text is None"):
        read_corpus([path])
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match=r"corpus\.parquet cannot be read"):
        read_corpus([path])


def abstracts(path, members):
    """Write abstracts as HotpotQA does: a tar of bz2 JSON Lines, in folders."""
    with tarfile.open(path, "w:bz2") as archive:
        for name, records in members.items():
            content = bz2.compress("\n".join(map(json.dumps, records)).encode())
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_the_hotpotqa_abstracts(tmp_path):
    cat = {"id": "12", "url": "...", "title": "Cat", "text": ["Cats purr.", " They sleep."]}
    members = {
        "AA/wiki_00.bz2": [cat],
        "AB/wiki_00.bz2": [cat | {"id": "13"}, {"id": "14", "title": "Empty", "text": []}],
    }
    path = abstracts(tmp_path / "abstracts.tar.bz2", members)
    with pytest.raises(
        UserError, match=r"tar\.bz2, AB/wiki_00\.bz2, line 2: the passage's text is ''"
    ):
        read_corpus([path])
    skipped = Skipped()
    passages = list(stream_corpus([path], skipped))
    assert [(passage.id, passage.text) for passage in passages] == [
        ("12", "Cats purr. They sleep."),
        ("13", "Cats purr. They sleep."),
    ]
    assert skipped.skipped == 1
    assert "line 2" in skipped.first_skipped
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"abstracts\.tar\.bz2 cannot be read"):
        read_corpus([path])


def test_wiki_18_has_the_title_in_quotes(tmp_path):
    path = tmp_path / "wiki-18.jsonl"
    path.write_text(
        json.dumps({"id": "0", "contents": '"The "Cat""\nCats purr.\nThey sleep.'}) + "\n"
    )
    assert read_corpus([path]) == [
        Passage(id="0", title='The "Cat"', text="Cats purr.\nThey sleep.")
    ]
    path.write_text(json.dumps({"id": "0", "contents": '"Cat"'}) + "\n")
    with pytest.raises(UserError, match="the passage's text is ''"):
        read_corpus([path])


def test_an_array_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_records, "READ_CHARACTERS", 7)
    monkeypatch.setattr(corpus_records, "MAX_RECORD_CHARACTERS", 100)
    path = tmp_path / "corpus.json"
    path.write_text("\n" + json.dumps([CAT, 12345, DOG, [1, {"a": None}]], indent=1))
    assert list(read_records(path)) == [(3, CAT), (7, 12345), (8, DOG), (12, [1, {"a": None}])]
    path.write_text('[{"title": oops' + "x" * 1000)
    message = (
        r"line 1: the JSON record does not end within 100 characters "
        r"\(Expecting value in line 1\)"
    )
    with open_text(path) as file, pytest.raises(UserError, match=message):
        list(corpus_records._text_records(path, file))


@pytest.mark.parametrize(
    ("ids", "refused"),
    [
        ([None, "0"], "line 2"),  # the first one's id is its position
        (["1", None], "line 2"),  # and here the second one's
        (["b", None, "1"], "line 3"),
        (["x", "0", "x"], "line 3"),
        (["00", "0", "01", None], None),
        (["2", "0", "1"], None),
    ],
)
def test_positions_and_given_ids_share_one_space(tmp_path, ids, refused):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(CAT if id is None else CAT | {"id": id}) for id in ids))
    if refused is None:
        assert [passage.id for passage in read_corpus([path])] == [
            id or str(n) for n, id in enumerate(ids)
        ]
    else:
        with pytest.raises(
            UserError, match=f"{refused}: the passage id .* was already used in .*line [12]; give"
        ):
            read_corpus([path])


def test_a_file_given_twice_repeats_its_ids(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(CAT | {"id": id}) for id in "abc"))
    with pytest.raises(
        UserError,
        match=r"line 1: the passage id 'a' was already used in .*line 1; give each file once",
    ):
        read_corpus([path, path])
    skipped = Skipped()
    assert [passage.id for passage in stream_corpus([path, path], skipped)] == ["a", "b", "c"]
    assert skipped.skipped == 3
    assert "give each file once" in skipped.first_skipped
    path.write_text("\n".join(map(json.dumps, [CAT, DOG])))
    assert [passage.id for passage in read_corpus([path, path])] == ["0", "1", "2", "3"], (
        "positions never repeat"
    )


def test_repeated_ids_that_are_skipped_cost_one_look_back(tmp_path, monkeypatch):
    path = tmp_path / "chunks.jsonl"
    path.write_text("\n".join(json.dumps(CAT | {"id": f"doc{n // 5}"}) for n in range(500)))
    readings = []
    records_of = corpus.records_of

    def counted_records_of(paths):
        readings.append(paths)
        return records_of(paths)

    monkeypatch.setattr(corpus, "records_of", counted_records_of)
    skipped = Skipped()
    assert len(list(stream_corpus([path], skipped))) == 100
    assert skipped.skipped == 400
    assert len(readings) == 2
    assert "line 2: the passage id 'doc0' was already used in" in skipped.first_skipped
    assert "line 1;" in skipped.first_skipped


@pytest.mark.parametrize("field", ["id", "title", "text"])
def test_a_lone_surrogate_is_refused_or_skipped(tmp_path, field):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, [CAT, CAT | {field: "half \ud83d of"}, DOG])))
    with pytest.raises(
        UserError,
        match=rf"line 2, the passage's {field}: 'half \\ud83d of' cannot be written as UTF-8",
    ):
        read_corpus([path])
    skipped = Skipped()
    assert [passage.title for passage in stream_corpus([path], skipped)] == ["Cat", "Dog"]
    assert skipped.skipped == 1
    path.write_text(json.dumps(CAT | {field: "\U0001f600"}))
    assert getattr(read_corpus([path])[0], field) == "\U0001f600", "a whole pair is a character"


@pytest.mark.parametrize(
    ("value", "problem"),
    [("1" * 5000, "a number with too many digits"), ("[" * 200_000, "nested too deeply")],
)
def test_json_that_python_does_not_take_is_refused_with_its_line(tmp_path, value, problem):
    for name, content in (
        ("a.jsonl", '{"title": "Cat"}\n{"id": %s}\n'),
        ("a.json", '[{"title": "Cat"},\n{"id": %s}]'),
    ):
        (tmp_path / name).write_text(content % value)
        with pytest.raises(UserError, match=rf"line 2: not a JSON record \({problem}\)"):
            list(read_records(tmp_path / name))


def test_an_id_of_many_digits_is_an_id(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(CAT | {"id": "1" * 5000}))
    assert read_corpus([path])[0].id == "1" * 5000


def test_an_array_in_the_array_is_refused_without_being_read_whole(tmp_path, monkeypatch):
    """The error names the line where it began, wherever the text breaks off."""
    monkeypatch.setattr(corpus_records, "READ_CHARACTERS", 50)
    monkeypatch.setattr(corpus_records, "MAX_RECORD_CHARACTERS", 400)
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps([[CAT] * 1000], indent=1))
    with open_text(path) as file:
        with pytest.raises(
            UserError, match=r"line 2: the JSON record does not end within 400 characters"
        ):
            list(corpus_records._text_records(path, file))
        assert len(file.read()) > path.stat().st_size - 1000


@pytest.mark.parametrize("value", [{"x": ["y" * 100] * 20_000}, [{"a" * 500: 1}] * 300, 3, None])
def test_a_wrong_value_of_any_size_is_one_short_sentence(tmp_path, value):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"title": "Cat", "text": value}))
    with pytest.raises(UserError, match=r"line 1: the passage's text is ") as error:
        read_corpus([path])
    assert len(str(error.value)) < len(str(path)) + 350
    path.write_text("\n".join([json.dumps(CAT | {"id": "x" * 10_000})] * 2))
    with pytest.raises(
        UserError, match=r"line 2: the passage id 'xxx.*\.\.\..*xxx' was already used"
    ) as error:
        read_corpus([path])
    assert len(str(error.value)) < 2 * len(str(path)) + 350


def test_what_only_looks_like_an_archive_or_is_damaged_is_one_sentence(tmp_path):
    path = tmp_path / "fake.tar"
    path.write_bytes(b"not a tar at all" * 100)
    with pytest.raises(
        UserError, match=r"fake\.tar cannot be read \(file could not be opened successfully\)"
    ) as error:
        read_corpus([path])
    assert "\n" not in str(error.value)
    path = tmp_path / "damaged.jsonl.gz"
    whole = bytearray(
        gzip.compress("\n".join(json.dumps(CAT | {"n": n}) for n in range(2000)).encode())
    )
    whole[200:1000] = bytes(800)
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"damaged\.jsonl\.gz cannot be read"):
        read_corpus([path])


@given(
    st.lists(
        st.one_of(st.integers(0, 40).map(str), st.sampled_from(["00", "x", "", "²"])), max_size=60
    )
)
def test_passage_ids_say_what_a_set_says(identifiers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "MERGED_IDS", 7)
        ids = PassageIds()
        known = set()
        for identifier in identifiers:
            assert ids.add(identifier) == (identifier not in known)
            known.add(identifier)


@needs_data
def test_the_2wiki_corpus():
    passages = read_corpus([TWO_WIKI / "corpus_6119.json.gz"])
    assert len(passages) == len({passage.title for passage in passages}) == 6119
