"""Gold evidence: what an answer rests on, and what a sub-question may tell of it.

**What an answer rests on** (EviPath, section 4.2, equation 6):

    evidence(a) = { z in gold evidence | cos(phi(z), phi(a)) > tau }
    or the best piece where none passes

The paper's pieces of evidence are triples and sentences. Materials are triples and whole passages
here, so a passage counts with its likest sentence, title included. What is chosen is looked for in
the pool that the worker reads.

Whether an answer is faithful is asked by words, which is ours: of the words that it adds to the
question, function words left out, at least half stand in the evidence.

**What can be asked.** A sub-question must make sense to someone who has only the question and what
was observed so far. A teacher that knows the answer leads to it by what it must not know: it names
the answer, or the entity between two hops, before an observation has. Such turns teach guessing,
and are refused. That, the placeholders and the pronouns (table 10 forbids them) are our reading of
"a complete sub-question that can be executed independently" (section 4.1.2).
"""

import dataclasses
import re
from collections.abc import Collection, Sequence

from mujica_jax.agents.protocol import one_line
from mujica_jax.metrics import CLOSED_ANSWERS, normalise_squad
from mujica_jax.records import Evidence, GoldPassage, Question
from mujica_jax.retrieval.embedding.similarity import Similarity
from mujica_jax.tasks.environment import words
from mujica_jax.tasks.task import EnvironmentKind, Material

FAITHFUL_SHARE = 0.5
FUNCTION_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his in is it its of on "
    "or she that the their there they this to was were which who whom whose with".split()
)

MIN_QUERY_WORDS = 2
PLACEHOLDER = re.compile(
    r"#\d|\[[^\]]*\]|<[^>]*>|\b(?:answer|sub-?question|step) (?:of|to|from)? ?#?\d", re.IGNORECASE
)
# In lower case alone: a title that holds a pronoun writes it with a capital letter.
PRONOUN = re.compile(r"\b(?:this|these|those|he|she|it|him|her|his|its|they|them|their)\b")
POSSESSIVE = re.compile(r"['\u2019]s\b")

_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One gold triple or passage."""

    source: Evidence | GoldPassage
    text: str  # as a teacher reads it
    sentences: tuple[str, ...]  # as they are compared with an answer


def pieces(question: Question, kind: EnvironmentKind) -> list[Piece]:
    """Return the triples over a graph, and over texts the passages whose text is known."""
    if kind == "graph":
        evidence_of_line = {
            f"{evidence.subject}, {evidence.relation}, {evidence.object}": evidence
            for evidence in question.evidences
        }
        return [
            Piece(source=evidence, text=line, sentences=(line,))
            for line, evidence in evidence_of_line.items()
        ]
    return [_passage_piece(passage) for passage in question.gold_passages if passage.text]


def chosen(
    answer: str, gold: Sequence[Piece], *, similarity: Similarity, threshold: float
) -> list[Piece]:
    """Return the pieces whose similarity to the answer is above `threshold`.

    Where none is, return the first of the most similar ones. A piece is as similar as its most
    similar sentence.
    """
    # Compare the sentences of all pieces in one call.
    sentences = [sentence for piece in gold for sentence in piece.sentences]
    sentence_cosines = iter(similarity(answer, sentences))
    cosines = [max(next(sentence_cosines) for _ in piece.sentences) for piece in gold]

    passing = [piece for piece, cosine in zip(gold, cosines, strict=True) if cosine > threshold]
    if passing:
        return passing
    return [gold[cosines.index(max(cosines))]]


def place_in(materials: Sequence[Material], piece: Piece) -> int | None:
    """Return where the piece stands in a pool.

    A triple is found by its relation, its object, and its subject's name or id. A passage is found
    by title and text, or by its title where no material has its text: an index may cut passages
    otherwise.
    """
    places = [place for place, material in enumerate(materials) if _shows(material, piece.source)]
    for place in places:
        if one_line(materials[place].text) == piece.text:
            return place
    return places[0] if places else None


def is_faithful(answer: str, query: str, evidence: Sequence[str]) -> bool:
    """Check that the evidence states enough of the words that the answer adds to the query."""
    added_words = words(answer) - words(query) - FUNCTION_WORDS
    stated_words = added_words & words(" ".join(evidence))
    return len(stated_words) >= FAITHFUL_SHARE * len(added_words)


def is_askable(query: str, known: Sequence[str]) -> bool:
    """Check that a query has enough words, no placeholder and no pronoun of its own.

    `known` are the texts that the planner has read. A pronoun that stands in them may be part of a
    name.
    """
    if len(query.split()) < MIN_QUERY_WORDS or PLACEHOLDER.search(query):
        return False
    known_pronouns: set[str] = set()
    for text in known:
        known_pronouns.update(PRONOUN.findall(text))
    return known_pronouns.issuperset(PRONOUN.findall(query))


def secrets(question: Question, *, with_evidence: bool) -> set[str]:
    """Return the names that an observation must tell first, normalised.

    They are the answers, and with `with_evidence` also the entities between two hops and the titles
    of gold passages.
    """
    names = set(question.answers)
    if with_evidence:
        subjects = {evidence.subject for evidence in question.evidences}
        objects = {evidence.object for evidence in question.evidences}
        names |= subjects & objects
        names |= {passage.title.partition(" (")[0] for passage in question.gold_passages}
    return {_plain(name) for name in names} - {"", *CLOSED_ANSWERS}


def leaks(text: str, known: Sequence[str], hidden: Collection[str]) -> bool:
    """Check whether the text names a secret that stands in none of the known texts.

    Names are compared by whole words.
    """
    padded_text = f" {_plain(text)} "
    padded_known_texts = f" {_plain(' . '.join(known))} "
    return any(
        f" {name} " in padded_text and f" {name} " not in padded_known_texts for name in hidden
    )


def _passage_piece(passage: GoldPassage) -> Piece:
    text = one_line(passage.text)
    sentences = _END_OF_SENTENCE.split(text)
    return Piece(
        source=passage,
        text=f"{passage.title}: {text}",
        sentences=tuple(f"{passage.title}: {sentence}" for sentence in sentences),
    )


def _shows(material: Material, source: Evidence | GoldPassage) -> bool:
    """Check whether a material is this triple or passage."""
    if isinstance(source, GoldPassage):
        return material.shows(source, cut=True)
    if len(material.parts) != 3:
        return False
    subject, relation, value = material.parts
    is_same_subject = subject == source.subject or material.entities[0].id == source.subject_id
    return is_same_subject and (relation, value) == (source.relation, source.object)


def _plain(text: str) -> str:
    """Return the text normalised, with "Bowen's" as Bowen.

    A question names its entities in the possessive.
    """
    return normalise_squad(POSSESSIVE.sub(" ", text))
