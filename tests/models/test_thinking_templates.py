"""Chat templates that open, strip or empty thoughts, against `apply_chat_template`. Written by hand
after the lines of the published templates that decide about thoughts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.agents.dialogue import Dialogue
from mujica_jax.inference.requests import Completion
from mujica_jax.methods.evipath.teacher import as_completion
from mujica_jax.models.thoughts import outside_thoughts
from mujica_jax.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import CHATML_TOKENS, QWEN_SPLIT, _wrapped

# Qwen's: turns before the last question lose their thought, later ones (between calls of tools)
# keep it.
QWEN_TURNS = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content TRIM "
    "+ '<|im_end|>\\n' }}{%- endif %}{%- set ns = namespace(last=messages|length - 1, asked=false) "
    "%}{%- for message in messages[::-1] %}{%- if message.role == 'user' and not ns.asked %}{%- "
    "set ns.asked = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- "
    "endfor %}{%- if not ns.asked %}{{- raise_exception('No user query found in messages.') }}{%- "
    "endif %}{%- for message in messages %}{%- set content = message.content TRIM %}{%- if "
    "message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- elif "
    "message.role == 'assistant' %}{%- set thought = '' %}{%- if '</think>' in content %}{%- set "
    "thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- "
    "set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- "
    "'<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + "
    "'\\n</think>\\n\\n' }}{%- endif %}{{- content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
)
R1_TURNS = (
    "{% set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == "
    "'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ "
    "ns.system }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ "
    "'<\uff5cUser\uff5c>' + message['content'] }}{%- elif message['role'] == 'assistant' %}{% set "
    "content = message['content'] %}{% if '</think>' in content %}{% set content = "
    "content.split('</think>')[-1] %}{% endif %}{{ '<\uff5cAssistant\uff5c>' + content + "
    "'<\uff5cend\u2581of\u2581sentence\uff5c>' }}{%- endif %}{%- endfor -%}{% if "
    "add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"
)
R1_TOKENS = [
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
]
# How the generation prompt ends.
WRITES_EMPTY = "{{- '<think>\\n\\n</think>\\n\\n' }}"
OPENS = "{{- '<think>\\n' }}{%- endif %}"
EMPTY = WRITES_EMPTY + "{%- endif %}"
LEAVES = (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    + WRITES_EMPTY
    + "{%- endif %}{%- endif %}"
)
TAGS = ["<think>", "</think>"]


def qwen(ending: str, *, trims: bool = False):
    template = (QWEN_TURNS + ending).replace(" TRIM", "|trim" if trims else "")
    return _wrapped(template, CHATML_TOKENS, TAGS, QWEN_SPLIT, None, "<|im_end|>", False)


def r1(tags=tuple(TAGS)):
    return _wrapped(R1_TURNS, R1_TOKENS, list(tags), QWEN_SPLIT, R1_TOKENS[0], R1_TOKENS[1], False)


# name: the tokenizer as transformers has it, and what its generation prompt opens
WRAPPED = {
    "qwen3 thinking": (qwen(OPENS), "<think>\n"),
    "qwen3 hybrid": (qwen(LEAVES), ""),
    "qwen3.5": (qwen(OPENS, trims=True), "<think>\n"),
    "qwen3.5 that does not think": (qwen(EMPTY, trims=True), ""),
    "r1 distil": (r1(), "<think>\n"),
    "r1 distil without tokens for its tags": (r1(()), "<think>\n"),
}
TOKENIZERS = {name: Tokenizer(wrapped) for name, (wrapped, _) in WRAPPED.items()}
every_template = pytest.mark.parametrize("name", WRAPPED)

SYSTEM = "You are a planner."
USER = "Who directed it in 1987?"
NEXT = "Obs: Ann Lee did."
REPLY = "<answer> Ann Lee </answer>"


def rendered(name: str, *messages: tuple[str, str]) -> str:
    dictionaries = [{"role": role, "content": content} for role, content in messages]
    return WRAPPED[name][0].apply_chat_template(
        dictionaries, add_generation_prompt=True, tokenize=False
    )


def ids_of(name: str, text: str) -> list[int]:
    return WRAPPED[name][0](text, add_special_tokens=False).input_ids


@every_template
def test_an_opening_is_what_the_chat_template_gives(name):
    opening = TOKENIZERS[name].open_conversation(SYSTEM, USER)
    text = rendered(name, ("system", SYSTEM), ("user", USER))
    assert TOKENIZERS[name].decode(opening) == text
    assert opening == ids_of(name, text)


@every_template
def test_the_tokenizer_knows_whether_a_thought_is_open(name):
    assert TOKENIZERS[name].opened_thought == WRAPPED[name][1]


@every_template
@pytest.mark.parametrize("stopped", [True, False])
def test_a_conversation_grows_by_appending_and_keeps_its_thoughts(name, stopped):
    """The template writes the first turn without its thought once a question follows.

    Here that turn stays as it was sampled, after the prompt that it was sampled from. All else is
    as the template has it.
    """
    tokenizer = TOKENIZERS[name]
    turn = "I know. </think>\n\n" + REPLY if WRAPPED[name][1] else REPLY
    ids = tokenizer.open_conversation(SYSTEM, USER) + tokenizer.encode_model(turn)
    ids += [tokenizer.end_of_turn_id] if stopped else []
    ids += tokenizer.continue_conversation(NEXT, stopped=stopped)
    opening = rendered(name, ("system", SYSTEM), ("user", USER))
    whole = rendered(name, ("system", SYSTEM), ("user", USER), ("assistant", REPLY), ("user", NEXT))
    after_turn = whole.partition(REPLY)[2]
    assert tokenizer.decode(ids) == opening + turn + after_turn
    before, after = whole.split(REPLY)
    assert opening.startswith(before), "but for the thought that the prompt opens"
    assert after.endswith(opening.partition(USER)[2]), "the second turn begins as the first one"


@every_template
def test_the_messages_of_a_conversation_are_rendered_by_its_template(name):
    tokenizer = TOKENIZERS[name]
    thought = "I know. </think>" if WRAPPED[name][1] else ""
    ids = tokenizer.open_conversation(SYSTEM, USER) + tokenizer.encode_model(thought + REPLY)
    messages = tokenizer.messages(ids + tokenizer.continue_conversation(NEXT, stopped=False))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == WRAPPED[name][1] + thought + REPLY
    pairs = [(message["role"], message["content"]) for message in messages]
    whole = rendered(name, ("system", SYSTEM), ("user", USER), ("assistant", REPLY), ("user", NEXT))
    assert rendered(name, *pairs) == whole, "the template itself takes the thought out"


@every_template
def test_a_whole_turn_goes_on_inside_of_the_opened_thought(name):
    tokenizer = TOKENIZERS[name]
    opened = WRAPPED[name][1]
    expected = " I know. </think>\n" if opened else "<think> I know. </think>\n"
    assert (
        tokenizer.decode(tokenizer.encode_turn("<think> I know. </think>\n" + REPLY))
        == expected + REPLY
    )
    assert (
        tokenizer.decode(tokenizer.encode_turn(REPLY)) == ("</think>\n\n" if opened else "") + REPLY
    )


words = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "Obs:", " a", "é", "\n"])


@given(texts=st.lists(st.lists(words, max_size=8).map("".join), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_ids_are_only_appended_whatever_a_thinking_model_writes(texts):
    """A turn's text holds its tokens and, before them, the thought that the prompt opened."""
    for name, tokenizer in TOKENIZERS.items():
        spoken = Dialogue(tokenizer, "planner", SYSTEM)
        mask = []
        for place, text in enumerate(texts):
            before = list(spoken.token_ids)
            spoken.add_user(f"{USER} {place}")
            assert spoken.token_ids[: len(before)] == before
            mask += [False] * (len(spoken.token_ids) - len(before))
            assert spoken.thought_open == bool(WRAPPED[name][1])
            ids = (*tokenizer.encode_model(text), tokenizer.end_of_turn_id)
            sampled = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop")
            assert spoken.add_model(sampled) == WRAPPED[name][1] + text
            mask += [True] * len(ids)
        record = spoken.record()
        assert record.token_ids == spoken.token_ids
        assert record.loss_mask == mask
        assert [turn.text for turn in record.turns if turn.role == "model"] == texts, (
            "records hold what was sampled"
        )


