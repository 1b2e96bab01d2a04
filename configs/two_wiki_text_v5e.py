"""Train Qwen2.5-7B with MyGO on 2WikiMultihopQA over passages, on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX

Scores in the paper (Mujica-MyGO, table 1): EM 53.17 and F1 59.62 after MyGO, 50.18 and 56.25 after
the warm-up, 23.35 and 33.52 with few-shot prompts (12.41 and 19.71 in the first version of the
paper). The ablations of table 4 have the flags --agent.no-split and --agent.no-parallel. The
baselines of table 3 are `--agents` of mujica_jax.eval.

From the paper:

- 20,000 questions, 1,000 in each round, at most 16 attempts and 3 kept trajectories for each
  question
- AdamW, and a learning rate that falls from 5e-7 to 1e-8 along a cosine
- a warm-up with the same procedure on 300 few-shot trajectories with EM 1, with a learning rate
  from 1e-5 to 1e-6
- no replay of older rows
- the embedder bge-large-en-v1.5, and five passages for each search as in the paper's table 8

Ours, where the paper gives no setting:

- one epoch over the rows of a round and over those of the warm-up (one epoch takes fewer steps than
  `warmup.steps` permits)
- one cosine over all rounds, and batches of 32 rows of 4,096 tokens
- b1 0.9, b2 0.95 and weight decay 0.01 for AdamW, gradients clipped at norm 1, and matrix products
  in bfloat16
- sampling temperature 1, and at most four few-shot attempts at each question
- a first threshold K of 0; the paper chooses it for each data set (--method.initial-threshold)
- five turns of the planner, four searches in a turn, and the limits on tokens
- the wording of the prompts (`agents/protocol.py`), and 500 questions in every evaluation

This configuration was never run. Learning takes about 1.2 hours, estimated from its number of
operations (docs/guides/evaluation.md). The training step compiles for this topology and fits in
memory. So does the engine, which uses four chips because Qwen2.5-7B has four key heads
(`tests/models/test_tpu_compile.py`). The section `model` has the published sizes of the checkpoint.
With --init the sizes are read from the checkpoint.
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
        name="two_wiki_text_v5e",
        task=TwoWikiConfig(
            environment="text",
            data_dir="data/2wikimultihopqa",
            hold_out_percent=15,
            dev_questions=500,
            test_questions=500,
            top_k=5,
            retriever="dense",
            index="data/2wikimultihopqa/index",
        ),
        model=ModelConfig(
            family="qwen2",
            vocab_tokens=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            rope_theta=1e6,
        ),
        agent=MujicaConfig(
            prompt="zero_shot",
            max_iterations=5,
            max_searches_per_turn=4,
            max_turn_tokens=512,
            max_trajectory_tokens=4096,
            max_observation_tokens=1500,
        ),
        engine=EngineConfig(
            kind="jetstream",
            max_num_seqs=128,
            decode_steps_per_call=16,
            prefill_tokens=4096,
            tensor_parallel_size=4,
            cache_gigabytes=4.0,
        ),
        trainer=TrainerConfig(sequence_length=4096, batch_size=32, dtype="bfloat16", fsdp=32),
        pretraining=PretrainingConfig(
            documents=0, steps=0, learning_rate=0.0, end_learning_rate=0.0
        ),
        warmup=WarmupConfig(
            source="few_shot",
            steps=100,
            epochs=1,
            learning_rate=1e-5,
            end_learning_rate=1e-6,
            lr_warmup_steps=0,
            pretraining_share=0.0,
        ),
        sampling=SamplingConfig(
            questions_per_round=1000,
            questions_per_shard=125,
            temperature=1.0,
        ),
        method=MygoConfig(
            rounds=20,
            max_attempts=16,
            keep_per_question=3,
            learning_rate=5e-7,
            end_learning_rate=1e-8,
            epochs=1,
            replay=0.0,
        ),
        eval=EvalConfig(questions=500),
    )
