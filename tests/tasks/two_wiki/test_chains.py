import pytest
from hypothesis import given
from hypothesis import strategies as st

from mujica_jax.records import Evidence, Question
from mujica_jax.tasks.two_wiki.chains import (
    MONTHS,
    answer_from_evidence,
    compare_dates,
    comparison_rule,
    country,
    evidence_rounds,
    follows_from_evidence,
    parse_date,
    with_printed_dates,
)


def question(kind: str, text: str, answer: str, *evidences: tuple[str, str, str]) -> Question:
    chain = tuple(
        Evidence(subject=subject, relation=relation, object=value)
        for subject, relation, value in evidences
    )
    return Question(id="q", text=text, answers=(answer,), evidences=chain, kind=kind)


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("November 14, 1961", (1961, 11, 14)),
        ("14 November 1961", (1961, 11, 14)),
        ("Nov 14, 1961", (1961, 11, 14)),
        ("March 1961", (1961, 3, 0)),
        ("1961", (1961, 0, 0)),
        ("1961-03-02", (1961, 3, 2)),
        ("1 August 10", (10, 8, 1)),
        ("15 March 44 BC", (-44, 3, 15)),
        (" 1961 ", (1961, 0, 0)),
        ("Paris", None),
        ("Paris 1961", None),
        ("14 Brumaire 1961", None),
        ("1961-13-02", None),
        ("", None),
    ],
)
def test_parse_date(text, date):
    assert parse_date(text) == date


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("June 9, 1880",), ("June 9, 1880", "9 June 1880")),
        (("9 June 1880",), ("9 June 1880",)),
        (("Jan 1, 1880",), ("Jan 1, 1880", "1880")),
        (("March 1961", "Paris"), ("March 1961", "Paris")),
        (("1961-03-02",), ("1961-03-02", "2 March 1961")),
        (("March 15, 44 BC",), ("March 15, 44 BC", "15 March 44 BC")),
        (("007",), ("007",)),
        (("yes",), ("yes",)),
    ],
)
def test_a_date_of_the_gold_answer_is_followed_by_it_as_graphs_print_it(answers, expected):
    assert with_printed_dates(answers) == expected


@given(st.integers(1, 2100), st.integers(1, 12), st.integers(1, 31))
def test_all_written_forms_of_a_date_are_the_same_date(year, month, day):
    name = MONTHS[month - 1].capitalize()
    forms = (f"{day} {name} {year}", f"{name} {day}, {year}", f"{year}-{month:02}-{day:02}")
    assert {parse_date(form) for form in forms} == {(year, month, day)}


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        ((1900, 1, 1), (1901, 0, 0), -1),
        ((1901, 0, 0), (1901, 2, 3), 0),
        ((1901, 2, 0), (1901, 3, 1), -1),
        ((1901, 2, 4), (1901, 2, 3), 1),
        ((-44, 3, 15), (14, 8, 19), -1),
    ],
)
def test_dates_are_compared_as_far_as_both_are_known(first, second, order):
    assert compare_dates(first, second) == order
    assert compare_dates(second, first) == -order


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Which film was released more recently, First Blood or The Last Wave?", "later_date"),
        ("Which film came out first, The Later Years or Younger?", "earlier_date"),
        ("Which film has the director who is older than the other, X or Y? ", "earlier_date"),
        ("Which film whose director is younger, X or Y?", "later_date"),
        ("Which film has the director died later, X or Y?", "later_date"),
        ("Who was born first out of Ann Last and Bob?", "earlier_date"),
        ("Was Ann Later or Bob born first?", "earlier_date"),
        ("Was Ann First or Bob born later?", "later_date"),
        ("Who lived longer, X or Y?", "longer_life"),
        ("Which film has more directors, X or Y?", "more"),
        ("Does X have the same nationality as Y?", "same"),
        ("Do both films: X and Y have the directors from the same country?", "same"),
        ("Are X and Y both rivers?", None),
        ("Who is the mother of the first king?", None),
        ("When was the director of film First, Last born?", None),
    ],
)
def test_comparison_rule_reads_the_words_outside_the_names(text, rule):
    assert comparison_rule(text) == rule


