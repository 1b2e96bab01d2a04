"""Post-training and serving of retrieval-augmented LLM agents on TPUs.

A planner breaks a multi-hop question into a graph of sub-questions. It asks independent
sub-questions at the same time. A worker answers one sub-question from the results of a retriever or
a knowledge graph. Planner and worker are the same language model with two prompts. The training
method MyGO samples trajectories, keeps those whose reward is above a rising threshold, and
maximises their likelihood.

To read the code, start with `records.py` (the shared data types), `config/schema.py` (all settings)
and `commands/train.py` (the training program).
"""

import os

# transformers warns at every start that PyTorch is missing. This package does not need PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.2.0"
