"""Conversations are token-true to the chat templates of three families, and no text can smuggle a
token in.
"""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mujica_jax.errors import UserError
from mujica_jax.models.tokenizer import PROTOCOL_TAGS, TAG_PATTERN, Tokenizer, neutralise
from mujica_jax.records import Message

CORPUS = [
    "Who directed the film that was released in 1987? <search>director of the film</search> You "
    "are a helpful planner.",
    "system user assistant\n"
    "\n"
    "Answer in one line.\n"
    " Paris, Rome and New York were founded in 753, 1624 and 1987.",
] * 3

QWEN2_5_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] "
    "+ '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- "
    "endif %}{%- for message in messages %}{%- if message.role == 'user' or (message.role == "
    "'system' and not loop.first) or message.role == 'assistant' %}{{- '<|im_start|>' + "
    "message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}{%- "
    "if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# a think block is written only for turns after the last user message, and only if there is thought
QWEN3_TEMPLATE = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + "
    "'<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- elif message.role == "
    "'assistant' %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}{%- if "
    "loop.last %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content }}{%- else "
    "%}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif "
    "%}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if "
    "enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' "
    "}}{%- endif %}{%- endif %}"
)
LLAMA3_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
    "add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif "
    "%}"
)
NO_SYSTEM_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ "
    "raise_exception('System role not supported') }}{% endif %}{{ '<start_of_turn>' + "
    "message['role'].replace('assistant', 'model') + '\\n' + message['content'] + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' "
    "}}{% endif %}"
)
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# name: template, special tokens, non-special added tokens, word pattern, begin, end of text,
# specials in the model's vocabulary
FAMILIES = {
    "qwen2": (QWEN2_5_TEMPLATE, CHATML_TOKENS, [], QWEN_SPLIT, None, "<|im_end|>", False),
    "qwen3": (
        QWEN3_TEMPLATE,
        CHATML_TOKENS,
        ["<think>", "</think>"],
        QWEN_SPLIT,
        None,
        "<|im_end|>",
        False,
    ),
    "llama3": (
        LLAMA3_TEMPLATE,
        LLAMA3_TOKENS,
        [],
        LLAMA3_SPLIT,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        True,
    ),
}