@every_template
def test_an_observation_of_its_own_is_left_out_where_it_stands_outside_of_the_thought(name):
    tokenizer = TOKENIZERS[name]
    spoken = Dialogue(tokenizer, "planner", SYSTEM)
    spoken.add_user(USER)
    thought = (
        "Obs: comes next. </think>" if WRAPPED[name][1] else "<think> Obs: comes next. </think>"
    )
    ids = tuple(tokenizer.encode_model(f"{thought} <search> a </search>\nObs:"))
    sampled = Completion(
        token_ids=ids, logprobs=None, finish_reason="stop_string", stop_string="Obs:"
    )
    text = spoken.add_model(sampled, cut_at="Obs:")
    assert outside_thoughts(text).strip() == "<search> a </search>"
    shown_ids = spoken.record().turns[-1].token_ids
    assert shown_ids == ids[: len(shown_ids)]
    assert tokenizer.decode(shown_ids).startswith(thought)


@every_template
def test_a_demonstration_is_a_turn_that_the_model_could_have_written(name):
    tokenizer = TOKENIZERS[name]
    spoken = Dialogue(tokenizer, "planner", SYSTEM)
    spoken.add_user(USER)
    text = spoken.add_model(as_completion(tokenizer, "<think> I know. </think>\n" + REPLY))
    assert outside_thoughts(text).strip() == REPLY
    assert tokenizer.decode(spoken.token_ids).count("<think>") == 1 + name.count("does not think")


@every_template
def test_the_rest_of_a_turn_goes_on_where_its_beginning_ended(name):
    """A turn is written in parts.

    The thought that is open after the first part is open in the second one.
    """
    tokenizer = TOKENIZERS[name]

    def part(text: str) -> Completion:
        return Completion(
            token_ids=tuple(tokenizer.encode_model(text)),
            logprobs=None,
            finish_reason="stop_string",
        )

    spoken = Dialogue(tokenizer, "decex", SYSTEM)
    spoken.add_user(USER)
    opened = WRAPPED[name][1]
    assert spoken.add_model(part("" if opened else "<think>")) == (opened or "<think>")
    assert spoken.thought_open
    assert spoken.add_model(part(" I know. ")) == " I know. "
    assert spoken.thought_open
    assert spoken.add_model(part("</think> ")) == "</think> "
    assert not spoken.thought_open
    spoken.add_user(NEXT)
    assert spoken.thought_open == bool(opened)
