"""A random BERT embedder of a few thousand parameters in the sentence-transformers layout, and a
corpus over its words.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mujica_jax.retrieval.embedding.encoder import encoder_config, weight_table

WORDS = [f"word{number}" for number in range(100)]
FIELDS = {
    "model_type": "bert",
    "vocab_size": 110,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def tiny_embedder(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    folder.mkdir(parents=True)
    fields = FIELDS | changes
    (folder / "config.json").write_text(json.dumps(fields))
    config = encoder_config(fields)
    draw = np.random.default_rng(seed)
    tensors = {
        name: draw.normal(0, 0.4, weight.hugging_face_shape).astype(np.float32)
        for name, weight in weight_table(config).names()
    }
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {
        token: id for id, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_corpus(path: Path, passages: int, seed: int = 0) -> Path:
    """Write JSON Lines of passages whose titles are `title N`."""
    draw = np.random.default_rng(seed)
    lines = [
        json.dumps(
            {"title": f"title {number}", "text": " ".join(draw.choice(WORDS, draw.integers(3, 12)))}
        )
        for number in range(passages)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
