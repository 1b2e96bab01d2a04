"""Gold evidence of a question, and which of it a sub-question's answer rests on (EviPath, section
4.2, equation 6).

    evidence(a) = { z in gold evidence | cos(phi(z), phi(a)) > tau },   the best one where none passes

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
from mujica_jax.retrieval.text.similarity import Similarity
from mujica_jax.tasks.environment import words
from mujica_jax.tasks.task import EnvironmentKind, Material

FAITHFUL_SHARE = 0.5
FUNCTION_WORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his in is it its of on "
    "or she that the their there they this to was were which who whom whose with".split()
)

_end_of_sentence = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One gold triple or passage."""

    source: Evidence | GoldPassage
    text: str  # as a teacher reads it
    sentences: tuple[str, ...]  # as it is compared with an answer


def pieces(question: Question, kind: EnvironmentKind) -> list[Piece]:
    """Of a graph the triples, of texts the passages whose text is known."""
    if kind == "graph":
        lines = {f"{e.subject}, {e.relation}, {e.object}": e for e in question.evidences}
        return [
            Piece(source=evidence, text=line, sentences=(line,)) for line, evidence in lines.items()
        ]
    return [
        Piece(
            source=passage,
            text=f"{passage.title}: {one_line(passage.text)}",
            sentences=tuple(
                f"{passage.title}: {one}" for one in _end_of_sentence.split(one_line(passage.text))
            ),
        )
        for passage in question.gold_passages
        if passage.text
    ]


def chosen(
    answer: str, gold: Sequence[Piece], *, similarity: Similarity, threshold: float
) -> list[Piece]:
    """The pieces that are likelier than `threshold` to state the answer; the first of the likest
    where none is."""
    found = iter(similarity(answer, [sentence for piece in gold for sentence in piece.sentences]))
    cosines = [max(next(found) for _ in piece.sentences) for piece in gold]
    passing = [piece for piece, cosine in zip(gold, cosines, strict=True) if cosine > threshold]
    return passing or [gold[cosines.index(max(cosines))]]


def place_in(materials: Sequence[Material], piece: Piece) -> int | None:
    """Return where the piece stands in a pool.

    A triple is found by its relation, its object, and its subject's name or id. A passage is found
    by title and text, or by its title where no material has its text: an index may cut passages
    otherwise."""
    places = [place for place, material in enumerate(materials) if _is(material, piece.source)]
    exact = [place for place in places if one_line(materials[place].text) == piece.text]
    return next(iter(exact or places), None)


def is_faithful(answer: str, query: str, evidence: Sequence[str]) -> bool:
    added = words(answer) - words(query) - FUNCTION_WORDS
    return len(added & words(" ".join(evidence))) >= FAITHFUL_SHARE * len(added)


def _is(material: Material, source: Evidence | GoldPassage) -> bool:
    if isinstance(source, GoldPassage):
        return material.shows(source, cut=True)
    if len(material.parts) != 3:
        return False
    subject, relation, value = material.parts
    same_subject = subject == source.subject or material.entities[0].id == source.subject_id
    return same_subject and (relation, value) == (source.relation, source.object)
