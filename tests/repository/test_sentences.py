"""Phrases that the pages once had and that a first reader stumbled over do not come back."""

import pytest

from tests.helpers.paths import ROOT

PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "lab" not in path.parts),
]
PHRASES = (
    "it is gone on with",
    "comes to 58.3 EM",
    "which adds the control, as much computation",
    "`--eval.split dev` for choices",
    "Official test sets have no answers, so of all others",
    "is the house on one page",
    "sums what lies on a chip",
    "gets TPUs in Google Cloud",
    "What does a folder hold",
    "nothing: a list of other right answers",
    "whose names decide no split",
    "which a small model seldom finds",
    "Which number is this, of which questions",
    "whose checksum somebody recorded",
    "the share of 1,000 resamples in which it is not better",
    "How are passages of one's own searched",
    "who comes when it is full",
    "What happens between the conversations that were kept",
    "in one part, without z-loss",
    "which the check of a chip's memory does not count",
    "there are at most 11 programs",
    "20 steps as 7",
    "no loop of which polls",
    "speaks HTTP and is none",
    "telling of it makes no device wait",
    "For the other 29 it says less",
    "there is none of this name",
)


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_page_has_the_phrase(phrase):
    pages = [path.name for path in PAGES if phrase in " ".join(path.read_text().split())]
    assert pages == []


def test_the_rule_sees_a_phrase_over_two_lines():
    assert "it is gone on with" in " ".join("Killed, it is gone\non with by".split())


def test_no_message_says_that_there_is_none_of_a_name():
    sources = sorted((ROOT / "mujica_jax").rglob("*.py"))
    assert len(sources) > 100
    assert [
        path.name for path in sources if "none of this name: there are" in path.read_text()
    ] == []
