"""Check a teacher's replies against the gold evidence of a question.

**Choose the evidence of an answer** (EviPath, section 4.2, equation 6). The evidence of an answer a
consists of the gold pieces z that are similar to it:

    evidence(a) = { z in gold evidence | cos(phi(z), phi(a)) > tau }

If no piece passes the threshold tau, the most similar piece is chosen. In the paper the pieces are
triples and sentences. Here they are triples and whole passages. The similarity of a passage is that
of its most similar sentence, with the title in front. The chosen pieces must be among the materials
that the worker reads.

**Check that an answer is faithful.** At least half of the words that the answer adds to the
sub-question must be in the evidence. Function words do not count. This check is ours.

**Check that a sub-question can be asked.** A sub-question must make sense to a reader who knows
only the question and the observations so far. A teacher that knows the answer may use it too early:
it names the answer, or the entity between two hops, before any observation does. Such turns would
teach guessing, so they are refused. Placeholders and pronouns are refused too (the paper's table 10
forbids them). This is how we read "a complete sub-question that can be executed independently"
(section 4.1.2).
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

# The share of an answer's added words that the evidence must contain.
FAITHFUL_SHARE = 0.5
FUNCTION_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his in is it its of on "
    "or she that the their there they this to was were which who whom whose with".split()
)

MIN_QUERY_WORDS = 2
PLACEHOLDER = re.compile(
    r"#\d|\[[^\]]*\]|<[^>]*>|\b(?:answer|sub-?question|step) (?:of|to|from)? ?#?\d", re.IGNORECASE
)
# Only pronouns in lower case count: in a title, such as "It Happened One Night", a pronoun has a
# capital letter.
PRONOUN = re.compile(r"\b(?:this|these|those|he|she|it|him|her|his|its|they|them|their)\b")
POSSESSIVE = re.compile(r"['\u2019]s\b")

_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of gold evidence: a triple or a passage.

    Attributes:
        source: The triple or the passage.
        text: The text that a teacher reads.
        sentences: The texts that are compared with an answer.
    """

    source: Evidence | GoldPassage
    text: str
    sentences: tuple[str, ...]


def pieces(question: Question, kind: EnvironmentKind) -> list[Piece]:
    """Return the gold evidence of a question.

    If the agent searches a graph, these are the question's triples. Otherwise they are its gold
    passages, without those whose text is not known.
    """
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

    If there is none, return the most similar piece. The similarity of a piece is that of its most
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
    """Return the index of a piece among the materials; None if it is not among them.

    A triple is found by its relation, its object, and the name or id of its subject. A passage is
    found by its title and text. If no material has this text, the title is enough, because an index
    may cut passages at other places.
    """
    places = [place for place, material in enumerate(materials) if _shows(material, piece.source)]
    for place in places:
        if one_line(materials[place].text) == piece.text:
            return place
    return places[0] if places else None


def is_faithful(answer: str, query: str, evidence: Sequence[str]) -> bool:
    """Return whether the evidence contains enough of the words that the answer adds to a query."""
    added_words = words(answer) - words(query) - FUNCTION_WORDS
    stated_words = added_words & words(" ".join(evidence))
    return len(stated_words) >= FAITHFUL_SHARE * len(added_words)


def is_askable(query: str, known: Sequence[str]) -> bool:
    """Return whether a query has enough words, no placeholder and no new pronoun.

    `known` are the texts that the planner has read. A pronoun that is in these texts is allowed,
    because it may be part of a name.
    """
    if len(query.split()) < MIN_QUERY_WORDS or PLACEHOLDER.search(query):
        return False
    known_pronouns: set[str] = set()
    for text in known:
        known_pronouns.update(PRONOUN.findall(text))
    return known_pronouns.issuperset(PRONOUN.findall(query))


def secrets(question: Question, *, with_evidence: bool) -> set[str]:
    """Return the names that the teacher must not use before an observation contains them.

    These are the answers and, if `with_evidence` is true, also the entities between two hops and
    the titles of gold passages. The names are normalised.
    """
    names = set(question.answers)
    if with_evidence:
        subjects = {evidence.subject for evidence in question.evidences}
        objects = {evidence.object for evidence in question.evidences}
        names |= subjects & objects
        names |= {passage.title.partition(" (")[0] for passage in question.gold_passages}
    return {_plain(name) for name in names} - {"", *CLOSED_ANSWERS}


def leaks(text: str, known: Sequence[str], hidden: Collection[str]) -> bool:
    """Return whether a text contains a hidden name that none of the known texts contains.

    Names are compared as whole words.
    """
    padded_text = f" {_plain(text)} "
    padded_known_texts = f" {_plain(' . '.join(known))} "
    return any(
        f" {name} " in padded_text and f" {name} " not in padded_known_texts for name in hidden
    )


def _passage_piece(passage: GoldPassage) -> Piece:
    """Return a gold passage as a piece of evidence, split into sentences."""
    text = one_line(passage.text)
    sentences = _END_OF_SENTENCE.split(text)
    return Piece(
        source=passage,
        text=f"{passage.title}: {text}",
        sentences=tuple(f"{passage.title}: {sentence}" for sentence in sentences),
    )


def _shows(material: Material, source: Evidence | GoldPassage) -> bool:
    """Return whether a material is this triple or passage."""
    if isinstance(source, GoldPassage):
        return material.shows(source, cut=True)
    if len(material.parts) != 3:
        return False
    subject, relation, value = material.parts
    is_same_subject = subject == source.subject or material.entities[0].id == source.subject_id
    return is_same_subject and (relation, value) == (source.relation, source.object)


def _plain(text: str) -> str:
    """Return the text normalised, with "Bowen's" as "bowen".

    Questions often name entities in the possessive.
    """
    return normalise_squad(POSSESSIVE.sub(" ", text))