def _wrapped(
    template, special, added, pattern, begin, end, in_vocabulary
) -> PreTrainedTokenizerFast:
    """Return a small byte-level BPE with the special tokens and the template of a family."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    spell = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, spell])
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special if in_vocabulary else [],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(special)
    backend.add_tokens(added)
    # As with Llama-3, encoding adds a first token unless it is told not to.
    if begin is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end)
    wrapped.chat_template = template
    return wrapped


WRAPPED = {name: _wrapped(*family) for name, family in FAMILIES.items()}
TOKENIZERS = {name: Tokenizer(wrapped) for name, wrapped in WRAPPED.items()}
TRAINED = Tokenizer.train(iter(CORPUS), 400)
every_family = pytest.mark.parametrize("name", FAMILIES)

hostile_pieces = st.sampled_from(
    [
        *CHATML_TOKENS,
        *LLAMA3_TOKENS,
        *(f"<{slash}{tag}>" for tag in PROTOCOL_TAGS for slash in ("", "/")),
        "< Answer >",
        "<ANSWER",
        ">",
        "<",
        "|im_end|",
        " ",
        "\n",
        "Ġ",
        "ſ",
    ]
)
hostile_texts = st.lists(st.one_of(hostile_pieces, st.text(max_size=8)), max_size=8).map("".join)

SYSTEM = "You are a planner.\nAnswer in one line."
USERS = ["Who directed it in 1987?", "  Rome? \n", "\n\nParis", "été – 東京 🎬", "a<b and c>d", "x"]


def _expected(name: str, messages: list[tuple[str, str]]) -> list[int]:
    """Return what transformers makes of the whole conversation at once."""
    dictionaries = [{"role": role, "content": content} for role, content in messages]
    return WRAPPED[name].apply_chat_template(
        dictionaries, add_generation_prompt=True, return_dict=False
    )


@every_family
@pytest.mark.parametrize("user", USERS)
def test_an_opening_is_what_the_chat_template_gives(name, user):
    assert TOKENIZERS[name].open_conversation(SYSTEM, user) == _expected(
        name, [("system", SYSTEM), ("user", user)]
    )


@every_family
@pytest.mark.parametrize("user", USERS)
def test_turns_appended_one_by_one_equal_the_whole_conversation(name, user):
    tokenizer = TOKENIZERS[name]
    answer = "Ask for the director."
    ids = tokenizer.open_conversation(SYSTEM, "Who?") + tokenizer.encode_model(answer)
    messages = [("system", SYSTEM), ("user", "Who?"), ("assistant", answer), ("user", user)]
    assert ids + tokenizer.continue_conversation(user, stopped=False) == _expected(name, messages)
    stopped = [*ids, tokenizer.end_of_turn_id, *tokenizer.continue_conversation(user, stopped=True)]
    assert stopped == _expected(name, messages)


def test_a_template_without_system_role_gets_the_system_text_in_the_user_message():
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(
        _wrapped(NO_SYSTEM_TEMPLATE, special, [], QWEN_SPLIT, "<bos>", "<end_of_turn>", False)
    )
    text = tokenizer.decode(tokenizer.open_conversation("Be brief.", "Who?"))
    assert (
        text == "<bos><start_of_turn>user\nBe brief.\n\nWho?<end_of_turn>\n<start_of_turn>model\n"
    )


model_texts = st.text(max_size=20) | st.sampled_from(
    ["<think>x</think>\n<answer>Rome</answer>", "<|im_end|>", "\n", ""]
)
stopped_turns = st.lists(st.tuples(model_texts, hostile_texts, st.integers(0, 2)), max_size=3)


@given(system=st.text(max_size=20), user=hostile_texts, turns=stopped_turns)
@settings(max_examples=150, deadline=None)
def test_messages_are_what_the_conversation_was_rendered_from(system, user, turns):
    """A model's turn may be cut by a limit (0), or end with either of its stop tokens."""
    for tokenizer, stripped in [
        *((t, name == "llama3") for name, t in TOKENIZERS.items()),
        (TRAINED, False),
    ]:

        def content(text, stripped=stripped):
            return text.strip() if stripped else text

        ids = tokenizer.open_conversation(system, user)
        expected = [("system", content(system)), ("user", content(neutralise(user)))]
        for answer, reply, ending in turns:
            end = (
                [tokenizer.stop_token_ids[ending % len(tokenizer.stop_token_ids)]] if ending else []
            )
            ids = [
                *ids,
                *tokenizer.encode_model(answer),
                *end,
                *tokenizer.continue_conversation(reply, bool(end)),
            ]
            expected += [("assistant", answer), ("user", content(neutralise(reply)))]
        assert tokenizer.messages(ids) == [
            {"role": role, "content": content} for role, content in expected
        ]


@every_family
@pytest.mark.parametrize("user", USERS)
def test_transformers_renders_the_messages_to_the_same_tokens(name, user):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.open_conversation(SYSTEM, user) + tokenizer.encode_model(
        "Ask for the director."
    )
    ids += tokenizer.continue_conversation(user, stopped=False)
    messages = tokenizer.messages(ids)
    assert (
        WRAPPED[name].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        == ids
    )


def test_messages_of_a_template_without_system_role():
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(
        _wrapped(NO_SYSTEM_TEMPLATE, special, [], QWEN_SPLIT, "<bos>", "<end_of_turn>", False)
    )
    ids = tokenizer.open_conversation("Be brief.", "Who?") + tokenizer.encode_model("He.")
    assert tokenizer.messages(ids + tokenizer.continue_conversation("Why?", stopped=False)) == [
        {"role": "user", "content": "Be brief.\n\nWho?"},
        {"role": "assistant", "content": "He."},
        {"role": "user", "content": "Why?"},
    ]


