"""Train one run from start to end. The command `train` and the Python API call this module."""

from typing import Any

from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import Config
from mujica_jax.report.results import closing_table, question_tree, summary_dict
from mujica_jax.runs.evaluation import solved_question
from mujica_jax.runs.setup import open_training
from mujica_jax.runtime import distributed
from mujica_jax.runtime.preemption import Preemption
from mujica_jax.storage.run_directory import run_path
from mujica_jax.trajectories.store import SUMMARY


def train(config: Config, directory: str, preemption: Preemption) -> dict[str, Any]:
    """Train one run from start to end, and return its summary: the content of summary.json.

    `directory` holds everything that a restart needs.
    """
    with open_training(config, run_path(directory), preemption) as run:
        method = implementation(config.method)
        phases = tuple(result.row for result in method(run))

        summary = summary_dict(
            phases,
            task=run.task.name,
            method=config.method.kind,
            reward=config.reward,
            split=config.eval.split,
            seed=config.seed,
        )
        if distributed.is_primary():
            run.store.write_json_once(SUMMARY, summary)

        run.progress.show(closing_table(phases))
        solved = solved_question(run, phases[-1].name)
        if solved:
            run.progress.show(question_tree(*solved))
        run.progress.line(f"policies, predictions and metrics: {directory}")
    return summary
