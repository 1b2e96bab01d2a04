"""Whether a sub-question can be asked by someone who has only the question and what was observed so
far.

A teacher that knows the answer leads to it by what it must not know: it names the answer, or the
entity between two hops, before an observation has. Such turns teach guessing, and are refused.
That, the placeholders and the pronouns (table 10 forbids them) are our reading of "a complete
sub-question that can be executed independently" (section 4.1.2).
"""

import re
from collections.abc import Collection, Sequence

from mujica_jax.metrics import CLOSED_ANSWERS, normalise_squad
from mujica_jax.records import Question

MIN_WORDS = 2
PLACEHOLDER = re.compile(
    r"#\d|\[[^\]]*\]|<[^>]*>|\b(?:answer|sub-?question|step) (?:of|to|from)? ?#?\d", re.IGNORECASE
)
# In lower case alone: a title that holds a pronoun writes it with a capital letter.
PRONOUN = re.compile(r"\b(?:this|these|those|he|she|it|him|her|his|its|they|them|their)\b")
POSSESSIVE = re.compile(r"['\u2019]s\b")


def is_askable(query: str, known: Sequence[str]) -> bool:
    """Check that a query has enough words, no placeholder and no pronoun of its own.

    `known` are the texts that the planner has read. A pronoun that stands in them may be part of a
    name."""
    if len(query.split()) < MIN_WORDS or PLACEHOLDER.search(query):
        return False
    known_pronouns: set[str] = set()
    for text in known:
        known_pronouns.update(PRONOUN.findall(text))
    return known_pronouns.issuperset(PRONOUN.findall(query))


def secrets(question: Question, *, with_evidence: bool) -> set[str]:
    """Return the names that an observation must tell first, normalised.

    They are the answers, and with `with_evidence` also the entities between two hops and the titles
    of gold passages."""
    names = set(question.answers)
    if with_evidence:
        subjects = {evidence.subject for evidence in question.evidences}
        objects = {evidence.object for evidence in question.evidences}
        names |= subjects & objects
        names |= {passage.title.partition(" (")[0] for passage in question.gold_passages}
    return {_plain(name) for name in names} - {"", *CLOSED_ANSWERS}


def leaks(text: str, known: Sequence[str], hidden: Collection[str]) -> bool:
    """Check whether the text names a secret that stands in none of the known texts.

    Names are compared by whole words."""
    padded_text = f" {_plain(text)} "
    padded_known_texts = f" {_plain(' . '.join(known))} "
    return any(
        f" {name} " in padded_text and f" {name} " not in padded_known_texts for name in hidden
    )


def _plain(text: str) -> str:
    """Return the text normalised, with "Bowen's" as Bowen.

    A question names its entities in the possessive."""
    return normalise_squad(POSSESSIVE.sub(" ", text))
