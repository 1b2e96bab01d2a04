"""Train SmolLM2-135M with DecEx-RAG on 2WikiMultihopQA over passages, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_text_smollm2_decex.py --task.data-dir DIR --init smollm2

The warm-up trains on demonstrations that a script plays with the passages that BM25 finds. The
script always searches. The search trees then find out where the model remembers enough to answer
without a search. With --init the section `model` is not read.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DecexConfig, DecexTreeConfig, SamplingConfig


def get_config() -> Config:
    like = load_config("two_wiki_text_smollm2")
    return dataclasses.replace(
        like,
        name="two_wiki_text_smollm2_decex",
        # Demonstrations from triples are for planners, which this agent does not have.
        task=dataclasses.replace(like.task, triple_demonstrations=0),
        agent=DecexConfig(
            prompt="brief",
            max_iterations=4,
            max_turn_tokens=160,
            max_trajectory_tokens=1536,
            max_observation_tokens=320,
        ),
        # A row holds both conversations of a preference pair.
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
