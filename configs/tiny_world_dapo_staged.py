"""Train an agent with DAPO and staged rewards on the tiny world, on two CPU cores.

    python -m mujica_jax.train configs/tiny_world_dapo_staged.py

The agent learns to answer from memory if it can and to search otherwise. About half of the
questions are about common knowledge (`task.common_knowledge`). The pre-training text states their
facts, and the demonstrations answer them from memory. The model, the pre-training and the warm-up
are larger than those of `tiny_world.py`, so that the model can both read and remember. They were
chosen on dev with one seed (docs/lab/experiments.md).

In the first stage of the reward, searches reduce the penalty for a wrong answer. In the second
stage, from round `staged.stage_two_round` on, searches reduce the reward for a right answer. The
final table shows how EM and the number of searches change. As in DAPO, an attempt is punished for
its length if it generates more than 448 tokens.

Ablations of the paper "Learning When to Search":

- table 4: `--staged.no-search`, `--staged.no-answer`, `--staged.no-stage-one` or
  `--staged.no-stage-two`;
- table 2: `--staged.unified`.
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
            # The length of five turns of `max_turn_tokens` tokens.
            overlong_tokens=560,
            # A fifth of `overlong_tokens`, as in DAPO.
            overlong_cache_tokens=112,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=5),
    )
