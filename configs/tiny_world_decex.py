"""The tiny world by DecEx-RAG: is a fact remembered, or searched for?

    python -m mujica_jax.train configs/tiny_world_decex.py

Over passages. The facts about half of the entities stand in the pre-training text, those about the others in passages
alone; names do not say which is which, and the rewards of the search trees do.
"""

from mujica_jax.config.schema import (
    Config,
    DecexConfig,
    DecexTreeConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    PretrainingConfig,
    SamplingConfig,
    TinyWorldConfig,
    TrainerConfig,
    WarmupConfig,
)


def get_config() -> Config:
    return Config(
        name="tiny_world_decex",
        task=TinyWorldConfig(
            environment="text",
            top_k=1,
            train_questions=1_000,
            demonstrations=400,
            dev_questions=200,
            test_questions=200,
            augmented_copies=1,
            facts_per_entity=5,
            distractor_names=0.0,
            common_knowledge=0.5,
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
        agent=DecexConfig(
            prompt="brief",
            max_iterations=4,
            max_turn_tokens=64,
            max_trajectory_tokens=640,
            max_observation_tokens=96,
        ),
        engine=EngineConfig(slots=128, decode_steps_per_call=16, prefill_tokens=4096),
        trainer=TrainerConfig(optimizer="muon", row_tokens=1280, rows_per_step=2),
        pretraining=PretrainingConfig(
            documents=16_000, row_parts=8, steps=850, learning_rate=6e-3, end_learning_rate=4e-3
        ),
        warmup=WarmupConfig(steps=500, learning_rate=6e-3, end_learning_rate=3e-4, pretraining_share=0.1),
        sampling=SamplingConfig(questions_per_round=200, shard_questions=50, temperature=0.8),
        method=DecexTreeConfig(learning_rate=2e-4, end_learning_rate=2e-5, epochs=2, dpo_learning_rate=1e-4),
        eval=EvalConfig(questions=200, split="test"),
    )
