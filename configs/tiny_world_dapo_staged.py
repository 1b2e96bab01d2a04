"""The tiny world with staged rewards: an agent that answers what it knows and searches for the rest, trained by DAPO.

    python -m mujica_jax.train configs/tiny_world_dapo_staged.py

Half of the entities stand in the text that the model reads before its demonstrations (`task.common_knowledge`). The
first stage rewards searching where an answer is wrong, the second one, from `staged.stage_two_round` on, answering
without. In the table of the end, see how EM and searches move; `--staged.search False`, `--staged.stage-one False` and
so on are the ablations.
"""

from mujica_jax.config.schema import (
    Config,
    DapoConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    PretrainingConfig,
    SamplingConfig,
    SingleConfig,
    StagedRewardConfig,
    TinyWorldConfig,
    TrainerConfig,
    WarmupConfig,
)


def get_config() -> Config:
    return Config(
        name="tiny_world_dapo_staged",
        task=TinyWorldConfig(
            environment="text",
            top_k=1,
            common_knowledge=0.5,
            train_questions=5_000,
            demonstrations=800,
            dev_questions=400,
            test_questions=400,
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
        agent=SingleConfig(
            prompt="brief",
            max_searches=4,
            max_turn_tokens=112,
            max_trajectory_tokens=640,
            max_observation_tokens=112,
        ),
        engine=EngineConfig(slots=256, decode_steps_per_call=16, prefill_tokens=4096),
        trainer=TrainerConfig(optimizer="muon", row_tokens=640, rows_per_step=4),
        pretraining=PretrainingConfig(
            documents=16_000, row_parts=4, steps=850, learning_rate=6e-3, end_learning_rate=4e-3
        ),
        warmup=WarmupConfig(steps=500, learning_rate=6e-3, end_learning_rate=3e-4, pretraining_share=0.3),
        sampling=SamplingConfig(
            questions_per_round=50,
            shard_questions=50,
            temperature=1.0,
        ),
        method=DapoConfig(
            rounds=12,
            rounds_per_phase=4,
            group_attempts=8,
            learning_rate=5e-4,
            end_learning_rate=5e-5,
            epochs=1,
            rows_per_update=32,
            max_sampled_batches=4,
        ),
        reward="staged",
        staged=StagedRewardConfig(stage_two_round=5),
        eval=EvalConfig(questions=400, split="test"),
    )
