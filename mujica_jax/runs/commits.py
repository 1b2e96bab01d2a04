"""Record in a run directory which commits of Hugging Face models the run uses.

Each model has a file `models/OWNER--MODEL.json` with its name and its commit. A resumed run, an
evaluation of the run and its sampling workers use the same commits, although a branch may have
moved.
"""

from mujica_jax.models.hub import check_same_commits, use_commits, used_commits
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import RunDirectory

FOLDER = "models/"


def recorded_commits(directory: RunDirectory) -> dict[str, str]:
    """Return the commits that a run recorded, by the names of the models."""
    commits = {}
    for file in directory.names(FOLDER):
        model = directory.read_json(file)
        commits[model["name"]] = model["commit"]
    return commits


def use_recorded_commits(directory: RunDirectory) -> None:
    """Use the commits that a run recorded. Call this before its models are made local."""
    use_commits(recorded_commits(directory))


def record_commits(directory: RunDirectory) -> None:
    """Record the commits of all models that are local by now, if the run has not recorded them.

    Every process of a job calls this. Raises UserError if their commits differ.
    """
    check_same_commits()
    if not distributed.is_primary():
        return
    for name, commit in used_commits().items():
        file = f"{FOLDER}{name.replace('/', '--')}.json"
        directory.write_json_once(file, {"name": name, "commit": commit})
