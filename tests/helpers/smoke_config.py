"""A whole run in seconds: every phase of the tiny world, too small to learn anything.
`test_train.py` starts it as users start a run.
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
        name="smoke",
        task=TinyWorldConfig(
            train_questions=64,
            demonstrations=100,
            dev_questions=16,
            test_questions=16,
            facts_per_entity=4,
            distractor_names=0.0,
        ),
        model=ModelConfig(
            family="qwen3",
            vocab_tokens=768,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
        ),
        agent=MujicaConfig(
            prompt="brief",
            max_iterations=4,
            max_searches_per_turn=4,
            max_turn_tokens=80,
            max_trajectory_tokens=384,
            max_observation_tokens=160,
        ),
        engine=EngineConfig(max_num_seqs=16, decode_steps_per_call=16, prefill_tokens=1024),
        trainer=TrainerConfig(sequence_length=384, batch_size=4),
        pretraining=PretrainingConfig(
            documents=200, steps=20, learning_rate=1e-2, end_learning_rate=1e-3
        ),
        warmup=WarmupConfig(
            steps=120, learning_rate=2e-2, end_learning_rate=1e-3, pretraining_share=0.1
        ),
        sampling=SamplingConfig(questions_per_round=16, questions_per_shard=8, temperature=1.0),
        method=MygoConfig(
            rounds=2,
            max_attempts=2,
            keep_per_question=1,
            learning_rate=2e-3,
            end_learning_rate=2e-4,
            epochs=4,
            replay=0.5,
        ),
        eval=EvalConfig(questions=12, control=True),
    )
