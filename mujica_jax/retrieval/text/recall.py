"""Recall of an index: the mean share of a question's gold titles among the titles of its first k passages, in
percent.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus import PassageFile
from mujica_jax.retrieval.text.corpus_records import check_text, read_records
from mujica_jax.retrieval.text.dense import check_k
from mujica_jax.retrieval.text.index import Index

Asked = tuple[str, set[str]]  # a question and its gold titles


def measure_recall(
    index: Index, folder: str, questions: Sequence[Asked], file: str, ks: Sequence[int]
) -> dict[str, Any]:
    """`folder` is the index's, `file` the questions'. Raises UserError where the index has none of their gold
    titles.
    """
    check_k(min(ks), index.passages)
    check_k(max(ks), index.passages)
    wanted = set().union(*(gold for _, gold in questions))
    assert isinstance(index.passages, PassageFile), "an index that was opened"
    unknown = wanted - {passage.title for passage in index.passages.titled(wanted)}
    if unknown == wanted:
        raise UserError(
            f"none of the {len(wanted):,} gold titles of {file} is a title in {folder}: give the questions of its "
            "corpus"
        )
    began = time.monotonic()
    encoded = index.encode([text for text, _ in questions])
    middle = time.monotonic()
    found = index.search_encoded(encoded, max(ks))
    ended = time.monotonic()
    shares = dict.fromkeys(ks, 0.0)
    for (_, gold), hits in zip(questions, found, strict=True):
        titles: list[Any] = [index.passages[position].title for position, _ in hits]
        for k in shares:
            shares[k] += len(gold & set(titles[:k])) / len(gold)
    return {f"recall@{k}": round(100 * share / len(questions), 2) for k, share in shares.items()} | {
        "questions": len(questions),
        "passages": len(index.passages),
        "unknown_titles": len(unknown),  # gold ones that the index has not, so that no search finds them
        "encode_seconds": round(middle - began, 3),
        "search_seconds": round(ended - middle, 3),
    }


def read_questions(file: str) -> list[Asked]:
    """Records with `question` and `supporting_facts`: titles, or as official records have it a title and a sentence
    each.
    """
    questions = list(_questions(file))
    if not questions:
        raise UserError(f"{file} holds no question: give a file with at least one")
    return questions


def _questions(file: str) -> Iterator[Asked]:
    for line, record in read_records(file):
        text = record.get("question") if isinstance(record, dict) else None
        facts: Any = record.get("supporting_facts") if isinstance(record, dict) else None
        titles: list[Any] = [
            fact[0] if isinstance(fact, list) and fact else fact for fact in (facts if isinstance(facts, list) else ())
        ]
        if not isinstance(text, str) or not titles or not all(isinstance(title, str) for title in titles):
            raise UserError(
                f"{file}, line {line}: a question needs `question` and a list of gold titles in `supporting_facts`"
            )
        try:
            for said in (text, *titles):
                check_text(said)
        except UserError as error:
            raise UserError(f"{file}, line {line}: {error}") from error
        yield text, set(titles)
