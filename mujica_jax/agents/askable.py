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
# Lower case alone: titles that hold one write it large.
PRONOUN = re.compile(r"\b(?:this|these|those|he|she|it|him|her|his|its|they|them|their)\b")

POSSESSIVE = re.compile(r"['\u2019]s\b")


def is_askable(query: str, known: Sequence[str]) -> bool:
    """`known` are the texts that the planner has read; a pronoun that stands in them may be part of
    a name."""
    if len(query.split()) < MIN_WORDS or PLACEHOLDER.search(query):
        return False
    read = {pronoun for text in known for pronoun in PRONOUN.findall(text)}
    return read.issuperset(PRONOUN.findall(query))


def secrets(question: Question, *, with_evidence: bool) -> set[str]:
    """What an observation must tell first, normalised: the answers, and with the evidence the
    entities between two hops and the titles of gold passages."""
    names = set(question.answers)
    if with_evidence:
        subjects = {evidence.subject for evidence in question.evidences}
        names |= {evidence.object for evidence in question.evidences} & subjects
        names |= {passage.title.partition(" (")[0] for passage in question.gold_passages}
    return {_plain(name) for name in names} - {"", *CLOSED_ANSWERS}


def leaks(text: str, known: Sequence[str], hidden: Collection[str]) -> bool:
    """Whether the text names a secret that stands in none of the known texts, by whole words."""
    said, read = f" {_plain(text)} ", f" {_plain(' . '.join(known))} "
    return any(f" {name} " in said and f" {name} " not in read for name in hidden)


def _plain(text: str) -> str:
    """Normalised, with "Bowen's" as Bowen: a question names its entities in the possessive."""
    return normalise_squad(POSSESSIVE.sub(" ", text))
