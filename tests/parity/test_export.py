"""Other programs compute with an exported policy what our decoder computes: transformers, vLLM."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint
from mujica_jax.runs.export import find_export, write_export
from tests.helpers.exported_runs import RANK, trained_run

QUESTION = "Who is the director of The Purple Shore?"
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("run") / "run", init="a/base", rank=RANK)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """Return the export of a policy with its adapter merged."""
    target = tmp_path_factory.mktemp("export") / "agent"
    policy = find_export(str(run.root), policy=None, form="merged model")
    write_export(policy, target, name="agent")
    return target


def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_trusted(QUESTION)


def our_logits(folder, token_ids: list[int]) -> np.ndarray:
    decoder = load_checkpoint(folder)
    tokens = jnp.asarray([token_ids])
    positions = jnp.arange(len(token_ids))[None]
    hidden = decoder(tokens, positions, causal_self_attention(jnp.ones_like(tokens)))
    return np.asarray(decoder.logits(hidden))[0]


@pytest.mark.slow
def test_transformers_computes_the_same_logits_from_an_export(folder):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        theirs = model(torch.tensor([token_ids])).logits[0].numpy()
    ours = our_logits(folder, token_ids)
    assert np.abs(theirs).max() > 1, "the logits are not all alike"
    np.testing.assert_allclose(ours, theirs, atol=1e-3 * np.abs(theirs).max())


@pytest.mark.slow
def test_vllm_decodes_the_same_tokens_from_an_export(folder):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    import vllm

    token_ids = prompt(Tokenizer.load(folder))
    engine = vllm.LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=256)
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True
    )
    (result,) = engine.generate([{"prompt_token_ids": token_ids}], sampling)
    completion = result.outputs[0]

    # Greedy decoding takes the likeliest token after each prefix, so one pass over the whole text
    # shows every step.
    new_ids = list(completion.token_ids)
    rows = our_logits(folder, token_ids + new_ids)[len(token_ids) - 1 : -1]
    assert len(new_ids) == NEW_TOKENS
    assert np.argmax(rows, axis=-1).tolist() == new_ids
    ours = jax.nn.log_softmax(rows)[np.arange(NEW_TOKENS), np.asarray(new_ids)]
    theirs = []
    for token_id, entries in zip(new_ids, completion.logprobs, strict=True):
        theirs.append(entries[token_id].logprob)
    np.testing.assert_allclose(theirs, ours, atol=1e-3)
