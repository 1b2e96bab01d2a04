"""The prompts of all agents: their rules, and their worked examples as chat turns."""

import asyncio
import dataclasses

import pytest

from mujica_jax.agents import decex, protocol, single
from mujica_jax.agents.decex import Decex
from mujica_jax.agents.dialogue import Opening, with_opening
from mujica_jax.agents.mujica import Mujica, WorkerState
from mujica_jax.agents.single import Single
from mujica_jax.config.agents import DecexConfig, SingleConfig
from mujica_jax.inference.requests import Completion
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.records import Entity, Question, StopReason, Trajectory
from mujica_jax.tasks.task import Material
from tests.helpers.little_agent import CONFIG, LittleWorld, attempt
from tests.models.test_tokenizer import (
    LLAMA3_TOKENS,
    NO_SYSTEM_TEMPLATE,
    QWEN_SPLIT,
    WRAPPED,
    _wrapped,
)

KINDS = ("graph", "text")
PLANNERS = [(kind, split) for kind in KINDS for split in (True, False)]
# As SmolLM2's: a system prompt of its own where the conversation has none.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM.<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)
THINKING_TEMPLATE = (  # opens the thought of every turn of the model
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n"
    "' }}{% if message['role'] == 'assistant' %}{{ '<think>' }}{% endif %}{{ message['content'] + "
    "'<|im_end|>\n"
    "' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "<think>' }}{% endif %}"
)
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA_TOKENS = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
CHECKPOINTS = {
    "qwen2": WRAPPED["qwen2"],
    "llama3": WRAPPED["llama3"],
    "smollm2": _wrapped(SMOLLM2_TEMPLATE, CHATML_TOKENS, [], QWEN_SPLIT, None, "<|im_end|>", False),
    "no system role": _wrapped(
        NO_SYSTEM_TEMPLATE, GEMMA_TOKENS, [], QWEN_SPLIT, "<bos>", "<end_of_turn>", False
    ),
}
every_template = pytest.mark.parametrize("name", CHECKPOINTS)
ROOM = {"max_turn_tokens": 2000, "max_trajectory_tokens": 50_000, "max_observation_tokens": 9000}

FILM = Entity(id="Amber Tide", label="Amber Tide")
OTHER_FILM = Entity(id="The Tin Orchard", label="The Tin Orchard")
DIRECTOR = Entity(id="Ilse Vandermark", label="Ilse Vandermark")
OTHER_DIRECTOR = Entity(id="Anton Hale", label="Anton Hale")
CITY = Entity(id="Ghent", label="Ghent")
GRAPH = {
    "Amber Tide": (
        Material(text="Amber Tide, publication date, 1961", entities=(FILM,)),
        Material(text="Amber Tide, director, Ilse Vandermark", entities=(FILM, DIRECTOR)),
    ),
    "The Tin Orchard": (
        Material(text="The Tin Orchard, publication date, 1948", entities=(OTHER_FILM,)),
        Material(
            text="The Tin Orchard, director, Anton Hale", entities=(OTHER_FILM, OTHER_DIRECTOR)
        ),
    ),
    "Ilse Vandermark": (
        Material(text="Ilse Vandermark, place of birth, Ghent", entities=(DIRECTOR, CITY)),
        Material(text="Amber Tide, director, Ilse Vandermark", entities=(FILM, DIRECTOR)),
    ),
}
FILM_PASSAGE = Material(text="Amber Tide: Amber Tide is a 1961 film directed by Ilse Vandermark.")
OTHER_FILM_PASSAGE = Material(
    text="The Tin Orchard: The Tin Orchard is a comedy film of 1948 by Anton Hale."
)
DIRECTOR_PASSAGE = Material(
    text="Ilse Vandermark: Ilse Vandermark (born 3 May 1920 in Ghent) was a film director."
)
PASSAGES = {
    "When was the film Amber Tide released?": (FILM_PASSAGE, OTHER_FILM_PASSAGE),
    "When was the film The Tin Orchard released?": (OTHER_FILM_PASSAGE,),
    "Who directed the film Amber Tide?": (FILM_PASSAGE,),
    "Where was Ilse Vandermark born?": (FILM_PASSAGE, DIRECTOR_PASSAGE),
    "Amber Tide film director": (FILM_PASSAGE,),
    "Ilse Vandermark place of birth": (DIRECTOR_PASSAGE,),
    "Amber Tide 1961 film director": (FILM_PASSAGE,),
}
# What the workers of the planner's examples say.
SENTENCES = {
    "When did Amber Tide come out?": ("[0]", "Amber Tide came out in 1961."),
    "When did The Tin Orchard come out?": ("[0]", "The Tin Orchard came out in 1948."),
    "Who is the director of Amber Tide?": ("[1]", "The director of Amber Tide is Ilse Vandermark."),
    "When was the film Amber Tide released?": ("[0]", "Amber Tide was released in 1961."),
    "When was the film The Tin Orchard released?": ("[0]", "The Tin Orchard was released in 1948."),
    "Who directed the film Amber Tide?": (
        "[0]",
        "The film Amber Tide was directed by Ilse Vandermark.",
    ),
    "Where was Ilse Vandermark born?": ("[0]", "Ilse Vandermark was born in Ghent."),
}


