"""The tiny world with staged rewards: an agent that answers what it knows and searches for the
rest, trained by DAPO.

    python -m mujica_jax.train configs/tiny_world_dapo_staged.py

About half of the questions are about common knowledge (`task.common_knowledge`): what they ask
about stands in the text that the model reads before its demonstrations, which answer it from
memory. Model, reading and warm-up are larger than the tiny world's, so that it reads and remembers
(chosen on dev with one seed, docs/lab/experiments.md). The first stage rewards searching where an answer is
wrong, the second one, from `staged.stage_two_round` on, answering without. In the table of the end,
see how EM and searches move. `--staged.search False`, `--staged.answer False`, `--staged.stage-one
False` and `--staged.stage-two False` are the ablations of the paper's table 4, `--staged.unified
True` is its table 2. An attempt that generates more than 448 tokens is punished for its length, as
in DAPO.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DapoConfig, SingleConfig, StagedRewardConfig


def get_config() -> Config:
    base = load_config("tiny_world")
    return dataclasses.replace(
        base,
        name="tiny_world_dapo_staged",
        task=dataclasses.replace(
            base.task,
            environment="text",
            top_k=1,
            train_questions=400,
            dev_questions=200,
            demonstrations=2_000,
            augmented_copies=0,
            common_knowledge=0.5,
        ),
        model=dataclasses.replace(base.model, hidden_size=96, intermediate_size=256),
        agent=SingleConfig(
            max_turn_tokens=112,
            max_trajectory_tokens=640,
            max_observation_tokens=112,
            prompt="brief",
        ),
        trainer=dataclasses.replace(base.trainer, sequence_length=640, batch_size=4),
        pretraining=dataclasses.replace(base.pretraining, row_parts=4, steps=3_500),
        warmup=dataclasses.replace(base.warmup, steps=2_000, pretraining_share=0.4, miss_rate=0.0),
        sampling=dataclasses.replace(
            base.sampling, questions_per_round=50, questions_per_shard=50, temperature=1.0
        ),
        method=DapoConfig(
            rounds=12,
            rounds_per_evaluation=4,
            group_size=8,
            learning_rate=0.0005,
            end_learning_rate=5e-05,
            epochs=1,
            mini_batch_size=32,
            max_sampled_batches=4,
            overlong_tokens=560,  # five turns at their limit
            overlong_cache_tokens=112,  # a fifth of it, as in DAPO
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=5),
    )
