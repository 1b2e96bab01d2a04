"""Train Qwen3-8B with DAPO and staged rewards on 2WikiMultihopQA, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_dapo_staged_qwen3_8b_v5e.py --init CHECKPOINT \\
        --task.data-dir DIR --task.index INDEX

The agent searches passages, and decides itself when to search.

Scores in the paper (Learning When to Search, table 1, 2Wiki with Qwen3-8B), as the share of answers
that a judge accepts: 0.28 without a search, 0.43 with one search, 0.51 after training.

From the paper's table 5:

- 500 steps of 32 questions, with 32 attempts at each question
- at most five turns
- prompts of 2,048 tokens, observations of 4,096, turns of 8,192 and responses of 16,384
- the learning rate, the KL term, and beta

A conversation holds a prompt and a response, 18,432 tokens. A batch is a single mini-batch of up to
256 rows of this length, which is 4.7 million tokens. A larger batch makes more than one update.
Eight chips share the matrices of each row. A step then needs 9.3 GB of temporaries on each chip. If
each chip had a row of its own, it would need 17.7 GB, and a chip has 16 GB
(docs/concepts/memory.md). Keys and values get 1.5 GB on each chip, because the reference weights of
the KL term take another 1 GB.

The judge of the paper is Qwen3-235B-A22B-Instruct. Use it with

    --staged.correctness judge --judge.base-url URL --judge.mode chat \\
    --judge.model Qwen/Qwen3-235B-A22B-Instruct --judge.tokenizer DIR

Without a judge, an answer is right if it is an exact match.

Ours:

- DAPO's clipping and its punishment of length (the paper uses DAPO and does not mention them)
- two stages of 250 steps each
- an evaluation every 50 steps (the paper: 30)
- 15% of the questions held out (the paper: 20%)
- bge over the index of the task (the paper: E5 over Wikipedia, and Qwen3-Embedding for the
  similarity of queries)

This configuration was never run. `tests/models/test_tpu_compile.py` compiles its training step.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DapoConfig, SingleConfig, StagedRewardConfig


def get_config() -> Config:
    like = load_config("two_wiki_text_qwen3_8b_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_text_dapo_staged_qwen3_8b_v5e",
        agent=SingleConfig(
            prompt="zero_shot",
            # There are at most five turns, and the last one answers.
            max_searches=4,
            max_turn_tokens=8192,
            max_observation_tokens=4096,
            # The paper's limits of a prompt and of a response.
            max_trajectory_tokens=2048 + 16384,
        ),
        engine=dataclasses.replace(like.engine, kind="native", cache_gigabytes=1.5),
        trainer=dataclasses.replace(
            like.trainer,
            sequence_length=2048 + 16384,
            batch_size=256,
            # Four rows at a time, one for each group of eight chips.
            accumulation_steps=64,
            fsdp=4,
            tensor_parallel_size=8,
        ),
        warmup=dataclasses.replace(like.warmup, source="scripted", steps=0),
        sampling=dataclasses.replace(like.sampling, questions_per_round=32, questions_per_shard=4),
        method=DapoConfig(
            rounds=500,
            rounds_per_evaluation=50,
            group_size=32,
            learning_rate=1e-6,
            end_learning_rate=1e-6,
            epochs=1,
            kl_coefficient=1e-4,
            overlong_tokens=16384,
            overlong_cache_tokens=4096,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=251, embedder="BAAI/bge-large-en-v1.5"),
    )
