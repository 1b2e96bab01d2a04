"""Train Qwen2.5-7B-Instruct with DecEx-RAG on 2WikiMultihopQA, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_decex_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX

The agent searches passages.

Scores in the paper (DecEx-RAG, table 1, 2Wiki): EM 50.0 and F1 55.9 over all of Wikipedia, and 34.7
and 41.8 for Search-R1.

Branches, rollouts, iterations, documents and the threshold are those of the paper, where it gives
them (`methods/decex/tree.py`). The paper uses 3,000 questions from two data sets; here 1,000
questions come from 2Wiki only. The learning rates of SFT are ours. There is no warm-up: the
checkpoint itself grows the search trees. In the paper Qwen3-30B-A3B writes the trees, except for
the retrieval decisions. A second model behind an endpoint can do the same here:

    --method.remote.base-url URL --method.remote.model NAME --method.remote.mode chat --method.remote.tokenizer FOLDER

A row of 8,192 tokens holds both conversations of a preference pair, each with at most 4,096 tokens.
`tests/models/test_tpu_compile.py` compiles the training step of DPO, but this configuration was
never run as a whole. With --init the section `model` is not read.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config, DecexConfig, DecexTreeConfig, SamplingConfig


def get_config() -> Config:
    like = load_config("two_wiki_text_v5e")
    return dataclasses.replace(
        like,
        name="two_wiki_text_decex_v5e",
        task=dataclasses.replace(like.task, top_k=3),
        agent=DecexConfig(
            prompt="zero_shot",
            max_iterations=4,
            max_turn_tokens=512,
            max_trajectory_tokens=4096,
            max_observation_tokens=700,
        ),
        # A row holds both conversations of a preference pair. A step with such rows takes one
        # gigabyte more than with rows of half the length, so the engine's cache is smaller.
        engine=dataclasses.replace(like.engine, kind="native", cache_gigabytes=3.0),
        trainer=dataclasses.replace(like.trainer, sequence_length=8192),
        warmup=dataclasses.replace(like.warmup, source="scripted", steps=0),
        sampling=SamplingConfig(questions_per_round=1000, questions_per_shard=50, temperature=1.0),
        method=DecexTreeConfig(
            branches=3,
            rollouts=4,
            skip_above=0.6,
            learning_rate=1e-6,
            end_learning_rate=1e-7,
            epochs=2,
            beta=0.1,
            dpo_learning_rate=5e-7,
            dpo_epochs=1,
        ),
    )
