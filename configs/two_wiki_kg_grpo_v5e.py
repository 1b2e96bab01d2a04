"""2WikiMultihopQA over its knowledge graph by GRPO, with Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.train configs/two_wiki_kg_grpo_v5e.py --init CHECKPOINT --task.data-dir DIR

Mujica-MyGO, table 7: F1 86.06 and EM 80.15 after 137,941 trajectories and 135 minutes, where MyGO
has 85.70 and 80.30 after 7,343 and 35 minutes.

What is searched is the graph of the data folder, or of --task.index. Without files of triples that
is the gold evidences of the questions. The paper searched Wikidata, which is harder;
`two_wiki_kg_v5e.py` says how to do so.

From the paper: about as many trajectories, and a KL term to the policy that the rounds begin with
(its equation 4). Ours, for the paper prints no number of its GRPO: 67 batches of 128 questions with
16 attempts each, a constant rate of 1e-6, one pass, clipping at 0.2, and a KL coefficient of 0.04,
that of the paper which introduced GRPO (DeepSeekMath). The KL term holds a second set of weights,
0.95 GB on each chip. All else is as in `two_wiki_kg_v5e.py`.

Not run; `tests/models/test_tpu_compile.py` compiles its training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, GrpoConfig


def get_config() -> Config:
    like = load_config("two_wiki_kg_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_kg_grpo_v5e",
        engine=dataclasses.replace(
            like.engine, kind="native"
        ),  # gives the log-probabilities that GRPO learns from
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
