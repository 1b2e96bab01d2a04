import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mujica_jax import metrics
from mujica_jax.metrics import bootstrap_interval, score
from tests.helpers.shared_data import DATA, needs_data

RULES = ("hotpot", "two_wiki", "musique", "triviaqa", "cover_em")
WORDS = st.lists(
    st.sampled_from(["yes", "no", "the", "Paris", "a", "1,234", "film", "U.S.", "‘x’"]), max_size=5
).map(" ".join)


@needs_data
@pytest.mark.parametrize("rule", RULES)
def test_scores_are_those_of_the_official_script(rule):
    compared = 0
    with gzip.open(DATA / "metric_fixtures.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            expected = row["expected"][rule]
            # The HotpotQA script takes one gold answer.
            if expected is None:
                continue
            expected = {"em": expected} if rule == "cover_em" else expected
            scores = score(row["prediction"], row["golds"], rule)
            assert {name: getattr(scores, name) for name in expected} == expected, (
                row["prediction"],
                row["golds"],
            )
            compared += 1
    assert compared == (1222 if rule == "hotpot" else 1638)


def test_precision_and_recall_are_best_over_golds_each_by_itself():
    scores = score(
        "Anna Maria Mozart",
        ["Constanze Mozart", "Maria Constanze Caecilia Josepha Johanna Aloisia Mozart"],
        "two_wiki",
    )
    assert scores.precision == 2 / 3
    assert scores.recall == 1 / 2
    assert scores.f1 == pytest.approx(0.4)


def test_hotpot_over_several_golds_is_the_best_of_each():
    several = score("Robert II Isumbert", ["Robert II of France", "Robert II"], "hotpot")
    assert (
        several.f1 == score("Robert II Isumbert", ["Robert II"], "hotpot").f1 == pytest.approx(0.8)
    )


@pytest.mark.parametrize(
    ("prediction", "gold", "rule", "f1"),
    [
        ("no no no", "no", "hotpot", 0.0),
        ("no no no", "no", "musique", 0.5),
        ("Band-e-Amir", "Band-e Amir", "triviaqa", 1.0),
        ("Band-e-Amir", "Band-e Amir", "two_wiki", 0.0),
        ("", "", "musique", 1.0),
        ("", "", "two_wiki", 0.0),
    ],
)
def test_where_the_rules_differ(prediction, gold, rule, f1):
    assert score(prediction, [gold], rule).f1 == f1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gold", ["The The", "A", "!"])
def test_a_gold_answer_that_normalises_to_nothing_equals_only_itself(gold, rule):
    for prediction in ("Oasis", "", "An", "a b", "."):
        wrong = score(prediction, [gold], rule)
        assert wrong.em == 0.0, prediction
        assert wrong.f1 == 0.0, prediction
    itself = score(f" {gold.lower()} ", [gold], rule)
    assert itself.em == 1.0
    assert itself.f1 == 1.0
    assert itself.precision == 1.0
    assert itself.recall == 1.0
    assert score("Oasis", [gold, "Oasis"], rule).em == 1.0, "other gold answers count as before"


def test_an_answer_of_a_set_that_normalises_to_nothing_counts_for_itself():
    sets = ((("The The",), ("Oasis",)),)
    assert metrics.score_set("the the; Oasis", sets).em == 1.0
    assert metrics.score_set("a; Oasis", sets).recall == 0.5


@pytest.mark.parametrize("rule", RULES)
def test_composed_and_decomposed_letters_are_equal(rule):
    composed = "Andr\u00e9 Th\u00e9o"
    decomposed = "Andre\u0301 The\u0301o"
    for prediction, gold in ((composed, decomposed), (decomposed, composed)):
        scores = score(prediction, [gold], rule)
        assert scores.em == 1.0
        assert scores.f1 == 1.0
    # The lower case of its first letter is two characters.
    turkish = "\u0130zmir"
    assert score(turkish, [turkish], rule).em == 1.0


def test_no_gold_is_refused():
    with pytest.raises(ValueError, match="at least one gold"):
        score("Paris", [], "two_wiki")


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3), st.sampled_from(RULES))
def test_scores_lie_between_zero_and_one_and_ignore_the_order_of_golds(prediction, golds, rule):
    scores = score(prediction, golds, rule)
    assert all(
        0.0 <= value <= 1.0 for value in (scores.em, scores.f1, scores.precision, scores.recall)
    )
    assert scores == score(prediction, golds[::-1], rule)


@given(WORDS.filter(lambda text: "Paris" in text), st.sampled_from(RULES))
def test_the_gold_itself_scores_full_marks(gold, rule):
    assert score(gold, [gold], rule).em == score(gold, [gold], rule).f1 == 1.0


def test_bootstrap_interval_holds_the_mean_and_has_the_width_of_the_normal_approximation():
    values = [1.0] * 300 + [0.0] * 700
    low, high = bootstrap_interval(values)
    assert low < 30.0 < high
    # half width 1.96 * sqrt(0.3 * 0.7 / 1000) = 2.84 points
    assert (high - low) / 2 == pytest.approx(2.84, abs=0.3)


def test_bootstrap_interval_depends_on_the_seed_alone():
    values = [0.0, 0.25, 1.0, 0.5]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    assert bootstrap_interval([0.5] * 7) == (50.0, 50.0)


def test_bootstrap_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([])


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("1961", 2 / 3),  # one of two asked for: precision 1, recall a half
        ("In 1961; 1972", 1.0),
        ("1972; in 1961; 1980", 0.8),  # 2 of 3 and 2 of 2
        ("1961; In 1961", 0.5),  # the second one is no other answer: 1 of 2 and 1 of 2
        ("1980", 0.0),
        (" ; ", 0.0),
        (None, 0.0),
    ],
)
def test_the_f1_of_a_set_of_answers(prediction, expected):
    asked = ((("1961", "In 1961"), ("1972",)),)
    assert metrics.score_set(prediction, asked).f1 == pytest.approx(expected)
    assert metrics.score_set("1980", (*asked, (("1980",),))).f1 == 1.0, "the best annotation counts"


def test_supporting_passages():
    assert metrics.supporting({"a", "b"}, {"a", "b"}) == metrics.Score(
        em=1.0, f1=1.0, precision=1.0, recall=1.0
    )
    partial = metrics.supporting({"a", "c", "d"}, {"a", "b"})
    assert partial.em == 0.0
    assert partial.precision == 1 / 3
    assert partial.recall == 1 / 2
    assert partial.f1 == pytest.approx(0.4)
    assert metrics.supporting((), {"a"}) == metrics.Score(em=0.0, f1=0.0, precision=0.0, recall=0.0)


def test_the_macro_f1_of_gerbil_and_the_plain_one():
    """The first of three questions is right.

    The second has one of two answers and one that is wrong, the third no answer.
    """
    asked = [((("ant",),),), ((("bee",), ("cow",)),), ((("dog",),),)]
    scores = [
        metrics.score_set(answer, sets)
        for answer, sets in zip(["ant", "bee; fox", None], asked, strict=True)
    ]
    assert [score.f1 for score in scores] == [1.0, 0.5, 0.0]
    # precision (1 + 1/2 + 1) / 3 = 5/6, recall (1 + 1/2 + 0) / 3 = 1/2
    assert metrics.gerbil_macro_f1(scores, [True, True, False]) == pytest.approx(
        2 * (5 / 6) * 0.5 / (5 / 6 + 0.5)
    )
    assert metrics.gerbil_macro_f1([scores[2]], [True]) == 0.0
