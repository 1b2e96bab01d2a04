"""Token ids of a conversation are appended once and never made again.

The mask covers what the model wrote.
"""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.agents.dialogue import Dialogue, Opening, with_opening
from mujica_jax.inference.requests import Completion
from mujica_jax.records import Conversation
from tests.helpers.little_agent import completion, tokenizer

END = tokenizer().end_of_turn_id


def dialogue(system: str = "Plan.") -> Dialogue:
    return Dialogue(tokenizer(), "planner", system)


def asked() -> Dialogue:
    spoken = dialogue()
    spoken.add_user("Question: Who?")
    return spoken


def test_a_conversation_reads_as_its_chat_template():
    spoken = asked()
    sampled_ids = "<think> hm </think> <answer> Ann </answer>"
    assert spoken.add_model(completion(sampled_ids)) == sampled_ids
    spoken.add_user("Obs: no.")
    spoken.add_model(completion("Bob"))
    assert tokenizer().decode(spoken.token_ids) == (
        "<|im_start|>system\n"
        "Plan.<|im_end|>\n"
        "<|im_start|>user\n"
        "Question: Who?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "<think> hm </think> <answer> Ann </answer><|im_end|>\n"
        "<|im_start|>user\n"
        "Obs: no.<|im_end|>\n"
        "<|im_start|>assistant\n"
        "Bob<|im_end|>"
    )


sampled_ids = st.lists(st.integers(0, tokenizer().vocab_size - 1), max_size=8)


@given(
    turns=st.lists(
        st.tuples(st.text(max_size=10), sampled_ids, st.booleans()), min_size=1, max_size=4
    )
)
@settings(max_examples=60, deadline=None)
def test_ids_are_only_appended_and_the_mask_covers_what_the_model_finished(turns):
    """This holds for all ids that a model samples, including those to which their text would not be
    encoded.
    """
    spoken = dialogue()
    mask = []
    for heard, ids, finished in turns:
        before = list(spoken.token_ids)
        spoken.add_user(heard)
        assert spoken.token_ids[: len(before)] == before
        mask += [False] * (len(spoken.token_ids) - len(before))
        before = list(spoken.token_ids)
        ids = (*ids, END) if finished else (*ids, 5)
        reason = "stop" if finished else "length"
        spoken.add_model(
            Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=reason)
        )
        assert spoken.token_ids == [*before, *ids]
        mask += [finished] * len(ids)
    record = spoken.record()
    assert record.token_ids == spoken.token_ids
    assert record.loss_mask == mask
    assert [turn.role for turn in record.turns] == ["context", "model"] * len(turns)


def test_the_stop_token_is_trained_and_no_part_of_the_text():
    spoken = asked()
    assert spoken.add_model(completion("Ann")) == "Ann"
    turn = spoken.record().turns[-1]
    assert turn.trained
    assert turn.token_ids[-1] == END
    assert turn.text == "Ann"


def replied(reply: Completion) -> Conversation:
    """Return the conversation of a question, this reply and the next message."""
    spoken = asked()
    spoken.add_model(reply)
    spoken.add_user("Obs: go on.")
    return spoken.record()


def test_a_turn_that_was_cut_off_is_not_trained_and_is_closed_before_the_next_one():
    cut = replied(completion("Ann", most_tokens=2))
    whole = replied(completion("Ann"))
    _, second, third = cut.turns
    assert not second.trained
    assert second.cut
    assert END not in second.token_ids
    assert third.token_ids[0] == END
    assert third.token_ids[1:] == whole.turns[2].token_ids
    assert not any(cut.loss_mask)


def test_a_turn_that_was_cut_off_can_be_trained():
    cut = replied(completion("Ann", most_tokens=2))
    learnt = cut.with_cut_turns_trained()
    assert learnt.loss_mask == [
        turn is learnt.turns[1] for turn in learnt.turns for _ in turn.token_ids
    ]
    assert learnt.token_ids == cut.token_ids
    assert learnt.turns[1].logprobs == cut.turns[1].logprobs
    whole = replied(completion("Ann"))
    assert whole.with_cut_turns_trained() == whole


def ended_by(stop_string: str, text: str) -> Completion:
    return dataclasses.replace(
        completion(text, most_tokens=len(tokenizer().encode_model(text))),
        finish_reason="stop_string",
        stop_string=stop_string,
    )


