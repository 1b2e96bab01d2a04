"""2WikiMultihopQA over passages, with Qwen2.5-7B on 32 chips (v5e:4x8).

    python -m mujica_jax.index build --corpus DIR/corpus_6119.json.gz --kind scann --out INDEX
    python -m mujica_jax.train configs/two_wiki_text_v5e.py --init CHECKPOINT --task.data-dir DIR --task.index INDEX

Mujica-MyGO, table 1: EM 53.17 and F1 59.62 after MyGO, 50.18 and 56.25 after the warm-up, 23.35 and
33.52 few-shot (12.41 and 19.71 in the paper's first version). Rows by flags: table 4 (--agent.split
False, --agent.parallel False) and the baselines of table 3 (--agents of mujica_jax.eval).

From the paper: 20,000 questions, 1,000 a round, at most 16 attempts, 3 kept trajectories a
question; AdamW with a plain cosine from 5e-7 to 1e-8; a warm-up on 300 few-shot trajectories with
EM 1 by the same procedure, from 1e-5 to 1e-6; no replay of older rows; bge-large-en-v1.5, and five
passages a search as in its table 8.

Ours, where the paper says nothing:

- one pass over the rows of a round, and one over those of the warm-up (`steps` is an upper bound
  that one pass does not reach); one cosine over all rounds; batches of 32 rows of 4,096 tokens
- AdamW's b1 0.9, b2 0.95, weight decay 0.01, gradients clipped at norm 1; bfloat16 for what is
  multiplied
- sampling at temperature 1, and at most four few-shot attempts a question
- K begins at 0; the paper chooses its first K for each data set (--method.initial-threshold)
- five turns of the planner, four searches a turn, and the limits of tokens
- the wording of the prompts (`agents/protocol.py`); every evaluation is of 500 questions

Not run; learning takes about 1.2 hours by its operations (docs/guides/evaluation.md). The training step
compiles for this topology and fits, and so does the engine on four of its chips, for Qwen2.5-7B has
four heads of keys (`tests/models/test_tpu_compile.py`). The `model` section has the sizes that the
checkpoint was published with; with --init those of the checkpoint are taken.
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
