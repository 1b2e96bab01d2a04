"""Train SmolLM2-135M on twelve questions about five documents.

    python -m mujica_jax.train examples/documents/config.py

The index of the documents has to be built first (docs/start/your_documents.md has all commands). The
run begins with the adapter that is part of the repository, which knows the format of the agent, and
takes one small round of MyGO. To use your own documents and questions, change `INDEX` and
`QUESTIONS`, or give --task.index and --task.data-dir.
"""

import dataclasses

from mujica_jax.config.files import load_config
from mujica_jax.config.schema import Config
from mujica_jax.config.tasks import OwnQuestionsConfig

QUESTIONS = "examples/documents/questions.jsonl"
INDEX = "runs/documents-index"


def get_config() -> Config:
    base = load_config("two_wiki_text_smollm2")
    return dataclasses.replace(
        base,
        name="documents",
        init="smollm2",
        adapter="adapters/two_wiki_text_smollm2",
        task=OwnQuestionsConfig(
            data_dir=QUESTIONS,
            index=INDEX,
            retriever="bm25",
            top_k=1,
        ),
        # Few questions need few conversations at a time, and little memory.
        engine=dataclasses.replace(base.engine, max_num_seqs=8),
        trainer=dataclasses.replace(base.trainer, batch_size=1),
        # The adapter knows the format, so no demonstrations are needed.
        warmup=dataclasses.replace(base.warmup, steps=0),
        sampling=dataclasses.replace(base.sampling, questions_per_round=8, questions_per_shard=4),
        method=dataclasses.replace(base.method, rounds=1, max_attempts=2),
        eval=dataclasses.replace(base.eval, questions=4),
    )
