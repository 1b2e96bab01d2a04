import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text import bm25
from mujica_jax.retrieval.text.bm25 import Bm25Index, lucene_length, unicode_words
from mujica_jax.retrieval.text.corpus import Passage, read_corpus
from mujica_jax.retrieval.text.corpus_records import read_records
from tests.helpers.shared_data import TWO_WIKI, needs_data

ANIMALS = [
    Passage(id="0", title="Cat", text="The cat purrs and the cat sleeps."),
    Passage(id="1", title="Dog", text="The dog barks."),
    Passage(id="2", title="Cat and dog", text="Neither the cat nor the dog flies."),
]


@needs_data
@pytest.mark.parametrize(
    ("tokeniser", "recall_at_2", "recall_at_5"),
    [("default", 54.16, 64.60), ("elasticsearch", 50.66, 61.39)],
)
def test_recall_on_2wiki_is_the_published_one(tokeniser, recall_at_2, recall_at_5):
    index = Bm25Index(read_corpus([TWO_WIKI / "corpus_6119.json.gz"]), tokeniser)
    questions = [record for _, record in read_records(TWO_WIKI / "questions_visible.jsonl.gz")]
    results = index.search([question["question"] for question in questions], 5)

    def recall(k: int) -> float:
        shares = []
        for question, result in zip(questions, results, strict=True):
            gold = set(question["supporting_facts"])
            shares.append(
                len(gold & {index.passages[position].title for position, _ in result[:k]})
                / len(gold)
            )
        return 100 * sum(shares) / len(shares)

    assert recall(2) == pytest.approx(recall_at_2, abs=0.1)
    assert recall(5) == pytest.approx(recall_at_5, abs=0.1)


def test_elasticsearch_scores_by_hand():
    # Words with the title: 8, 4 and 10, on average 22/3; "cat" stands in two of three passages,
    # three times in the first.
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [
        (0, idf * 3 / (3 + 1.2 * (0.25 + 0.75 * 8 / (22 / 3)))),
        (2, idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 10 / (22 / 3)))),
    ]
    hits = Bm25Index(ANIMALS, "elasticsearch").search(["cat"], 3)[0]
    assert [position for position, _ in hits] == [position for position, _ in expected]
    assert [score for _, score in hits] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize(
    ("words", "stored"),
    [(0, 0), (7, 7), (39, 39), (40, 40), (41, 40), (43, 42), (100, 96), (1000, 984)],
)
def test_lengths_are_rounded_as_in_lucene(words, stored):
    assert lucene_length(words) == stored


@given(st.integers(0, 2**31 - 1))
def test_rounded_lengths_are_at_most_an_eighth_too_small(words):
    assert words * 7 / 8 <= lucene_length(words) <= words


def test_unicode_words():
    assert unicode_words("Can't stop U.S.A. at 1,234.5; naïve 'quote' a:b x_1 7:30") == [
        *("can't", "stop", "u.s.a", "at", "1,234.5", "naïve", "quote", "a:b", "x_1", "7", "30"),
    ]


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_more_results_than_passages_and_queries_without_known_words(tokeniser):
    index = Bm25Index(ANIMALS, tokeniser)
    assert sorted(position for position, _ in index.search(["cat dog"], 100)[0]) == [0, 1, 2]
    assert index.search(["", "zebra", "?!"], 5) == [[], [], []]
    assert index.search([], 5) == []


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_a_corpus_without_words_finds_nothing(tokeniser):
    assert Bm25Index([], tokeniser).search(["cat"], 3) == [[]]
    assert Bm25Index([Passage(id="0", title="!", text="?")], tokeniser).search(["cat"], 3) == [[]]


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_words_are_read_a_few_texts_at_a_time(tokeniser, monkeypatch, tmp_path):
    """The index is that of all texts at once.

    Its words are numbered as the corpus has them, whatever Python's hashes are.
    """
    passages = [*ANIMALS, Passage(id="3", title="!", text="?")] * 3
    whole = Bm25Index(passages, tokeniser)
    sizes = []
    progress = []

    def recorded(texts, tokeniser_name):
        sizes.append(len(texts))
        return tokens(texts, tokeniser_name)

    tokens = bm25.indexed_words
    monkeypatch.setattr(bm25, "indexed_words", recorded)
    monkeypatch.setattr(bm25, "TEXTS_AT_ONCE", 5)
    few = Bm25Index(passages, tokeniser, progress.append)
    assert sizes == [5, 5, 2]
    assert progress == [5, 10, 12]
    assert few.version == whole.version
    assert few.search(["cat dog", "flies"], 12) == whole.search(["cat dog", "flies"], 12)
    few.save(tmp_path / "few")
    whole.save(tmp_path / "whole")
    for path in (tmp_path / "few").iterdir():
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    vocabulary = json.loads((tmp_path / "few" / "vocab.index.json").read_text())
    words = [word for passage in passages for word in tokens([passage.contents], tokeniser)[0]]
    assert vocabulary == {word: number for number, word in enumerate(dict.fromkeys(words))}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["red", "green", "blue", "grey"]), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["default", "elasticsearch"]),
)
def test_a_shorter_result_is_a_prefix_of_a_longer_one(texts, tokeniser):
    passages = [
        Passage(id=str(n), title="colour", text=" ".join(words)) for n, words in enumerate(texts)
    ]
    index = Bm25Index(passages, tokeniser)
    longest = index.search(["red blue"], len(passages))[0]
    assert [score for _, score in longest] == sorted((score for _, score in longest), reverse=True)
    assert {position for position, _ in longest} == {
        n for n, words in enumerate(texts) if {"red", "blue"} & set(words)
    }
    for k in range(1, len(passages) + 1):
        assert index.search(["red blue"], k)[0] == longest[:k]