class Repeats:
    """A policy that writes these turns in their order, and a worker's turn by its query."""

    version = 0

    def __init__(self, tokenizer: Tokenizer, turns) -> None:
        self._tokenizer = tokenizer
        self._turns = list(turns)

    async def generate(self, prompt, params, *, state, continues) -> Completion:
        if isinstance(state, WorkerState):
            select, sentence = SENTENCES[state.query]
            text = (
                "<think> see </think>\n"
                f"<select> {select} </select>\n"
                f"<sentence> {sentence} </sentence>"
            )
        else:
            text = self._turns.pop(0)
        ids = (*self._tokenizer.encode_model(text), self._tokenizer.end_of_turn_id)
        return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop")


def asked_in(message: str) -> str:
    return message.split("\n")[0].removeprefix("Question: ")


def split_examples(opening: Opening) -> list[list[tuple[str, str]]]:
    """Split the messages of an opening into its examples. Each example begins with a question."""
    examples: list[list[tuple[str, str]]] = []
    for message, reply in opening.examples:
        if message.startswith("Question: "):
            examples.append([])
        examples[-1].append((message, reply))
    return examples


def play_example(agent, tokenizer: Tokenizer, kind: str, example) -> Trajectory:
    """Play an episode in which the model replies as it does in the example."""
    candidates = [entity for entity in (FILM, OTHER_FILM) if f"] {entity.label}" in example[0][0]]
    question = Question(
        id="q", text=asked_in(example[0][0]), answers=("",), candidates=tuple(candidates)
    )
    world = LittleWorld(GRAPH if kind == "graph" else PASSAGES, kind=kind)
    policy = Repeats(tokenizer, [reply for _, reply in example])
    return asyncio.run(agent.run(attempt(question), world, policy))


def mujica(tokenizer: Tokenizer, **changes) -> Mujica:
    return Mujica(tokenizer, dataclasses.replace(CONFIG, max_iterations=5, **ROOM, **changes))


# --- rules ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["planner", "worker"])
def test_prompts_grow_from_brief_over_rules_to_examples(role, kind):
    brief = protocol.opening(role, kind, "brief")
    zero_shot = protocol.opening(role, kind, "zero_shot")
    few_shot = protocol.opening(role, kind, "few_shot")
    assert len(brief.system) < 40 < len(zero_shot.system)
    assert "<" not in brief.system
    assert "<think>" in zero_shot.system
    assert few_shot.system == zero_shot.system, (
        "examples are chat turns, and not part of the system prompt"
    )
    assert not brief.examples
    assert not zero_shot.examples
    assert len(few_shot.examples) >= 2


