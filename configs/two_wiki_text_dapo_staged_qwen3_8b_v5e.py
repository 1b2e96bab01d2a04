"""2WikiMultihopQA over passages by staged rewards and DAPO, with Qwen3-8B on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_dapo_staged_qwen3_8b_v5e.py --init CHECKPOINT \\
        --task.data-dir DIR --task.index INDEX

Learning When to Search, table 1, 2Wiki with Qwen3-8B: a judge accepts 0.28 without search, 0.43
with one, 0.51 trained.

Attempts, batch, lengths, turns, rate, KL term and beta are those of the paper's table 5: 500 steps
of 32 questions with 32 attempts each, prompts of 2,048 tokens, observations of 4,096, turns of
8,192 and responses of 16,384, five turns. A conversation holds a prompt and a response, 18,432
tokens. The mini-batch is the whole batch, up to 256 rows of that length, 4.7 million tokens; a
longer batch makes more than one update. Eight chips share each row's matrices, because a step needs
17.7 GB of temporaries on a chip of 16 GB where each chip has a row to itself, and 9.3 GB here
(docs/concepts/memory.md). Keys and values have 1.5 GB a chip: the reference of the KL term takes 1 GB beside
them.

The judge of the paper is Qwen3-235B-A22B-Instruct; give it with

    --staged.correctness judge --judge.base-url URL --judge.mode chat \\
    --judge.model Qwen/Qwen3-235B-A22B-Instruct --judge.tokenizer DIR

Without it an answer is right by exact match. Ours: DAPO's clip and its punishment of length (the
paper trains by DAPO and does not speak of it), a stage of 250 steps each, an evaluation every 50
steps (30), 15% of the questions held out (20%), and bge over the task's index where the paper has
E5 over Wikipedia, and Qwen3-Embedding for the queries. Not run; `tests/models/test_tpu_compile.py`
compiles its training step.
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
            max_searches=4,  # and a fifth turn that answers
            max_turn_tokens=8192,
            max_observation_tokens=4096,
            max_trajectory_tokens=2048 + 16384,  # the paper's limits of a prompt and of a response
        ),
        engine=dataclasses.replace(like.engine, kind="native", cache_gigabytes=1.5),
        trainer=dataclasses.replace(
            like.trainer,
            sequence_length=2048 + 16384,
            batch_size=256,
            accumulation_steps=64,  # four rows at a time, one for each group of eight chips
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
