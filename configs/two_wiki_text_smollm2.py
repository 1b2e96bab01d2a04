"""Train SmolLM2-135M with MyGO on 2WikiMultihopQA over passages, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_text_smollm2.py --task.data-dir DIR --init smollm2

The warm-up takes an hour and reaches EM 46.0 on dev and 42.4 on test. It trains on demonstrations
that a script plays with the passages that BM25 finds. One round of MyGO with 80 to 120 questions
does not change EM. A round with all 727 questions takes minutes on a GPU. It adds 5 points of EM
with greedy and 10 with sampled decoding. The same amount of computation on demonstrations adds 14
and 18 points (docs/lab/benchmarks.md has the flags).

DIR contains a sample of the official dev file. A hash splits it into training and held-out
questions (`split_dev_files`), so the scores are not those of the official dev set. If DIR contains
a file train*, no question of dev* is used for training. With --init the section `model` is not
read.
"""

from mujica_jax.config.schema import (
    Config,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    MujicaConfig,
    MygoConfig,
    PretrainingConfig,
    SamplingConfig,
    TrainerConfig,
    TwoWikiConfig,
    WarmupConfig,
)


def get_config() -> Config:
    return Config(
        name="two_wiki_text_smollm2",
        task=TwoWikiConfig(
            environment="text",
            data_dir="data/2wikimultihopqa",
            hold_out_percent=30,
            dev_questions=100,
            test_questions=200,
            split_dev_files=True,
            top_k=3,
            triple_demonstrations=2000,
        ),
        model=ModelConfig(
            family="llama",
            vocab_tokens=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
        ),
        agent=MujicaConfig(
            prompt="brief",
            max_iterations=5,
            max_searches_per_turn=4,
            max_turn_tokens=128,
            max_trajectory_tokens=768,
            max_observation_tokens=512,
        ),
        engine=EngineConfig(max_num_seqs=48, decode_steps_per_call=8, prefill_tokens=1024),
        trainer=TrainerConfig(sequence_length=768, batch_size=4, lora_rank=8, remat="dots"),
        pretraining=PretrainingConfig(
            documents=0, steps=0, learning_rate=0.0, end_learning_rate=0.0
        ),
        warmup=WarmupConfig(
            steps=300, learning_rate=1e-3, end_learning_rate=1e-4, pretraining_share=0.0
        ),
        sampling=SamplingConfig(
            questions_per_round=80,
            questions_per_shard=40,
            temperature=0.8,
        ),
        method=MygoConfig(
            rounds=2,
            max_attempts=2,
            keep_per_question=1,
            learning_rate=3e-4,
            end_learning_rate=3e-5,
            epochs=1,
            replay=0.25,
        ),
        eval=EvalConfig(questions=100),
    )
