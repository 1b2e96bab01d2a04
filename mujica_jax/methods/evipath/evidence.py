"""Gold evidence of a question, and which of it a sub-question's answer rests on (EviPath, section
4.2, equation 6).

    evidence(a) = { z in gold evidence | cos(phi(z), phi(a)) > tau }
    or the best piece where none passes

The paper's pieces of evidence are triples and sentences. Materials are triples and whole passages
here, so a passage counts with its likest sentence, title included. What is chosen is looked for in
the pool that the worker reads.

Whether an answer is faithful is asked by words, which is ours: of the words that it adds to the
question, function words left out, at least half stand in the evidence.
"""

import dataclasses
import re
from collections.abc import Sequence

from mujica_jax.agents.protocol import one_line
from mujica_jax.records import Evidence, GoldPassage, Question
from mujica_jax.retrieval.embedding.similarity import Similarity
from mujica_jax.tasks.environment import words
from mujica_jax.tasks.task import EnvironmentKind, Material

FAITHFUL_SHARE = 0.5
FUNCTION_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his in is it its of on "
    "or she that the their there they this to was were which who whom whose with".split()
)

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


def _passage_piece(passage: GoldPassage) -> Piece:
    text = one_line(passage.text)
    sentences = _END_OF_SENTENCE.split(text)
    return Piece(
        source=passage,
        text=f"{passage.title}: {text}",
        sentences=tuple(f"{passage.title}: {sentence}" for sentence in sentences),
    )


def chosen(
    answer: str, gold: Sequence[Piece], *, similarity: Similarity, threshold: float
) -> list[Piece]:
    """Return the pieces whose similarity to the answer is above `threshold`.

    Where none is, return the first of the most similar ones. A piece is as similar as its most
    similar sentence."""
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
    otherwise."""
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


def _shows(material: Material, source: Evidence | GoldPassage) -> bool:
    """Check whether a material is this triple or passage."""
    if isinstance(source, GoldPassage):
        return material.shows(source, cut=True)
    if len(material.parts) != 3:
        return False
    subject, relation, value = material.parts
    is_same_subject = subject == source.subject or material.entities[0].id == source.subject_id
    return is_same_subject and (relation, value) == (source.relation, source.object)
