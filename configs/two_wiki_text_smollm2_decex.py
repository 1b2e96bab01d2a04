"""2WikiMultihopQA over passages by DecEx-RAG, with SmolLM2-135M.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_decex.py --task.data-dir DIR --init smollm2

The warm-up learns demonstrations that a script plays over what BM25 finds: all of them search, and
whether the model remembers enough is left to the trees. The `model` section is not read with
--init.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DecexConfig, DecexTreeConfig, SamplingConfig


def get_config() -> Config:
    like = load_config("two_wiki_text_smollm2")
    return dataclasses.replace(
        like,
        name="two_wiki_text_smollm2_decex",
        task=dataclasses.replace(like.task, triple_demonstrations=0),  # they teach a planner alone
        agent=DecexConfig(
            prompt="brief",
            max_iterations=4,
            max_turn_tokens=160,
            max_trajectory_tokens=1536,
            max_observation_tokens=320,
        ),
        # A row holds both conversations of a pair.
        trainer=dataclasses.replace(like.trainer, sequence_length=3072, batch_size=1),
        sampling=SamplingConfig(questions_per_round=80, questions_per_shard=20, temperature=0.8),
        method=DecexTreeConfig(
            branches=2,
            rollouts=2,
            learning_rate=3e-4,
            end_learning_rate=3e-5,
            epochs=1,
            dpo_learning_rate=5e-5,
        ),
    )
