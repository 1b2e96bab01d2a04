"""Measure the recall of an index, in percent.

- `measure_recall`: recall of gold titles. For each question, it is the share of its gold titles
  that are among the titles of its first k passages.
- `measure_beside_exact`: recall of an approximate search. For each query, it is the share of the k
  nearest passages that the search finds.

Both are means over all questions or queries.
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

# The text of a question and its gold titles.
Question = tuple[str, set[str]]

# Number k of nearest passages in `measure_beside_exact`.
NEIGHBOURS = 10
# Number of queries in `measure_beside_exact`. A recall near 97 is then known to about 0.5 points.
QUERIES = 500
# Number of embeddings that exact search scores at once.
SCORED_ROWS = 32_768


def measure_recall(
    index: Index, folder: str, questions: Sequence[Question], file: str, ks: Sequence[int]
) -> dict[str, Any]:
    """Return the recall of gold titles among the first k passages, for each k of `ks`.

    Messages name the directory `folder` of the index and the file of the questions. Raises
    UserError if the index has none of the gold titles.
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
            "questions that belong to the corpus of this index"
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
    # Gold titles that the index does not have. No search can find them.
    result["unknown_titles"] = len(unknown_titles)
    result["encode_seconds"] = round(encoded_time - start_time, 3)
    result["search_seconds"] = round(end_time - encoded_time, 3)
    return result


def measure_beside_exact(
    search: VectorSearch, embeddings: Embeddings, on_rows: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Return the recall of a search, compared with exact search over the same embeddings.

    The result also holds k and the number of queries. The queries are embeddings of passages, drawn
    with a fixed seed. A passage does not count as its own neighbour, because every search finds it.
    A corpus of one passage has no neighbours and gives 100 percent. `on_rows` is called with the
    number of embeddings that exact search has scored.
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
    """Return whether a value in a manifest has the form of a result of `measure_beside_exact`.

    The recall is not covered by a checksum, so it is checked here.
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
    """Return the positions of the k rows with the largest inner products, [queries, k].

    `queries` are [queries, dimension]. `positions` are the rows from which they were taken; a
    query's own row is left out.
    """
    best_scores = np.full((len(queries), k), -np.inf, np.float32)
    best_positions = np.full((len(queries), k), -1, np.int64)
    for start, rows in embeddings.chunks(SCORED_ROWS):
        scores = queries @ rows.T
        is_inside = (positions >= start) & (positions < start + len(rows))
        scores[is_inside, positions[is_inside] - start] = -np.inf

        # Merge the best rows so far with the k best of this chunk.
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
    """Read the questions of a file, whose records have `question` and `supporting_facts`.

    Each supporting fact is a title or, as in the official data sets, a list of a title and a
    sentence number. Raises UserError if the file has no question or a bad record.
    """
    questions = list(_questions(file))
    if not questions:
        raise UserError(f"{file} holds no question: give a file with at least one question")
    return questions


def _questions(file: str) -> Iterator[Question]:
    """Yield each question with its gold titles. Raises UserError with the line of a bad record."""
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
    """Return the titles of supporting facts. Their types are unchecked."""
    titles: list[Any] = []
    if isinstance(facts, list):
        for fact in facts:
            is_pair = isinstance(fact, list) and bool(fact)
            titles.append(fact[0] if is_pair else fact)
    return titles