def test_a_worker_over_texts_answers_from_its_own_knowledge_where_no_passage_helps():
    worker = protocol.opening("worker", "text", "few_shot")
    assert "[-1] if none helps" in worker.system
    assert (
        "If no passage helps, try your best to answer the question from your own knowledge."
        in worker.system
    )
    assert protocol.NOTHING_FOUND not in worker.system + "".join(
        reply for _, reply in worker.examples
    )
    replies = [protocol.parse_worker(reply, materials=2) for _, reply in worker.examples]
    assert [(reply.selected, reply.sentence) for reply in replies] == [
        ((1,), "Ilse Vandermark was born in Ghent."),
        ((), "A leap year has 366 days."),
    ]


def test_a_worker_over_a_graph_uses_its_materials_alone():
    worker = protocol.opening("worker", "graph", "few_shot")
    assert f"If none answers, the sentence is: {protocol.NOTHING_FOUND}" in worker.system
    replies = [protocol.parse_worker(reply, materials=2) for _, reply in worker.examples]
    assert [reply.selected for reply in replies] == [(1,), ()]
    assert replies[1].sentence == protocol.NOTHING_FOUND


@pytest.mark.parametrize("kind", KINDS)
def test_the_ablation_without_workers_has_rules_and_examples_of_its_own(kind):
    own = protocol.opening("planner", kind, "few_shot", split=False)
    usual = protocol.opening("planner", kind, "few_shot")
    assert own.system != usual.system
    assert "numbered from [0]" in own.system
    assert "yourself" in own.system
    shown = [message for message, _ in own.examples if message.startswith(protocol.OBSERVATION)]
    assert len(shown) == 3
    assert all(message.startswith(f"{protocol.OBSERVATION} [0] ") for message in shown), (
        "numbered materials"
    )
    assert not any(sentence in message for message in shown for _, sentence in SENTENCES.values())
    assert [reply for _, reply in own.examples] == [reply for _, reply in usual.examples]


# --- worked examples are what an episode looks like ---


@pytest.mark.parametrize(("kind", "split"), PLANNERS)
def test_the_planner_s_examples_are_episodes_of_the_agent(kind, split):
    tokenizer = Tokenizer(CHECKPOINTS["qwen2"])
    agent = mujica(tokenizer, prompt="few_shot", split=split)
    examples = split_examples(agent.opening("planner", kind))
    assert [len(example) for example in examples] == [2, 3]
    for example, expected in zip(examples, ["The Tin Orchard", "Ghent"], strict=True):
        played = play_example(agent, tokenizer, kind, example)
        assert (played.answer, played.stop_reason) == (expected, StopReason.ANSWERED)
        shown = [turn.text for turn in played.conversations[0].turns if turn.role == "context"]
        assert shown == [message for message, _ in example]
        assert (len(played.conversations) == 1) != split, "workers take part only with the split"


def single_agent(tokenizer: Tokenizer, style: single.Style, prompt: protocol.PromptMode) -> Single:
    return Single(tokenizer, SingleConfig(prompt=prompt, style=style, **ROOM))


def decex_agent(tokenizer: Tokenizer, prompt: protocol.PromptMode) -> Decex:
    return Decex(tokenizer, DecexConfig(prompt=prompt, **ROOM))


@pytest.mark.parametrize("name", ["reflect", "search_r1", "decex"])
def test_the_examples_of_the_other_agents_are_episodes(name):
    tokenizer = Tokenizer(CHECKPOINTS["qwen2"])
    if name == "decex":
        agent = decex_agent(tokenizer, "few_shot")
    else:
        agent = single_agent(tokenizer, name, "few_shot")
    for example in split_examples(agent.opening(name, "text")):
        played = play_example(agent, tokenizer, "text", example)
        assert played.stop_reason is StopReason.ANSWERED
        shown = [turn.text for turn in played.conversations[0].turns if turn.role == "context"]
        assert shown == [message for message, _ in example]


# --- chat turns in the checkpoint's own template ---


def openings() -> list[tuple[str, Opening]]:
    named_openings = [("worker", protocol.opening("worker", kind, "few_shot")) for kind in KINDS]
    named_openings += [
        ("planner", protocol.opening("planner", kind, "few_shot", split=split))
        for kind, split in PLANNERS
    ]
    named_openings += [
        ("single", single.opening(style, "few_shot")) for style in ("reflect", "search_r1")
    ]
    return [*named_openings, ("decex", decex.opening("few_shot"))]


