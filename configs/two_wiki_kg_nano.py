"""Train a new small model with MyGO on 2WikiMultihopQA over a knowledge graph, on two CPU cores.

    python -m mujica_jax.train configs/two_wiki_kg_nano.py --task.data-dir DIR

DIR contains a sample of the official dev records (`dev_evidences*.json.gz`, `triples.tsv.gz`, ...).
A hash splits it into training and held-out questions (`split_dev_files`), so the scores are not
those of the official dev set. If DIR contains a file train*, no question of dev* is used for
training.

The agent searches the graph of DIR. It consists of the file of triples or, if there is none, of the
gold evidences of the questions. The paper searched Wikidata, which is harder.
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
        name="two_wiki_kg_nano",
        task=TwoWikiConfig(
            environment="graph",
            data_dir="data/2wikimultihopqa",
            hold_out_percent=15,
            dev_questions=200,
            test_questions=200,
            split_dev_files=True,
            top_k=8,
            augmented_copies=6,
        ),
        model=ModelConfig(
            family="qwen3",
            vocab_tokens=2048,
            hidden_size=96,
            intermediate_size=256,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
        ),
        agent=MujicaConfig(
            prompt="brief",
            max_iterations=4,
            max_searches_per_turn=4,
            max_turn_tokens=112,
            max_trajectory_tokens=464,
            max_observation_tokens=300,
        ),
        engine=EngineConfig(max_num_seqs=192, decode_steps_per_call=16, prefill_tokens=4096),
        trainer=TrainerConfig(sequence_length=464, batch_size=8),
        pretraining=PretrainingConfig(
            documents=20_000, steps=1200, learning_rate=5e-3, end_learning_rate=3e-3
        ),
        warmup=WarmupConfig(
            steps=2400, learning_rate=5e-3, end_learning_rate=2e-4, pretraining_share=0.15
        ),
        sampling=SamplingConfig(
            questions_per_round=1000,
            questions_per_shard=250,
            temperature=0.8,
        ),
        method=MygoConfig(
            rounds=2,
            max_attempts=4,
            keep_per_question=2,
            learning_rate=1.5e-3,
            end_learning_rate=1e-4,
            epochs=2,
            replay=1.0,
        ),
        eval=EvalConfig(questions=200, split="test"),
    )
