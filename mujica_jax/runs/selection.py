"""Record what a round asked and what training kept, for people who look at the run.

    rounds/0003/questions.jsonl    the questions of the round, one JSON object in each line
    rounds/0003/kept.json          which trajectories the policy learns from

No program decides anything by these files. `mujica view` shows them beside the trajectories.
"""

from collections.abc import Sequence

from mujica_jax.records import Trajectory
from mujica_jax.runs.run import Run
from mujica_jax.runtime import distributed
from mujica_jax.trajectories.question_records import encode_questions


def record_selection(
    run: Run,
    number: int,
    trajectories: Sequence[Trajectory],
    kept_trajectories: Sequence[Trajectory],
) -> None:
    """Store the questions of a round, and which of its trajectories are kept for training.

    Files that an earlier start of the run stored are not changed.
    """
    if not distributed.is_primary():
        return
    question_of = {question.id: question for question in run.task.questions("train")}
    asked_ids = dict.fromkeys(trajectory.question_id for trajectory in trajectories)
    folder = f"rounds/{number:04d}"
    questions = encode_questions(question_of[question_id] for question_id in asked_ids)
    run.store.create(f"{folder}/questions.jsonl", questions)
    kept_names = [[trajectory.question_id, trajectory.attempt] for trajectory in kept_trajectories]
    run.store.write_json_once(f"{folder}/kept.json", {"kept": kept_names})