@every_template
def test_examples_are_rendered_as_the_checkpoint_s_template_renders_a_chat(name):
    tokenizer = Tokenizer(CHECKPOINTS[name])
    question = "Question: Who directed it?"
    for _, opening in openings():
        ids = tokenizer.open_conversation(opening.system, question, opening.examples)
        messages = tokenizer.messages(ids)
        pairs = [
            pair
            for message, reply in opening.examples
            for pair in (("user", message), ("assistant", reply))
        ]
        if name == "no system role":
            pairs[0] = ("user", f"{opening.system}\n\n{pairs[0][1]}")
        else:
            pairs.insert(0, ("system", opening.system))
        assert [(message["role"], message["content"]) for message in messages] == [
            *pairs,
            ("user", question),
        ]
        rendered = CHECKPOINTS[name].apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(ids) == rendered


def test_an_example_does_not_open_a_thought_that_the_template_has_opened():
    tags = ["<think>", "</think>"]
    tokenizer = Tokenizer(
        _wrapped(THINKING_TEMPLATE, CHATML_TOKENS, tags, QWEN_SPLIT, None, "<|im_end|>", False)
    )
    examples = (("Question: Where?", "<think> hm </think>\n<answer> Rome </answer>"),)
    text = tokenizer.decode(tokenizer.open_conversation("Plan.", "Question: Who?", examples))
    assert text == (
        "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\nQuestion: Where?<|im_end|>\n"
        "<|im_start|>assistant\n<think> hm </think>\n<answer> Rome </answer><|im_end|>\n"
        "<|im_start|>user\nQuestion: Who?<|im_end|>\n<|im_start|>assistant\n<think>"
    )


def played_in(
    prompt: protocol.PromptMode, tokenizer: Tokenizer
) -> list[tuple[object, Trajectory, str]]:
    """Play the examples of all agents under one prompt mode.

    Return agent, trajectory and kind of each.
    """
    episodes = []
    for kind, split in PLANNERS:
        agent = mujica(tokenizer, prompt=prompt, split=split)
        for example in split_examples(protocol.opening("planner", kind, "few_shot", split=split)):
            episodes.append((agent, play_example(agent, tokenizer, kind, example), kind))
    for style in ("reflect", "search_r1"):
        agent = single_agent(tokenizer, style, prompt)
        for example in split_examples(single.opening(style, "few_shot")):
            episodes.append((agent, play_example(agent, tokenizer, "text", example), "text"))
    agent = decex_agent(tokenizer, prompt)
    for example in split_examples(decex.opening("few_shot")):
        episodes.append((agent, play_example(agent, tokenizer, "text", example), "text"))
    return episodes


@every_template
def test_a_conversation_without_its_examples_is_the_one_played_zero_shot(name):
    tokenizer = Tokenizer(CHECKPOINTS[name])
    few_shot = played_in("few_shot", tokenizer)
    zero_shot = played_in("zero_shot", tokenizer)
    compared = 0
    for (_, shown, kind), (agent, plain, _) in zip(few_shot, zero_shot, strict=True):
        for conversation, expected in zip(shown.conversations, plain.conversations, strict=True):
            assert len(conversation.token_ids) > len(expected.token_ids)
            assert sum(conversation.loss_mask) == sum(expected.loss_mask), "no example is trained"
            stripped = with_opening(conversation, tokenizer, agent.opening(conversation.role, kind))
            assert stripped.token_ids == expected.token_ids
            assert stripped.loss_mask == expected.loss_mask
            assert [turn.text for turn in stripped.turns] == [turn.text for turn in expected.turns]
            compared += 1
    assert compared == 20  # 8 planners, 8 workers of the 4 with a split, 3 of single, 1 of decex


def test_examples_cannot_be_told_from_special_tokens():
    """No example holds a special token of a template."""
    special = [*CHATML_TOKENS, *GEMMA_TOKENS, *LLAMA3_TOKENS]
    for _, opening in openings():
        text = opening.system + "".join(message + reply for message, reply in opening.examples)
        assert not any(token in text for token in special)
