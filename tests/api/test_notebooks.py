"""The notebooks of the documents: they hold no outputs, and their cells run in order."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
# Replaces the cell with the tag `parameters`, so that a test does not train for minutes.
SHORT_BUDGET = """
budget = {
    "pretraining.steps": 4,
    "warmup.steps": 4,
    "method.rounds": 1,
    "sampling.questions_per_round": 8,
    "eval.questions": 4,
}
"""


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source_of(cell: dict[str, Any]) -> str:
    """Return the program of a cell, with fewer steps of training."""
    if "parameters" in cell["metadata"].get("tags", ()):
        return SHORT_BUDGET
    return "".join(cell["source"])


def test_there_are_notebooks():
    assert [notebook.name for notebook in NOTEBOOKS] == ["first_agent.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook):
    for cell in code_cells(notebook):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_cell_with_the_budget_of_training(notebook):
    cells = [cell for cell in code_cells(notebook) if source_of(cell) == SHORT_BUDGET]
    assert ["".join(cell["source"]).startswith("budget = {") for cell in cells] == [True]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(notebook):
    text = notebook.read_text()
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert targets
    assert [target for target in targets if not (notebook.parent / target).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(notebook, tmp_path, monkeypatch):
    """They run inside an event loop, as in Jupyter."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}

    async def run_cells() -> None:
        for cell in code_cells(notebook):
            exec(compile(source_of(cell), notebook.name, "exec"), names)

    asyncio.run(run_cells())
    assert names["trajectory"].question_id == names["question"].id
    assert len(names["results"].trajectories) == 40
    assert names["sampled"].num_rows > 0
