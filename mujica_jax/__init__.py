"""Post-training and serving of retrieval-augmented LLM agents on TPUs.

    import mujica_jax as mj

    policy = mj.load("runs/my-run")
    policy.ask("Who is the mother of the director of Polish-Russian War?")

A planner breaks a multi-hop question into a graph of sub-questions. It asks independent
sub-questions at the same time. A worker answers one sub-question from the results of a retriever or
a knowledge graph. Planner and worker are the same language model with two prompts. The training
method MyGO samples trajectories, keeps those whose reward is above a rising threshold, and
maximises their likelihood.

The names in `__all__` are the Python API (`mujica_jax/api/`). Each one is loaded when it is first
used, so that importing the package is fast and does not start JAX.

To read the code, start with `records.py` (the shared data types), `config/schema.py` (all settings)
and `commands/train.py` (the training program).
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mujica_jax.api.evaluation import Results, evaluate
    from mujica_jax.api.policy import Policy, load
    from mujica_jax.api.retriever import Retriever
    from mujica_jax.api.training import TrainedRun, train
    from mujica_jax.api.trajectories import AnsweredTrajectory, read_trajectories

# transformers warns at every start that PyTorch is missing. This package does not need PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.2.0"

__all__ = [
    "AnsweredTrajectory",
    "Policy",
    "Results",
    "Retriever",
    "TrainedRun",
    "evaluate",
    "load",
    "read_trajectories",
    "train",
]

# The module of each name.
_MODULES = {
    "AnsweredTrajectory": "trajectories",
    "Policy": "policy",
    "Results": "evaluation",
    "Retriever": "retriever",
    "TrainedRun": "training",
    "evaluate": "evaluation",
    "load": "policy",
    "read_trajectories": "trajectories",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Return a name of the Python API. It is called for names that are not loaded yet."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.api.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    """Return all names, also those that are not loaded yet."""
    return sorted({*globals(), *__all__})