# Messages of files

# Qwen2.5's roles of tools: results that follow each other share one message of the user.
TOOL_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{% if loop.first or "
    "messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ "
    "'\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}{% if loop.last or "
    "messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% else %}{{ "
    "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _messages(*pairs: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in pairs]  # type: ignore[arg-type]


@every_family
@given(system=st.text(max_size=20), user=hostile_texts, stopped=st.booleans())
@settings(max_examples=60, deadline=None)
def test_messages_of_files_get_the_tokens_of_an_agents_conversation(name, system, user, stopped):
    tokenizer = TOKENIZERS[name]
    opening = tokenizer.open_messages(_messages(("system", system), ("user", user)))
    assert opening == tokenizer.open_conversation(system, user)
    following = tokenizer.continue_messages(_messages(("user", user)), stopped)
    assert following == tokenizer.continue_conversation(user, stopped)


@every_family
@pytest.mark.parametrize(
    "roles", [("user",), ("system", "user"), ("user", "user"), ("system", "user", "user")]
)
def test_any_opening_is_what_the_chat_template_gives(name, roles):
    # Qwen2.5's template writes a system prompt of its own where there is none.
    pairs = [(role, f"the {role} says {number}") for number, role in enumerate(roles)]
    assert TOKENIZERS[name].open_messages(_messages(*pairs)) == _expected(name, pairs)


def test_results_of_tools_are_what_the_chat_template_gives():
    wrapped = _wrapped(TOOL_TEMPLATE, CHATML_TOKENS, [], QWEN_SPLIT, None, "<|im_end|>", False)
    tokenizer = Tokenizer(wrapped)
    before = [("system", SYSTEM), ("user", "Who?"), ("assistant", "Ask.")]
    results = [("tool", "Rome"), ("tool", "Paris")]
    ids = tokenizer.open_messages(_messages(*before[:2])) + tokenizer.encode_model("Ask.")
    ids += tokenizer.continue_messages(_messages(*results), stopped=False)
    dictionaries = [{"role": role, "content": content} for role, content in before + results]
    assert ids == wrapped.apply_chat_template(
        dictionaries, add_generation_prompt=True, return_dict=False
    )


def test_results_of_tools_are_a_users_where_the_template_has_no_such_role():
    results = _messages(("tool", "Rome"))
    assert TOKENIZERS["qwen2"].continue_messages(results, stopped=True) == TOKENIZERS[
        "qwen2"
    ].continue_conversation("Rome", stopped=True)


def test_a_system_prompt_joins_the_users_message_where_the_template_has_no_such_role():
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(
        _wrapped(NO_SYSTEM_TEMPLATE, special, [], QWEN_SPLIT, "<bos>", "<end_of_turn>", False)
    )
    messages = _messages(("system", "Be brief."), ("user", "Who?"))
    assert tokenizer.open_messages(messages) == tokenizer.open_conversation("Be brief.", "Who?")


def test_messages_that_a_template_refuses_are_named():
    template = NO_SYSTEM_TEMPLATE.replace("'system'", "'tool'").replace(
        "System role not supported", "no tools"
    )
    template = (
        "{% if messages|length > 2 and messages[-1].role == messages[-2].role %}{{ "
        "raise_exception('alternate') }}{% endif %}" + template
    )
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(
        _wrapped(template, special, [], QWEN_SPLIT, "<bos>", "<end_of_turn>", False)
    )
    with pytest.raises(UserError, match="cannot write the messages user, user after a turn of"):
        tokenizer.continue_messages(_messages(("user", "a"), ("user", "b")), stopped=True)


@given(text=hostile_texts, role=st.sampled_from(["system", "user", "tool"]))
@settings(max_examples=100, deadline=None)
def test_no_message_of_a_file_smuggles_a_token_in(text, role):
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        plain = tokenizer.open_messages(_messages((role, "x"), ("user", "y")))
        hostile = tokenizer.open_messages(_messages((role, text), ("user", text)))

        def added(ids, tokenizer=tokenizer):
            return [id for id in ids if id in tokenizer._added_ids]

        assert added(hostile) == added(plain)


def test_tokens_that_are_no_conversation_have_no_messages():
    opening = TRAINED.open_conversation("s", "u")
    for ids, sentence in [
        (opening[:-2], r"ends after .* and the chat template continues with"),
        (opening + TRAINED.encode_model("He."), r"ends after 'He\.', and"),
        (opening[1:], r"begins with .* and the chat template with"),
        ([], r"begins with '' and"),
    ]:
        with pytest.raises(UserError, match=sentence):
            TRAINED.messages(ids)


def test_a_template_that_parts_messages_by_text_has_no_messages():
    template = (
        "[INST] {{ messages[0]['content'] }} || {{ messages[1]['content'] }} [/INST]{% for message "
        "in messages[2:] %}{% if message['role'] == 'user' %} [INST]{{ message['content'] }} "
        "[/INST]{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer(_wrapped(template, ["</s>"], [], QWEN_SPLIT, None, "</s>", False))
    with pytest.raises(UserError, match="and a message could hold the same text"):
        tokenizer.messages(tokenizer.open_conversation("s", "u"))


def test_a_template_that_rewrites_earlier_turns_is_refused():
    template = QWEN2_5_TEMPLATE.replace(
        "message.content +", "(message.content if loop.last else '') +"
    )
    with pytest.raises(UserError, match=r"cannot grow by appending"):
        Tokenizer(_wrapped(template, CHATML_TOKENS, [], QWEN_SPLIT, None, "<|im_end|>", False))


@every_family
def test_stop_tokens_are_end_of_turn_and_end_of_text(name):
    expected = {"<|im_end|>"} if name != "llama3" else {"<|eot_id|>", "<|end_of_text|>"}
    assert {TOKENIZERS[name].decode([id]) for id in TOKENIZERS[name].stop_token_ids} == expected


@given(text=hostile_texts)
@settings(max_examples=150, deadline=None)
def test_no_added_token_comes_out_of_plain_text(text):
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        added = set(tokenizer._backend.get_added_tokens_decoder())
        ids = tokenizer.encode_plain(text)
        assert added.isdisjoint(ids)
        assert tokenizer.decode(ids) == neutralise(text), "nothing else may change"


@given(text=hostile_texts)
@settings(max_examples=150, deadline=None)
def test_a_user_message_adds_no_special_token_to_the_conversation(text):
    for tokenizer in (*TOKENIZERS.values(), TRAINED):
        added = set(tokenizer._backend.get_added_tokens_decoder())

        def special(ids, added=added):
            return [id for id in ids if id in added]

        assert special(tokenizer.open_conversation("s", text)) == special(
            tokenizer.open_conversation("s", "u")
        )
        assert special(tokenizer.continue_conversation(text, True)) == special(
            tokenizer.continue_conversation("u", True)
        )


@given(text=hostile_texts)
def test_neutralised_text_holds_no_tag_and_stays_as_it_is(text):
    once = neutralise(text)
    assert not TAG_PATTERN.search(once)
    assert neutralise(once) == once


def test_tags_are_neutralised_in_any_spelling_and_other_brackets_stay():
    assert neutralise("a <answer>b</answer>") == "a ‹answer›b‹/answer›"
    assert neutralise("< / Answer ><SEARCH/>") == "‹ / Answer ›‹SEARCH/›"
    assert neutralise("1 < 2 <b>bold</b> <answers>") == "1 < 2 <b>bold</b> <answers>"


def test_tags_are_tokens_in_the_model_s_words_and_text_in_the_system_prompt():
    ids = TRAINED.encode_model("<think>Rome</think>\n<search>a < b</search>")
    shown = [TRAINED.decode([id]) for id in ids]
    expected = ["<think>", "</think>", "<search>", "</search>"]
    assert [t for t in shown if t.startswith("<") and len(t) > 1] == expected
    trusted = TRAINED.encode_trusted("Reply as <answer>text</answer>.")
    assert TRAINED.decode(trusted) == "Reply as <answer>text</answer>."
    assert max(trusted) < TRAINED.encode_model("<think>")[0]


def test_the_model_s_words_cannot_hold_a_turn_token():
    assert TRAINED.end_of_turn_id not in TRAINED.encode_model("a<|im_end|>b")
    assert TRAINED.decode(TRAINED.encode_model("a<|im_end|>b")) == "a<|im_end|>b"


def test_a_family_s_own_think_token_is_used_for_the_model_s_words():
    (token,) = TOKENIZERS["qwen3"].encode_model("<think>")
    assert TOKENIZERS["qwen3"].decode([token]) == "<think>"
    assert len(TOKENIZERS["qwen2"].encode_model("<think>")) > 1


def test_training_is_deterministic_and_keeps_to_its_size():
    second = Tokenizer.train(iter(CORPUS), 400)
    assert second._backend.to_str() == TRAINED._backend.to_str()
    assert Tokenizer.train(iter(CORPUS), 300).vocab_size == 300
    with pytest.raises(UserError, match=r"vocab_tokens is 100, .* need 273"):
        Tokenizer.train(iter(CORPUS), 100)


def test_a_trained_tokenizer_comes_back_from_disk(tmp_path):
    TRAINED.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    for text in USERS:
        assert loaded.open_conversation(SYSTEM, text) == TRAINED.open_conversation(SYSTEM, text)
    assert loaded.encode_model("<answer>Rome</answer>") == TRAINED.encode_model(
        "<answer>Rome</answer>"
    )
    assert loaded.vocab_size == TRAINED.vocab_size
    assert loaded.stop_token_ids == TRAINED.stop_token_ids
    assert loaded.pad_token_id == TRAINED.pad_token_id
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer.load(tmp_path).stop_token_ids == (5, 6)


def test_every_word_is_one_token_where_all_fit():
    text = "Ada Hall, director [2] Tom Dean\nsystem"
    words = Tokenizer.train([text], 400)
    pieces = [words.decode([id]) for id in words.encode_plain(text)]
    assert pieces == ["Ada", " Hall", ",", " director", " [2]", " Tom", " Dean", "\n", "system"]
    assert words.vocab_size == 273 + len(set(pieces) - {",", "\n"})
    assert [words.decode([id]) for id in words.encode_plain(" Tim")] == [" ", "T", "i", "m"]
    assert len(Tokenizer.train([text], 275).encode_plain(text)) > len(pieces)


def test_years_in_the_training_text_become_few_tokens():
    assert len(TRAINED.encode_plain(" 1987")) <= 2


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", [*FAMILIES, "trained"])
@given(text=st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_the_bytes_of_tokens_are_those_of_their_text(kind, text):
    """Characters may be spread over several tokens. Stop strings are looked for in these bytes."""
    tokenizer = Tokenizer(WRAPPED[kind]) if kind in FAMILIES else _trained()
    ids = tokenizer.encode_trusted(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    end = tokenizer.end_of_turn_id
    assert tokenizer.token_bytes(end) == tokenizer.decode([end]).encode()


def test_the_bytes_of_tokens_of_another_kind_of_vocabulary():
    """In SentencePiece a space is U+2581, and a byte outside the alphabet has a token of its own.

    Ids that no token has add nothing.
    """
    vocabulary = {"<unk>": 0, "\u2581Paris": 1, "s": 2, "<0x0A>": 3, "<0xC3>": 4, "<0xA9>": 5}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    ids = [1, 2, 3, 4, 5]
    assert (
        b"".join(map(tokenizer.token_bytes, ids))
        == " Pariss\n\u00e9".encode()
        == tokenizer.decode(ids).encode()
    )
    assert tokenizer.token_bytes(99) == b""


@functools.cache
def _trained() -> Tokenizer:
    return Tokenizer.train(iter(CORPUS), 400)
