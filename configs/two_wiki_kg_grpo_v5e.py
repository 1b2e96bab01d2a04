"""Train Qwen2.5-7B with GRPO on 2WikiMultihopQA over a knowledge graph, on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_grpo_v5e.py --init CHECKPOINT --task.data-dir DIR

Scores in the paper (Mujica-MyGO, table 7): F1 86.06 and EM 80.15 after 137,941 trajectories and 135
minutes. MyGO reaches 85.70 and 80.30 after 7,343 trajectories and 35 minutes.

The agent searches the graph of the data folder, or the graph that --task.index names. Without files
of triples in the folder, the graph consists of the gold evidences of the questions. The paper
searched Wikidata, which is harder; `two_wiki_kg_v5e.py` explains how to search it.

From the paper: about the same number of trajectories, and a KL term against the policy before the
first round (equation 4).

Ours, because the paper does not give its settings of GRPO: 67 batches of 128 questions with 16
attempts each, a constant learning rate of 1e-6, one epoch, clipping at 0.2, and a KL coefficient of
0.04. This coefficient is from the paper that introduced GRPO (DeepSeekMath). The KL term needs a
second set of weights, which takes 0.95 GB on each chip. All other settings are those of
`two_wiki_kg_v5e.py`.

This configuration was never run. `tests/models/test_tpu_compile.py` compiles its training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, GrpoConfig


def get_config() -> Config:
    like = load_config("two_wiki_kg_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_kg_grpo_v5e",
        # GRPO needs the log-probabilities that this engine returns.
        engine=dataclasses.replace(like.engine, kind="native"),
        sampling=dataclasses.replace(
            like.sampling, questions_per_round=128, questions_per_shard=16
        ),
        method=GrpoConfig(
            rounds=67,
            rounds_per_evaluation=10,
            group_size=16,
            learning_rate=1e-6,
            end_learning_rate=1e-6,
            epochs=1,
            kl_coefficient=0.04,
        ),
    )