def test_a_turn_that_its_closing_tag_ended_is_trained_whole_and_closed_before_the_next_one():
    by_tag = asked()
    by_token = asked()
    for spoken, reply in (
        (by_tag, ended_by("</action>", "a </action>")),
        (by_token, completion("a </action>")),
    ):
        assert spoken.add_model(reply, cut_at="Obs:") == "a </action>"
        spoken.add_user("Obs: go on.")
    assert by_tag.token_ids == by_token.token_ids
    turns = by_tag.record().turns
    assert turns[1].trained
    assert END not in turns[1].token_ids
    assert turns[2].token_ids[0] == END, "the template's, and not trained"


def test_what_a_model_tells_itself_is_left_out():
    spoken = asked()
    sampled = ended_by("Obs:", "<search> a </search>\nObs:")
    assert spoken.add_model(sampled, cut_at="Obs:") == "<search> a </search>\n"
    turn = spoken.record().turns[-1]
    assert turn.trained
    assert turn.token_ids == sampled.token_ids[: len(turn.token_ids)]
    assert turn.logprobs == sampled.logprobs[: len(turn.token_ids)]


def test_what_a_thought_says_of_the_stop_string_is_kept():
    for thought in ("<think> Obs: comes next. </think>", "Obs: comes next. </think>"):
        spoken = asked()
        text = f"{thought} <search> a </search>\n"
        assert spoken.add_model(ended_by("Obs:", f"{text}Obs:"), cut_at="Obs:") == text


def test_a_turn_that_is_left_out_wholly_is_not_trained():
    spoken = asked()
    assert spoken.add_model(ended_by("Obs:", "Obs:"), cut_at="Obs:") == ""
    assert not any(spoken.record().loss_mask)


def test_log_probabilities_stay_with_their_tokens():
    spoken = asked()
    sampled = completion("Ann and Bob")
    spoken.add_model(sampled)
    context, model = spoken.record().turns
    assert context.logprobs is None
    assert (model.token_ids, model.logprobs) == (sampled.token_ids, sampled.logprobs)


def test_a_script_has_no_log_probabilities():
    spoken = asked()
    spoken.add_model(dataclasses.replace(completion("Ann"), logprobs=()))
    assert spoken.record().turns[-1].logprobs is None


def test_another_opening_changes_the_first_turn_alone():
    def conversation(opening: Opening):
        spoken = Dialogue(tokenizer(), "planner", opening.system, opening.examples)
        spoken.add_user("Question: Who <answer>is</answer>?")
        spoken.add_model(completion("<think> hm </think>"))
        spoken.add_user("Obs: no.")
        spoken.add_model(completion("Bob", most_tokens=1))
        return spoken.record()

    shown = (
        ("Question: Where?", "<answer> Rome </answer>"),
        ("Question: When?", "<answer> 1961 </answer>"),
    )
    long = Opening(system="Plan it all.", examples=shown)
    short = Opening(system="Plan.")
    changed = with_opening(conversation(long), tokenizer(), short)
    expected = conversation(short)
    assert changed.role == "planner"
    assert (changed.token_ids, changed.loss_mask) == (expected.token_ids, expected.loss_mask)
    assert [turn.text for turn in changed.turns] == [turn.text for turn in expected.turns]
    assert all(turn.logprobs is None for turn in changed.turns), (
        "they belonged to the longer prompt"
    )


def test_worked_examples_are_chat_turns_before_the_question_and_carry_no_loss():
    examples = (
        ("Question: Where?", "<search> a </search>"),
        ("Obs: Rome.", "<answer> Rome </answer>"),
    )
    spoken = Dialogue(tokenizer(), "planner", "Plan.", examples)
    spoken.add_user("Question: Who?")
    assert tokenizer().decode(spoken.token_ids) == (
        "<|im_start|>system\n"
        "Plan.<|im_end|>\n"
        "<|im_start|>user\n"
        "Question: Where?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "<search> a </search><|im_end|>\n"
        "<|im_start|>user\n"
        "Obs: Rome.<|im_end|>\n"
        "<|im_start|>assistant\n"
        "<answer> Rome </answer><|im_end|>\n"
        "<|im_start|>user\n"
        "Question: Who?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    spoken.add_model(completion("Ann"))
    context, model = spoken.record().turns
    assert context.role == "context"
    assert context.text == "Question: Who?"
    assert context.trained is False
    assert model.role == "model"
    assert model.text == "Ann"
    assert model.trained is True
    forked = Dialogue(tokenizer(), "planner", "Plan.", examples).fork()
    forked.add_user("Question: Who?")
    assert forked.token_ids == list(context.token_ids)
