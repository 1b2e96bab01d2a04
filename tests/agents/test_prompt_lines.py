"""A line break in a prompt separates sentences, list items or fields.

No sentence spans two lines.
"""

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Iterator

import pytest

from mujica_jax.agents import synthesis_prompts
from mujica_jax.agents.agent import Agent
from mujica_jax.agents.decex import AFTER_THOUGHT, DecexState, Step
from mujica_jax.agents.dialogue import Opening
from mujica_jax.agents.mujica import contract_of
from mujica_jax.config.agents import MujicaConfig, PromptedAgent
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import AgentConfig
from mujica_jax.inference.requests import Completion, SamplingParams
from mujica_jax.methods.decex.writer import TreeWriter
from mujica_jax.records import Question
from mujica_jax.runs.judge import INSTRUCTION, INSTRUCTION_WITH_QUESTION
from mujica_jax.tasks.task import Material
from tests.helpers.little_agent import FILM, completion, tokenizer

MODES = ("brief", "zero_shot", "few_shot")
KINDS = ("graph", "text")
ROOM = {"max_turn_tokens": 2000, "max_trajectory_tokens": 50_000, "max_observation_tokens": 9000}
ROLES = {"mujica": ("planner", "worker"), "search_o1": ("answers", "reader")}
STYLES = {"single": ("reflect", "search_r1")}
QUESTION = Question(id="q-1", text="Where was the director of Amber Tide born?", answers=("Ghent",))

# Lines of rules that are no sentences: they show the format of a turn.
FORMAT_LINES = {
    "Thought: what is known and what is missing",
    "Action: Search[a query], or Finish[the final answer, as short as possible]",
}
# Begins a worked example inside a system prompt. Its lines are fields.
EXAMPLE = "\n\nExample:\n\n"
# A line does not end a sentence, and the next one goes on with a small letter.
BROKEN_SENTENCE = re.compile(r"[^.:?!\s][ \t]*\n[ \t]*[a-z].*")


def configurations() -> Iterator[AgentConfig]:
    """Return every configuration of an agent that changes a prompt."""
    for section in AgentConfig.__args__:
        if section is MujicaConfig:
            choices = itertools.product(MODES, ("mujica", "evipath"), (True, False), (True, False))
            for mode, protocol, parallel, split in choices:
                # EviPath's executor cannot be left out.
                if protocol == "evipath" and not split:
                    continue
                yield MujicaConfig(
                    prompt=mode,
                    protocol=protocol,
                    parallel=parallel,
                    split=split,
                    max_iterations=4,
                    max_searches_per_turn=4,
                    **ROOM,
                )
        elif issubclass(section, PromptedAgent):
            for mode in MODES:
                plain = section(prompt=mode, **ROOM)
                styles = STYLES.get(plain.kind)
                if styles is None:
                    yield plain
                else:
                    yield from (dataclasses.replace(plain, style=style) for style in styles)
        else:
            yield section(**ROOM)


def openings_of_agents() -> Iterator[tuple[str, Opening]]:
    for config in configurations():
        agent: Agent = implementation(config)(tokenizer(), config)
        for role in ROLES.get(config.kind, (config.kind,)):
            for kind in config.environments:
                yield f"{role} over {kind} of {config}", agent.opening(role, kind)


class Recorder:
    """A policy that records the messages it is asked with and writes nothing of use."""

    version = 0

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        self.messages += tokenizer().messages(prompt)
        return completion("none")


def messages_of_the_tree_writer() -> list[dict[str, str]]:
    """Return what the second model of DecEx-RAG reads, for every kind of execution."""
    recorder = Recorder()
    writer = TreeWriter(recorder, tokenizer(), tokenizer(), version=0)
    steps = (
        Step(question="Who made it?", recalled="Ilse Vand made it.", thought="I need her."),
        Step(question="Where was she born?", query="Ilse Vand", materials=(Material(text="a"),)),
    )
    params = SamplingParams(max_new_tokens=50, temperature=0.0, seed=0)
    states = [
        DecexState(question=QUESTION, steps=(), asked=None, is_piece=True),
        DecexState(question=QUESTION, steps=steps, asked=None, is_piece=True),
        DecexState(question=QUESTION, steps=steps, asked="Where?", is_piece=False),
        *(
            DecexState(question=QUESTION, steps=steps, asked=None, is_piece=True, begins=begins)
            for begins in AFTER_THOUGHT.values()
        ),
    ]
    for state in states:
        asyncio.run(writer.generate([], params, state=state, continues=False))
    return recorder.messages


