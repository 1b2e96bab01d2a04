"""The examples in the docstrings of the API run, in a folder with a run and an index."""

import doctest
import importlib
import json
import pkgutil
import shutil
from pathlib import Path

import pytest

from mujica_jax import api
from mujica_jax.commands import index
from tests.helpers.untrained_run import write_run

# Examples that load a model into an engine or train one.
SLOW = {"Policy.ask", "evaluate", "train"}
PASSAGES = [
    {"title": "Venford", "text": "Venford is a village. Its mayor is Clara Ibsted."},
    {"title": "Tisby", "text": "Tisby is a town at the river Oss."},
]


def examples() -> list[doctest.DocTest]:
    """Return the examples of all modules of the API, each once."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests: list[doctest.DocTest] = []
    for module in pkgutil.iter_modules(api.__path__):
        tests += finder.find(importlib.import_module(f"{api.__name__}.{module.name}"))
    return [test for test in tests if test.examples]


def short_name(test: doctest.DocTest) -> str:
    return test.name.removeprefix(f"{api.__name__}.").partition(".")[2]


EXAMPLES = [
    pytest.param(
        test,
        id=short_name(test),
        marks=[pytest.mark.slow] if short_name(test) in SLOW else [],
    )
    for test in examples()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the run and the index that the examples name."""
    root = tmp_path_factory.mktemp("examples")
    write_run(root / "run")
    (root / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    words = ["build", "--corpus", str(root / "corpus.jsonl"), "--kind", "bm25"]
    assert index.main([*words, "--out", str(root / "index")]) == 0
    return root


@pytest.mark.parametrize("test", EXAMPLES)
def test_an_example_runs_and_prints_what_it_says(test, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_every_public_function_has_an_example():
    names = {short_name(test) for test in examples()}
    assert names >= {
        "Policy.ask",
        "Retriever.load",
        "Retriever.search",
        "evaluate",
        "load",
        "read_trajectories",
        "train",
    }
