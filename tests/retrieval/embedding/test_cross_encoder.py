"""A cross-encoder scores pairs as transformers does, and other checkpoints are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mujica_jax.errors import UserError
from mujica_jax.retrieval.embedding.cross_encoder import MAX_PAIR_TOKENS, load_cross_encoder
from mujica_jax.retrieval.embedding.encoder import encoder_config
from mujica_jax.retrieval.embedding.find import find_embedder
from mujica_jax.retrieval.embedding.find_cross_encoder import find_cross_encoder
from tests.helpers.tiny_embedder import WORDS, tiny_embedder
from tests.helpers.tiny_qwen3 import tiny_qwen3

torch = pytest.importorskip("torch", reason="torch is not installed: parity needs it")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

MAX_TOKENS = 40
SIZES = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 1,
}
DRAW = np.random.default_rng(0)
LENGTHS = [(1, 1), (3, 9), (5, 20), (4, 80), (2, 33), (30, 30), (60, 70), (36, 2)]
PAIRS = [
    (" ".join(DRAW.choice(WORDS, query)), " ".join(DRAW.choice(WORDS, passage)))
    for query, passage in LENGTHS
]


def drawn(model):
    """Draw the weights that start as zeros and ones too."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("LayerNorm.weight" in name), std=0.3)
    return model


def save_bert(path: Path, **changes: object) -> Path:
    config = transformers.BertConfig(
        **SIZES | {"max_position_embeddings": MAX_TOKENS, "type_vocab_size": 2} | changes
    )
    drawn(transformers.BertForSequenceClassification(config)).save_pretrained(path)
    (path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    transformers.BertTokenizerFast(
        str(path / "vocab.txt"), model_max_length=MAX_TOKENS
    ).save_pretrained(path)
    return path


def save_xlm_roberta(path: Path) -> Path:
    config = transformers.XLMRobertaConfig(
        **SIZES,
        # Positions begin after the padding token's id, 1.
        max_position_embeddings=MAX_TOKENS + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    )
    drawn(transformers.XLMRobertaForSequenceClassification(config)).save_pretrained(path)

    # A tokenizer of pieces with scores, as SentencePiece makes them.
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=3)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        cls_token="<s>",
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(path)
    return path


SAVE = {"bert": save_bert, "xlm-roberta": save_xlm_roberta}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVE.items()}


def their_scores(folder: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    queries, passages = zip(*pairs, strict=True)
    batch = tokenizer(
        list(queries), list(passages), padding=True, truncation=True, return_tensors="pt"
    )
    assert batch["input_ids"].shape[1] == MAX_TOKENS, "a pair is cut"
    with torch.no_grad():
        return model(**batch).logits[:, 0].numpy()


@pytest.mark.parametrize("name", SAVE)
def test_scores_are_those_of_transformers(folders, name):
    ours = load_cross_encoder(folders[name]).scores(PAIRS)
    np.testing.assert_allclose(ours, their_scores(folders[name], PAIRS), atol=1e-4)


def test_only_the_passage_is_cut_if_the_query_is_short(folders):
    query = " ".join(WORDS[:10])
    passage = " ".join(WORDS[10:90])
    (encoding,) = load_cross_encoder(folders["bert"])._encode([(query, passage)])
    # [CLS], the query, [SEP], the passage and [SEP].
    assert len(encoding.ids) == MAX_TOKENS
    assert encoding.type_ids == [0] * 12 + [1] * 28


def test_the_beginning_of_a_book_is_enough(folders):
    cross_encoder = load_cross_encoder(folders["bert"])
    beginning = " ".join(WORDS[:60])
    np.testing.assert_array_equal(
        cross_encoder.scores([("word1", beginning)]),
        cross_encoder.scores([("word1", beginning + " word2" * 50_000)]),
    )


@pytest.mark.parametrize("name", SAVE)
def test_a_pair_has_the_same_score_whatever_it_is_scored_with(folders, name):
    cross_encoder = load_cross_encoder(folders[name])
    together = cross_encoder.scores(PAIRS * 20)
    for place, pair in enumerate(PAIRS):
        assert together[place] == cross_encoder.scores([pair])[0]


def test_no_pairs_have_no_scores(folders):
    assert load_cross_encoder(folders["bert"]).scores([]).shape == (0,)


def test_special_tokens_in_a_passage_are_only_text(folders):
    (encoding,) = load_cross_encoder(folders["bert"])._encode([("word1", "word2 [SEP] word3")])
    # The separator after the query, and the one at the end.
    assert encoding.ids.count(3) == 2


def test_an_xlm_roberta_embedder_has_the_states_of_transformers(folders, tmp_path):
    path = tmp_path / "embedder"
    config = transformers.AutoConfig.from_pretrained(folders["xlm-roberta"])
    model = drawn(transformers.XLMRobertaModel(config)).eval()
    model.save_pretrained(path)
    for file in folders["xlm-roberta"].glob("tokenizer*.json"):
        shutil.copy(file, path)
    sample = ["word1 word2", " ".join(WORDS[:30]), "word3"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(sample, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None]
    theirs = ((states * weights).sum(1) / weights.sum(1)).numpy()
    ours = find_embedder(str(path)).load().embed(sample, "passage")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_positions_of_roberta_begin_after_the_padding_token(folders):
    fields = json.loads((folders["xlm-roberta"] / "config.json").read_text())
    config = encoder_config(fields)
    assert (config.first_position, config.max_tokens) == (2, MAX_TOKENS)
    del fields["pad_token_id"]
    assert encoder_config(fields).first_position == 2


def test_an_embedder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no weights classifier\.weight.*give a cross-encoder"):
        find_cross_encoder(str(tiny_embedder(tmp_path / "embedder")))


def test_several_labels_are_refused(tmp_path):
    with pytest.raises(UserError, match="classifies into 3 labels, but a reranker has one score"):
        find_cross_encoder(str(save_bert(tmp_path / "classifier", num_labels=3)))


def test_a_decoder_is_refused(tmp_path):
    with pytest.raises(UserError, match="model_type='qwen3'"):
        find_cross_encoder(str(tiny_qwen3(tmp_path / "decoder")))


def test_a_name_that_is_no_folder_is_refused():
    with pytest.raises(UserError, match="the reranker 'nowhere' is not a folder"):
        find_cross_encoder("nowhere")


def test_the_longest_pair_is_the_smallest_limit(folders, tmp_path):
    assert find_cross_encoder(str(folders["bert"])).max_tokens == MAX_TOKENS
    path = shutil.copytree(folders["bert"], tmp_path / "long")
    fields = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(fields))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["model_max_length"] = 1e30
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find_cross_encoder(str(path)).max_tokens == MAX_PAIR_TOKENS


def test_the_version_changes_with_weights_and_limit(folders, tmp_path):
    versions = {find_cross_encoder(str(folder)).version for folder in folders.values()}
    assert find_cross_encoder(str(folders["bert"])).version in versions
    path = shutil.copytree(folders["bert"], tmp_path / "shorter")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["model_max_length"] = 20
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    versions.add(find_cross_encoder(str(path)).version)
    assert len(versions) == 3