# Passages of several scripts, and a query that shares a word with one of them alone.
SCRIPTS = {
    "东京大学是日本的第一所国立大学。": "东京大学",
    "猫在屋顶上睡觉": "猫",
    "織田信長は尾張の大名である": "信長は誰",
    "ラーメンの店": "ラーメン",
    "세종대왕은 한글을 창제하였다.": "한글을 만든",
    "กรุงเทพมหานครเป็นเมืองหลวง": "กรุงเทพ",
    "हिन्दी भारत की भाषा है": "हिन्दी",
    "ভাষা বাংলা": "বাংলা",
    "ភ្នំពេញ": "ភ្នំពេញ",
}


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
@pytest.mark.parametrize("text", list(SCRIPTS))
def test_text_of_scripts_without_spaces_is_found(tokeniser, text):
    texts = [*SCRIPTS, "The cat purrs."]
    index = Bm25Index(
        [Passage(id=str(n), title="", text=passage_text) for n, passage_text in enumerate(texts)],
        tokeniser,
    )
    (best, *_), *_ = index.search([SCRIPTS[text]], 1)
    assert texts[best[0]] == text


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_pairs_are_those_of_lucenes_analyser(tokeniser):
    index = Bm25Index([], tokeniser)
    assert index.encode(["东京大学 iPhone手机, 猫!"]) == [
        ["iphone", "东京", "京大", "大学", "手机", "猫"]
    ]
    assert bm25.indexed_words(["东京大学"], tokeniser) == [
        ["东京", "京大", "大学", "东", "京", "大", "学"]
    ]
    assert bm25.indexed_words(["한글"], tokeniser) == [["한글"]]


@pytest.mark.parametrize("tokeniser", ["default", "elasticsearch"])
def test_widths_and_accents_do_not_matter(tokeniser):
    index = Bm25Index([], tokeniser)
    assert index.encode(["ＡＢＣ ﾗｰﾒﾝ"]) == index.encode(["ABC ラーメン"])
    assert index.encode(["Cafe\u0301 de\u0301ja\u0300"]) == [["café", "déjà"]]


@given(
    st.text(st.characters(max_codepoint=0x2FF), max_size=40),
    st.sampled_from(["default", "elasticsearch"]),
)
def test_words_of_latin_text_are_those_of_the_tokeniser(text, tokeniser):
    assert bm25.indexed_words([text], tokeniser) == bm25._spaced_words([text], tokeniser)


def test_an_index_from_before_pairs_is_searched_by_its_own_words(tmp_path):
    passages = [
        Passage(id="0", title="", text="东京大学 Tokyo"),
        Passage(id="1", title="", text="京都 Kyoto"),
    ]
    Bm25Index(passages).save(tmp_path / "new")
    new = Bm25Index.load(tmp_path / "new", passages, version="v")
    assert [position for position, _ in new.search(["大学"], 2)[0]] == [0]
    (tmp_path / "new" / bm25.WORDS_FILE).unlink()
    old = Bm25Index.load(tmp_path / "new", passages, version="v")
    assert old.encode(["大学 kyoto 东京大学"]) == [["大学", "kyoto", "东京大学"]]
    assert [position for position, _ in old.search(["kyoto"], 2)[0]] == [1]


def test_an_index_with_words_of_a_later_release_is_refused(tmp_path):
    Bm25Index(ANIMALS).save(tmp_path / "index" / "bm25")
    (tmp_path / "index" / "bm25" / bm25.WORDS_FILE).write_text(
        '{"scripts_without_spaces": "dictionary"}'
    )
    with pytest.raises(
        UserError,
        match=r"words\.json describes a way to make words that this release does not know: "
        r"remove .*index ",
    ):
        Bm25Index.load(tmp_path / "index" / "bm25", ANIMALS, version="v")


def test_the_version_of_latin_text_is_the_one_it_had():
    """Results that were kept under it stay right."""
    assert Bm25Index(ANIMALS).version == "2d969526aabc8e50"
