"""What ScaNN loses against exact search on questions that its rule was not made from: those of
HotpotQA and MuSiQue.

    python benchmarks/scann_recall.py --data DIR --work FOLDER [--embedder minilm] [--sentences]

DIR has the folders 2wikimultihopqa, hotpotqa, musique and nq_open with files in their official
formats (their names stand below). The corpus is that of 2Wiki and every passage given with a
question of HotpotQA and MuSiQue, once each; with --sentences each of their sentences is a passage,
so that there are enough for the rule to leave partitions out. FOLDER gets it, and an index by
`index build` that the next run finds again. One JSON line for each set and each number of
partitions searched: recall of gold titles at 5 by exact search and by ScaNN, in percent.
`"partitions": "by the rule"` is what `index build` would search.

FOLDER/search gets the embeddings and those of all questions (2Wiki's and NQ's too) as
`benchmarks/retrieval.py search --work FOLDER/search --rows PASSAGES` wants them, which measures
ScaNN on real text beside its peers; of an embedder of its 384 numbers.
"""

import argparse
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from clustered_vectors import DIMENSION, save_queries

from mujica_jax import index
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.text.corpus import PassageFile
from mujica_jax.retrieval.text.corpus_records import read_records
from mujica_jax.retrieval.text.dense import best_rows
from mujica_jax.retrieval.text.scann import ScannSearch, parameters_for, write_scann
from mujica_jax.retrieval.text.vectors import open_embeddings

CORPUS = "2wikimultihopqa/corpus_6119.json.gz"
RECORDS = {
    "hotpotqa": ("hotpotqa/dev_distractor_visible.jsonl.gz", "hotpotqa/train_100.json.gz"),
    "musique": ("musique/dev_visible.jsonl.gz", "musique/train_100.json.gz"),
}
MORE_QUESTIONS = ("2wikimultihopqa/questions_visible.jsonl.gz", "nq_open/dev_500.jsonl.gz")
SHARES, K = (0.1, 0.2, 0.3, 0.5), 5
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


def read(file: Path) -> Iterator[Any]:
    return (record for _, record in read_records(file))


def passages_of(record: Any) -> Iterator[tuple[str, str]]:
    if "paragraphs" in record:
        yield from (
            (paragraph["title"], paragraph["paragraph_text"]) for paragraph in record["paragraphs"]
        )
    else:
        yield from ((title, "".join(sentences)) for title, sentences in record["context"])


def gold_of(record: Any) -> list[str]:
    if "paragraphs" in record:
        return sorted(
            {paragraph["title"] for paragraph in record["paragraphs"] if paragraph["is_supporting"]}
        )
    return sorted({title for title, _ in record["supporting_facts"]})


def write_corpus(data: Path, file: Path, *, sentences: bool) -> None:
    found = {(record["title"], record["text"].strip()): None for record in read(data / CORPUS)}
    for name in (name for names in RECORDS.values() for name in names):
        found |= {
            (title, text.strip()): None
            for record in read(data / name)
            for title, text in passages_of(record)
        }
    if sentences:
        found = {
            (title, sentence): None
            for title, text in found
            for sentence in SENTENCE_END.split(text)
        }
    lines = [
        json.dumps({"title": title, "text": text})
        for title, text in found
        if title.strip() and text
    ]
    file.write_text("\n".join(lines))


def save_search(folder: Path, embeddings: Path, vectors: np.ndarray, queries: np.ndarray) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # with what was built of other vectors
    folder.mkdir()
    shutil.copyfile(embeddings / "embeddings.bfloat16", folder / "embeddings.bfloat16")
    np.save(folder / "vectors.npy", vectors)
    save_queries(folder, queries, vectors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--sentences", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    corpus, folder = given.work / "corpus.jsonl", given.work / "exact"
    more_questions = [
        [record["question"] for record in read(given.data / file)] for file in MORE_QUESTIONS
    ]
    write_corpus(given.data, corpus, sentences=given.sentences)
    made = ["build", "--corpus", str(corpus), "--kind", "exact", "--embedder", given.embedder]
    if status := index.main([*made, "--out", str(folder)]):
        return status
    passages = PassageFile(folder / "passages.arrow")
    titles = [passage.title for passage in passages]
    embedder = find_embedder(given.embedder)
    embeddings = open_embeddings(folder, len(passages), embedder.dimension, "bfloat16")
    rule = parameters_for(len(passages), of_length_1=embeddings.of_length_1())
    ours = ScannSearch.load(
        write_scann(embeddings, rule, given.work / "scann"), len(passages), rule
    )
    loaded = embedder.load()
    asked = [loaded.embed(questions, "query") for questions in more_questions]
    for name, files in RECORDS.items():
        records = [record for file in files for record in read(given.data / file)]
        queries = loaded.embed([record["question"] for record in records], "query")
        asked.append(queries)
        gold = [set(gold_of(record)) for record in records]

        def recall(positions: np.ndarray, gold: list[set[str]] = gold) -> float:
            shares = [
                len(of & {titles[place] for place in row if place >= 0}) / len(of)
                for of, row in zip(gold, positions, strict=True)
            ]
            return round(100 * float(np.mean(shares)), 2)

        exact = best_rows(queries, embeddings.float32(), K)[1]
        for share in (None, *SHARES):
            searched = rule.leaves_searched if share is None else round(share * rule.leaves)
            ours.parameters = dataclasses.replace(rule, leaves_searched=searched)
            row = {
                "questions": f"{name}, {len(records)}",
                "passages": len(passages),
                "partitions": "by the rule" if share is None else share,
                "searched": f"{searched} of {rule.leaves}",
                "exact_recall@5": recall(exact),
                "scann_recall@5": recall(ours.search(queries, K)[1]),
            }
            print(json.dumps(row), flush=True)
    if embedder.dimension == DIMENSION:
        save_search(given.work / "search", folder, embeddings.float32(), np.concatenate(asked))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
