"""Only the beginning of a long text is read, and its tokens are those of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mujica_jax.retrieval.embedding import token_batches
from mujica_jax.retrieval.embedding.token_batches import Batching, encode_truncated

MAX_TOKENS = 9
LETTERS = "abcdé中1."
PIECES = [*LETTERS, *(f"##{letter}" for letter in LETTERS), "ab", "##cd", "abc"]
HARD = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u3000",
    "\u00a0",
    "\x00",
    "\x1c",
    "\u0301",
    " \u0301",
    "\u200b",
    "Σ",
    "[SEP]",
    "é",
    "中文",
    "a" * 120,
]


def like_bert() -> Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *PIECES]
    tokenizer = Tokenizer(
        models.WordPiece({name: place for place, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[SEP]", "[CLS]"])
    tokenizer.encode_special_tokens = True
    return tokenizer


def of_bytes() -> Tokenizer:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {"BERT": like_bert(), "bytes": of_bytes()}
for made in TOKENIZERS.values():
    made.enable_truncation(MAX_TOKENS)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(
    texts=st.lists(
        st.lists(st.sampled_from([*HARD, *LETTERS, "abcd"]), max_size=60).map("".join), max_size=4
    )
)
def test_the_tokens_are_those_of_the_whole_text(tokenizer, texts):
    expected = [entry.ids for entry in tokenizer.encode_batch(texts)]
    for characters in (1, 2, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_batches, "CHARACTERS_A_TOKEN", characters)
            assert encode_truncated(tokenizer, texts, MAX_TOKENS) == expected


def test_a_long_text_is_not_read_to_its_end(monkeypatch):
    tokenizer = TOKENIZERS["BERT"]
    text = "abcd abc " * 10_000
    beginnings = []
    original = token_batches.beginning_of

    def recorded_beginning(*arguments):
        beginnings.append(original(*arguments))
        return beginnings[-1]

    monkeypatch.setattr(token_batches, "beginning_of", recorded_beginning)
    (ids,) = encode_truncated(tokenizer, [text], MAX_TOKENS)
    assert ids == tokenizer.encode(text).ids
    assert len(ids) == MAX_TOKENS
    assert sum(map(len, beginnings)) < 20 * MAX_TOKENS
    blank = " " * 5000 + "abc"
    assert encode_truncated(tokenizer, [blank], MAX_TOKENS) == [tokenizer.encode(blank).ids]


def test_a_batch_of_long_texts_has_fewer_tokens():
    def tokens(length: int) -> int:
        (batch,) = Batching(8192).plan([length], is_uniform=True)
        return batch.rows * batch.length

    assert tokens(512) == 4096
    assert tokens(1024) == 2048
    assert tokens(8192) == 8192


def test_a_uniform_batch_has_texts_of_one_padded_length():
    batches = list(Batching(100).plan([3, 20, 17, 90, 16], is_uniform=True))
    assert [(batch.places, batch.length) for batch in batches] == [
        ([3], 96),
        ([1, 2], 24),
        ([4, 0], 16),
    ]


def test_a_batch_that_is_not_uniform_is_filled_with_shorter_texts():
    (batch,) = Batching(100).plan([3, 20, 17, 90, 16], is_uniform=False)
    assert batch.places == [3, 1, 2, 4, 0]
    assert (batch.rows, batch.length) == (4096 // 96, 96)
