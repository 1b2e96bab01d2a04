"""Recall of an index, in percent.

- Of gold titles: the mean share of a question's gold titles among the titles of its first k
  passages.
- Beside exact search: the mean share of the k nearest passages that an approximate search finds.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mujica_jax.errors import UserError
from mujica_jax.retrieval.text.corpus import Index, PassageFile
from mujica_jax.retrieval.text.corpus_records import check_text, read_records
from mujica_jax.retrieval.text.dense import VectorSearch, check_k
from mujica_jax.retrieval.text.vectors import Embeddings

Question = tuple[str, set[str]]  # its text and its gold titles

NEIGHBOURS = 10
QUERIES = 500  # of a corpus that has as many passages: a recall near 97 is known to about 0.5
SCORED_ROWS = 32_768  # at once


def measure_recall(
    index: Index, folder: str, questions: Sequence[Question], file: str, ks: Sequence[int]
) -> dict[str, Any]:
    """Measure the recall of gold titles among the first k passages, for each of `ks`.

    `folder` is the index's, `file` the questions'. Raises UserError where the index has none of
    their gold titles.
    """
    check_k(min(ks), index.passages)
    check_k(max(ks), index.passages)

    # Compare the gold titles with those of the index.
    gold_titles: set[str] = set()
    for _, gold in questions:
        gold_titles |= gold
    assert isinstance(index.passages, PassageFile), "an index that was opened"
    known_titles = {passage.title for passage in index.passages.titled(gold_titles)}
    unknown_titles = gold_titles - known_titles
    if unknown_titles == gold_titles:
        raise UserError(
            f"none of the {len(gold_titles):,} gold titles of {file} is a title in {folder}: give "
            "the questions of its corpus"
        )

    # Search for all questions.
    start_time = time.monotonic()
    encoded = index.encode([text for text, _ in questions])
    encoded_time = time.monotonic()
    hits_of_questions = index.search_encoded(encoded, max(ks))
    end_time = time.monotonic()

    # Sum the shares of gold titles, by k.
    share_sums = dict.fromkeys(ks, 0.0)
    for (_, gold), hits in zip(questions, hits_of_questions, strict=True):
        titles: list[Any] = [index.passages[position].title for position, _ in hits]
        for k in share_sums:
            share_sums[k] += len(gold & set(titles[:k])) / len(gold)

    result: dict[str, Any] = {}
    for k, share_sum in share_sums.items():
        result[f"recall@{k}"] = round(100 * share_sum / len(questions), 2)
    result["questions"] = len(questions)
    result["passages"] = len(index.passages)
    # Gold titles that the index does not have, so that no search finds them.
    result["unknown_titles"] = len(unknown_titles)
    result["encode_seconds"] = round(encoded_time - start_time, 3)
    result["search_seconds"] = round(end_time - encoded_time, 3)
    return result


def measure_beside_exact(
    search: VectorSearch, embeddings: Embeddings, on_rows: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Return the recall of a search beside exact search over the same embeddings.

    The result also has the number of queries and k. The queries are embeddings of passages, drawn
    with a fixed seed. A passage does not count as its own neighbour, because every search finds it.
    A corpus of one passage has no neighbours and counts as 100 percent.
    """
    rows = len(embeddings)
    k = min(NEIGHBOURS, rows - 1)
    if k == 0:
        return {"percent": 100.0, "k": 0, "queries": 1}
    positions = np.sort(np.random.default_rng(0).choice(rows, min(QUERIES, rows), replace=False))
    queries = np.concatenate([embeddings.float32(position, position + 1) for position in positions])
    nearest = _exact_neighbours(embeddings, queries, positions, k, on_rows)

    _, result_positions = search.search(queries, k + 1)
    hits = 0
    for position, expected, results in zip(positions, nearest, result_positions, strict=True):
        neighbours = results[results != position][:k]
        hits += len(np.intersect1d(neighbours, expected))
    return {"percent": round(100 * hits / nearest.size, 2), "k": k, "queries": len(queries)}


def is_measured(recall: object) -> bool:
    """Return whether a value of a manifest is a result of `measure_beside_exact`.

    No checksum covers it.
    """
    if not isinstance(recall, dict) or set(recall) != {"percent", "k", "queries"}:
        return False
    return all(type(value) in (int, float) for value in recall.values())


def _exact_neighbours(
    embeddings: Embeddings,
    queries: np.ndarray,
    positions: np.ndarray,
    k: int,
    on_rows: Callable[[int], None],
) -> np.ndarray:
    """Return the positions of the k largest products of each query, [queries, k].

    A query's own passage is not among them.
    """
    best_scores = np.full((len(queries), k), -np.inf, np.float32)
    best_positions = np.full((len(queries), k), -1, np.int64)
    for start, rows in embeddings.chunks(SCORED_ROWS):
        scores = queries @ rows.T
        is_inside = (positions >= start) & (positions < start + len(rows))
        scores[is_inside, positions[is_inside] - start] = -np.inf

        # The best so far are joined by those of the chunk; no more than k of it can be among the
        # best of all.
        columns = np.argpartition(-scores, min(k, len(rows)) - 1, axis=1)[:, :k]
        chunk_scores = np.take_along_axis(scores, columns, axis=1)
        all_scores = np.concatenate([best_scores, chunk_scores], axis=1)
        all_positions = np.concatenate([best_positions, start + columns], axis=1)
        order = np.argsort(-all_scores, axis=1, kind="stable")[:, :k]
        best_scores = np.take_along_axis(all_scores, order, axis=1)
        best_positions = np.take_along_axis(all_positions, order, axis=1)
        on_rows(start + len(rows))
    return best_positions


def read_questions(file: str) -> list[Question]:
    """Read records with `question` and `supporting_facts`.

    The latter are titles, or as official records have it a title and a sentence each.
    """
    questions = list(_questions(file))
    if not questions:
        raise UserError(f"{file} holds no question: give a file with at least one")
    return questions


def _questions(file: str) -> Iterator[Question]:
    """Yield each question with its gold titles. Raise UserError with the line of a bad record."""
    for line, record in read_records(file):
        text: Any = None
        facts: Any = None
        if isinstance(record, dict):
            text = record.get("question")
            facts = record.get("supporting_facts")
        titles = _titles_of(facts)
        has_titles = bool(titles) and all(isinstance(title, str) for title in titles)
        if not isinstance(text, str) or not has_titles:
            raise UserError(
                f"{file}, line {line}: a question needs `question` and a list of gold titles in "
                "`supporting_facts`"
            )
        try:
            for string in (text, *titles):
                check_text(string)
        except UserError as error:
            raise UserError(f"{file}, line {line}: {error}") from error
        yield text, set(titles)


def _titles_of(facts: Any) -> list[Any]:
    """Return the titles of supporting facts, not yet checked."""
    titles: list[Any] = []
    if isinstance(facts, list):
        for fact in facts:
            is_pair = isinstance(fact, list) and bool(fact)
            titles.append(fact[0] if is_pair else fact)
    return titles
