"""A random Qwen3 decoder without its output head, in the layout of Qwen3-Embedding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mujica_jax.models.layers import block_weights, model_weights
from mujica_jax.retrieval.embedding.decoder_states import decoder_config
from tests.helpers.tiny_embedder import WORDS

END_OF_TEXT = "<|endoftext|>"
INSTRUCTION = "word1 word2 : "
FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 110,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 900,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MODULES = [
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        ("Normalize", "2_Normalize"),
    )
]


def tiny_qwen3(folder: Path, *, seed: int = 0, prefix: str = "", **changes: object) -> Path:
    """Write the folder of an embedder. `prefix` begins the names of its tensors."""
    folder.mkdir(parents=True)
    fields = FIELDS | changes
    (folder / "config.json").write_text(json.dumps(fields))
    config = decoder_config(fields)
    draw = np.random.default_rng(seed)
    weights = {weight.hugging_face: weight for weight in model_weights(config)}
    for layer in range(config.num_layers):
        for weight in block_weights(config):
            weights[f"model.layers.{layer}.{weight.hugging_face}"] = weight
    tensors = {
        prefix + name.removeprefix("model."): draw.normal(
            float("norm" in name), 0.3, weight.hugging_face_shape
        ).astype(np.float32)
        for name, weight in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    vocabulary = {token: id for id, token in enumerate(["[UNK]", END_OF_TEXT, ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    write_pooling(folder, {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True})
    prompts = {"prompts": {"query": INSTRUCTION, "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def write_pooling(folder: Path, fields: dict[str, object]) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
