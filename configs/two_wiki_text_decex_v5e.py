"""2WikiMultihopQA over passages by DecEx-RAG, with Qwen2.5-7B-Instruct on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_decex_v5e.py --init CHECKPOINT --task.data-dir DIR \\
        --task.index INDEX

DecEx-RAG, table 1, 2Wiki: EM 50.0 and F1 55.9 over all of Wikipedia; Search-R1 34.7 and 41.8.

Branches, rollouts, iterations, documents and the threshold are those of the DecEx-RAG paper, as far
as it has them (`methods/decex/tree.py`). Its 3,000 questions came from two data sets; here 1,000
are of 2Wiki alone. The rates of SFT are ours. There is no warm-up: the trees are grown with the
checkpoint. The paper's trees were written by Qwen3-30B-A3B, but for the retrieval decision; a
second model behind an endpoint does that here too:

    --method.remote.base-url URL --method.remote.model NAME --method.remote.mode chat --method.remote.tokenizer FOLDER

A row of 8,192 tokens holds both conversations of a pair; a conversation of ours has at most 4,096
tokens. `tests/models/test_tpu_compile.py` compiles the step of DPO; a whole run is still to come. The
`model` section is not read with --init.
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
        # A row holds both conversations of a pair. Its step takes a gigabyte more than rows of half
        # the length, which the engine's cache makes room for.
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
