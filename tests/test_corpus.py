import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import TWO_WIKI, needs_data

from mujica_jax.errors import UserError
from mujica_jax.retrieval.corpus import Passage, read_corpus, read_records

CAT = {"title": "Cat", "text": "Cats purr."}
DOG = {"title": "Dog", "text": "Dogs bark."}


def test_array_and_lines_give_the_same_passages(tmp_path):
    array, lines = tmp_path / "corpus.json", tmp_path / "corpus.jsonl"
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
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(CAT))
    second.write_text(json.dumps(DOG))
    assert [passage.id for passage in read_corpus([first, second])] == ["0", "1"]


@pytest.mark.parametrize(
    "bad", [{"title": "Dog"}, {"title": "Dog", "text": "  "}, {"text": "Dogs bark."}, {"title": 3, "text": "x"}, "dog"]
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_passage_without_title_or_text_is_refused_with_its_line(tmp_path, bad, indent):
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
    assert [record for _, record in read_records(path)] == records


@needs_data
def test_the_2wiki_corpus():
    passages = read_corpus([TWO_WIKI / "corpus_6119.json.gz"])
    assert len(passages) == len({passage.title for passage in passages}) == 6119