def test_rounds_ask_what_is_independent_together():
    films = (("F", "director", "Ann"), ("G", "director", "Bob"))
    births = (("Ann", "date of birth", "1900"), ("Bob", "date of birth", "1910"))
    chain = question("bridge_comparison", "", "", *films, *births).evidences
    assert evidence_rounds(chain) == [list(chain[:2]), list(chain[2:])]
    assert evidence_rounds(()) == []


def test_ids_link_a_bridge_under_two_names():
    chain = (
        Evidence(
            subject="Faisal",
            relation="father",
            object="King Abdullah",
            subject_id="Q1",
            object_id="Q2",
        ),
        Evidence(
            subject="Abdullah of Saudi Arabia",
            relation="date of death",
            object="2015",
            subject_id="Q2",
        ),
    )
    assert [len(asked) for asked in evidence_rounds(chain)] == [1, 1]


THREE_DIRECTORS = (("X", "director", "A"), ("Y", "director", "B"), ("Y", "director", "C"))
X_BORN = ("X", "date of birth", "1900")
X_DIED = ("X", "date of death", "1990")
Y_BORN = ("Y", "date of birth", "1950")
Y_DIED = ("Y", "date of death", "2020")
Y_AMERICAN = ("Y", "country of citizenship", "U.S.")
Y_PERUVIAN = ("Y", "country of citizenship", "Peru")
X_FROM_TWO = (
    ("X", "country of citizenship", "American"),
    ("X", "country of citizenship", "French"),
)
TWO_DEATHS = (("A", "date of death", "2 May 1999"), ("B", "date of death", "May 1, 1999"))


@pytest.mark.parametrize(
    ("kind", "text", "evidences", "answer"),
    [
        ("compositional", "When did X's father die?", [("X", "father", "Y"), Y_DIED], "2020"),
        ("inference", "Who is X's grandfather?", [("X", "father", "Y"), ("Y", "father", "Z")], "Z"),
        ("inference", "Who is X's grandfather?", [("X", "father", "Y"), ("W", "father", "Z")], None),
        ("comparison", "Who is younger, X or Y?", [X_BORN, Y_BORN], "Y"),
        ("comparison", "Who is older, X or Y?", [X_BORN, Y_BORN], "X"),
        ("comparison", "Who is older, X or Y?", [X_BORN, ("Y", "date of birth", "1 May 1900")], None),
        ("comparison", "Who is older, X or Y?", [X_BORN], None),
        ("comparison", "Who lived longer, X or Y?", [X_BORN, X_DIED, Y_BORN, Y_DIED], "X"),
        ("comparison", "Who lived longer, X or Y?", [X_BORN, Y_BORN, Y_DIED], None),
        ("comparison", "Are X and Y from the same country?", [*X_FROM_TWO, Y_AMERICAN], "yes"),
        ("comparison", "Are X and Y from the same country?", [*X_FROM_TWO, Y_PERUVIAN], "no"),
        ("comparison", "Which film has more directors, X or Y?", THREE_DIRECTORS, "Y"),
        ("comparison", "Which film is better, X or Y?", [X_BORN, Y_BORN], None),
        ("bridge_comparison", "Which film has the director who died later, X or Y?",
         [("X", "director", "A"), ("Y", "director", "B"), *TWO_DEATHS], "X"),
    ],
)  # fmt: skip
def test_answer_from_evidence(kind, text, evidences, answer):
    assert answer_from_evidence(question(kind, text, "", *evidences)) == answer


def test_an_answer_follows_up_to_the_scripts_normalisation():
    chain = [("The X (film)", "publication date", "1900"), ("Y", "publication date", "1950")]
    asked = "Which film came out first, The X (Film) or Y?"
    assert follows_from_evidence(question("comparison", asked, "The X (Film)", *chain))
    assert not follows_from_evidence(question("comparison", asked, "Y", *chain))


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("U.S.", "united states"),
        ("American", "united states"),
        ("Italian", "italy"),
        ("Annam", "annam"),
    ],
)
def test_country(label, name):
    assert country(label) == name
