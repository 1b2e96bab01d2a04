"""A decoder embeds texts as transformers and sentence-transformers do, by its last token."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.embedder import embedder_config
from mujica_jax.retrieval.embedding.find import find_embedder
from tests.helpers.tiny_embedder import WORDS
from tests.helpers.tiny_qwen3 import INSTRUCTION, tiny_qwen3, write_pooling

torch = pytest.importorskip("torch", reason="torch is not installed: parity needs it")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


def texts(count: int, longest: int) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, draw.integers(1, longest))) for _ in range(count)]


def hidden_states(folder: Path, sample: list[str]) -> tuple:
    """Return states [texts, time, hidden] and mask [texts, time] by transformers, padded left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.padding_side == "left"
    model = transformers.Qwen3Model.from_pretrained(folder).eval()
    batch = tokenizer(sample, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    return states, batch["attention_mask"]


def test_embeddings_are_the_last_states_of_transformers_of_length_1(folder):
    sample = texts(9, longest=40)
    states, _ = hidden_states(folder, sample)
    # With padding on the left, the last token of each text is the last of its row.
    theirs = torch.nn.functional.normalize(states[:, -1]).numpy()
    ours = find_embedder(str(folder)).load().embed(sample, "passage")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_query_gets_the_instruction_of_its_checkpoint(folder):
    sample = texts(5, longest=10)
    states, _ = hidden_states(folder, [INSTRUCTION + text for text in sample])
    theirs = torch.nn.functional.normalize(states[:, -1]).numpy()
    ours = find_embedder(str(folder)).load().embed(sample, "query")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_decoder_can_be_pooled_by_the_mean_of_its_states(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "mean")
    write_pooling(path, {"pooling_mode_mean_tokens": True})
    sample = texts(5, longest=20)
    states, mask = hidden_states(path, sample)
    means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    theirs = torch.nn.functional.normalize(means).numpy()
    ours = find_embedder(str(path)).load().embed(sample, "passage")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_long_text_is_computed_with_the_attention_for_long_rows(folder):
    sample = [" ".join(WORDS * 7), "word3"]
    states, _ = hidden_states(folder, sample)
    theirs = torch.nn.functional.normalize(states[:, -1]).numpy()
    ours = find_embedder(str(folder)).load().embed(sample, "passage")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_text_that_is_too_long_keeps_its_end_token(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "short")
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    embedder = find_embedder(str(path)).load()
    np.testing.assert_allclose(
        embedder.embed([" ".join(WORDS[:60])], "passage"),
        embedder.embed([" ".join(WORDS[:11])], "passage"),
        atol=1e-6,
    )


def test_a_query_has_the_same_numbers_whatever_it_comes_with(folder):
    embedder = find_embedder(str(folder)).load()
    sample = texts(30, longest=40)
    together = embedder.embed(sample, "query")
    for place in (0, 7, 29):
        np.testing.assert_array_equal(together[place], embedder.embed([sample[place]], "query")[0])


def test_a_checkpoint_with_its_output_head_is_read_without_it(folder, tmp_path):
    path = tiny_qwen3(tmp_path / "with_head", prefix="model.")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = np.ones((110, 32), np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    sample = texts(3, longest=10)
    np.testing.assert_array_equal(
        find_embedder(str(path)).load().embed(sample, "passage"),
        find_embedder(str(folder)).load().embed(sample, "passage"),
    )


@pytest.mark.parametrize(
    "fields",
    [{"pooling_mode": "lasttoken"}, {"pooling_mode_lasttoken": True}],
    ids=["new", "old"],
)
def test_both_forms_of_the_pooling_configuration_are_read(folder, tmp_path, fields):
    path = shutil.copytree(folder, tmp_path / "model")
    write_pooling(path, fields)
    assert embedder_config(path).pooling == "last"


def test_a_decoder_without_pooling_is_refused(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "modules.json").unlink()
    with pytest.raises(UserError, match=r"decoder \(qwen3\) without modules\.json.*download"):
        embedder_config(path)


def test_an_unknown_pooling_is_refused_with_the_known_ones(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    write_pooling(path, {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(
        UserError, match=r"pooling_mode_weightedmean_tokens.*pooling_mode_lasttoken"
    ):
        embedder_config(path)


@pytest.mark.parametrize(
    "changes", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str
)
def test_a_decoder_that_reads_in_both_directions_is_refused(folder, tmp_path, changes):
    path = shutil.copytree(folder, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=f"{next(iter(changes))} to .*choose another embedder"):
        embedder_config(path)


def test_a_longer_context_is_cut_at_the_limit_of_decoders(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 40_960}
    (path / "config.json").write_text(json.dumps(fields))
    assert embedder_config(path).max_tokens == 8192
    assert embedder_config(folder).max_tokens == 900