def rules() -> dict[str, str]:
    """Return every system prompt that a model reads, by a name for the message of a failure."""
    texts = {name: opening.system for name, opening in openings_of_agents()}
    for number, message in enumerate(messages_of_the_tree_writer()):
        if message["role"] == "system":
            texts[f"tree writer {number}"] = message["content"]
    texts["plan of a teacher"] = synthesis_prompts.PLAN_RULES
    for mode in MODES:
        texts[f"planner's teacher, {mode}"] = synthesis_prompts.planner_addition(mode).strip()
        texts[f"worker's teacher, {mode}"] = synthesis_prompts.worker_addition(mode).strip()
        texts[f"answer of a teacher, {mode}"] = synthesis_prompts.answer_rules(mode, "answer")
    texts["judge"] = INSTRUCTION
    texts["judge with question"] = INSTRUCTION_WITH_QUESTION
    return texts


def messages() -> dict[str, str]:
    """Return the other texts that a model reads: worked examples, and messages of all writers."""
    texts: dict[str, str] = {}
    for name, opening in openings_of_agents():
        for number, (message, reply) in enumerate(opening.examples):
            texts[f"example {number} of {name}: message"] = message
            texts[f"example {number} of {name}: reply"] = reply
    for number, message in enumerate(messages_of_the_tree_writer()):
        texts[f"tree writer {number}"] = message["content"]

    triples = ["Amber Tide, director, Ilse Vand", "Ilse Vand, place of birth, Ghent"]
    plan = ["Who made it?", "Where was she born?"]
    texts["request for a plan"] = synthesis_prompts.plan_request(QUESTION.text, "Ghent", triples)
    texts["planner's hint"] = synthesis_prompts.planner_hint("Ghent", triples, plan)
    texts["request for an answer"] = synthesis_prompts.answer_request("Who made it?", triples)
    texts["plan in a thought"] = synthesis_prompts.plan_in_thought(plan)
    golden = [(0, triples[0])]
    for mode in MODES:
        texts[f"worker's hint, {mode}"] = synthesis_prompts.worker_hint("Vand", golden, mode)

    sentences = ["Amber Tide is by Ilse Vand.", "Nothing was found."]
    for config, kind in itertools.product(configurations(), KINDS):
        if isinstance(config, MujicaConfig):
            contract = contract_of(config)
            texts[f"observation of {config} over {kind}"] = contract.planner_observation(
                sentences, [[FILM], []], first=1, kind=kind
            )
    return texts


def breaks(text: str) -> list[str]:
    """Return where a sentence spans two lines: the end of a line with the next line."""
    return BROKEN_SENTENCE.findall(text)


@pytest.mark.parametrize(
    "text",
    [
        "Queries that do not depend on each other go\ninto the same turn.",
        "First think about what is known, \n  which entity to ask about.",
        "Write the query inside <search> ... </search>\nand wait.",
    ],
)
def test_a_broken_sentence_is_seen(text):
    assert len(breaks(text)) == 1


def test_lists_fields_and_paragraphs_are_no_broken_sentences():
    text = "You need to:\n1. Plan the steps\n2. Solve them.\n\nThought: what is known\nAction: act"
    assert breaks(text) == []


def test_no_text_that_a_model_reads_breaks_a_sentence_over_two_lines():
    texts = {**rules(), **messages()}
    broken = {name: breaks(text) for name, text in texts.items() if breaks(text)}
    assert not broken


def test_every_line_of_every_rule_is_made_of_whole_sentences():
    for name, text in rules().items():
        sentences, _, example = text.partition(EXAMPLE)
        assert bool(example) == ("Example" in text), name
        for line in sentences.split("\n"):
            begins_whole = re.match(r"[A-Z]|[1-9]\. [A-Z]", line)
            is_whole = begins_whole and line.endswith((".", ":")) and "  " not in line
            assert is_whole or line in FORMAT_LINES, f"{name}: {line!r}"


def test_every_agent_and_every_mode_is_rendered():
    agents = {config.kind for config in configurations()}
    assert agents == {section.kind for section in AgentConfig.__args__}
    openings = list(openings_of_agents())
    # Of Mujica 3 modes x 2 roles x 2 kinds x (4 ablations and 2 of EviPath), of single 3 modes x 2
    # styles, of DecEx-RAG 3 modes. Direct and chain of thought play over both kinds, Search-o1 has
    # two roles, and 6 baselines have one prompt.
    assert len(openings) == 72 + 6 + 3 + 4 + 2 + 6
    assert len({name for name, _ in openings}) == len(openings)
    prompts_of_the_tree_writer = [name for name in rules() if name.startswith("tree writer")]
    assert len(prompts_of_the_tree_writer) == 5
