"""A random BERT cross-encoder of a few thousand parameters, over the words of `tiny_embedder`."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from mujica_jax.retrieval.embedding.cross_encoder import cross_encoder_table
from mujica_jax.retrieval.embedding.encoder import encoder_config
from tests.helpers.tiny_embedder import tiny_embedder


def tiny_cross_encoder(folder: Path, *, seed: int = 0) -> Path:
    tiny_embedder(folder, max_position_embeddings=64, id2label={"0": "LABEL_0"})
    config = encoder_config(json.loads((folder / "config.json").read_text()))
    draw = np.random.default_rng(seed)
    tensors = {
        name if name.startswith("classifier") else f"bert.{name}": draw.normal(
            0, 0.4, weight.hugging_face_shape
        ).astype(np.float32)
        for name, weight in cross_encoder_table(config).names()
    }
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
