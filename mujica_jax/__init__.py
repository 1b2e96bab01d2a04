"""Post-training and serving of retrieval-augmented LLM agents on TPUs.

A planner breaks a multi-hop question into a graph of sub-questions and asks the independent ones at
the same time. A worker answers one sub-question from the results of a retriever or a knowledge
graph. Both are one language model under two prompts. MyGO trains it: sample trajectories, keep
those whose reward beats a rising threshold, maximise their likelihood. `records.py` holds the
nouns, `config/schema.py` every setting, and `train.py` the program that joins them.
"""

import os

# transformers says at every start that PyTorch is missing; a run needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.2.0"
