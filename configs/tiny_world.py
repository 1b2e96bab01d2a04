"""Train a new model with MyGO on the tiny world, on two CPU cores, in a few minutes.

    python -m mujica_jax.train

A decoder of 0.3 million parameters is first trained on generated text, then on a few hundred
demonstrations. MyGO then improves it with thousands of questions, for which only the answers are
given.
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
    TinyWorldConfig,
    TrainerConfig,
    WarmupConfig,
)


def get_config() -> Config:
    return Config(
        name="tiny_world",
        task=TinyWorldConfig(
            train_questions=5_000,
            demonstrations=400,
            dev_questions=400,
            test_questions=400,
            augmented_copies=1,
            facts_per_entity=5,
            distractor_names=0.0,
        ),
        model=ModelConfig(
            family="qwen3",
            vocab_tokens=1536,
            hidden_size=64,
            intermediate_size=160,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            embedding_range=0.15,
        ),
        agent=MujicaConfig(
            prompt="brief",
            max_iterations=4,
            max_searches_per_turn=4,
            max_turn_tokens=96,
            max_trajectory_tokens=320,
            max_observation_tokens=200,
        ),
        engine=EngineConfig(max_num_seqs=256, decode_steps_per_call=16, prefill_tokens=4096),
        trainer=TrainerConfig(optimizer="muon", sequence_length=300, batch_size=7),
        pretraining=PretrainingConfig(
            documents=16_000, row_parts=2, steps=850, learning_rate=6e-3, end_learning_rate=4e-3
        ),
        warmup=WarmupConfig(
            steps=500,
            learning_rate=6e-3,
            end_learning_rate=3e-4,
            pretraining_share=0.1,
            miss_rate=0.1,
        ),
        sampling=SamplingConfig(
            questions_per_round=400,
            questions_per_shard=400,
            temperature=0.8,
        ),
        method=MygoConfig(
            rounds=2,
            max_attempts=3,
            keep_per_question=2,
            learning_rate=1e-3,
            end_learning_rate=1e-4,
            epochs=2,
            replay=0.5,
        ),
        eval=EvalConfig(questions=400, split="test"),
    )
