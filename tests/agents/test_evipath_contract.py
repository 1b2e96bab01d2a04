"""EviPath's tags and prompts as its tables 8 to 11 print them, and episodes of the shared agent
that keep to them.
"""

import asyncio
import dataclasses

import pytest

from mujica_jax.agents.contract import Contract
from mujica_jax.agents.evipath_contract import EviPathContract
from mujica_jax.agents.mujica import Mujica, PlannerState, contract_of
from mujica_jax.agents.protocol import NOTHING_FOUND, SearchCall
from mujica_jax.config.checks import check
from mujica_jax.config.files import load_config
from mujica_jax.demonstrations.policy import ScriptedPolicy
from mujica_jax.errors import UserError
from mujica_jax.records import Evidence, StopReason, Trajectory
from mujica_jax.tasks.task import EnvironmentKind, Material
from tests.helpers.little_agent import (
    CITY,
    CONFIG,
    DIRECTOR,
    FILM,
    GRAPH,
    QUESTION,
    LittleWorld,
    ToldPolicy,
    attempt,
    tokenizer,
)

EVIPATH = EviPathContract()
AGENT = dataclasses.replace(CONFIG, protocol="evipath")

# The assistants' turns of tables 8, 10 and 11, as they are printed.
TABLE_8 = """<think>
To solve this problem, I need to:
1. Find the director of film Ek Paheli.
2. Find the director of film When Father Was Away On Business.
</think>
<action>
Search([0], "Who is the director of Ek Paheli?")
Search([1], "Who is the director of When Father Was Away On Business?")
</action>"""
TABLE_10 = """<think>
Now that I have the owner of The Collegian, I need to figure out when Houston Baptist University was founded.
</think>
<action> Search("When was Houston Baptist University founded?") </action>"""
TABLE_10_LAST = """<think>
OK. Now I have all the necessary information to answer the question.
</think>
<answer> 1960 </answer>"""
TABLE_11 = """<think> The question asks me to determine when the magazine LaIsha was founded. [1] says the magazine \
LaIsha was founded in 1947. </think>
<select> [1] </select>
<answer> LaIsha was founded in 1947. </answer>"""


def queries(
    text: str, kind: EnvironmentKind = "text", limit: int = 4
) -> list[tuple[int | None, str]]:
    action = EVIPATH.parse_planner(text, kind, candidates=2, max_searches=limit)
    return [(call.candidate, call.query) for call in action.searches]


def test_the_turns_that_the_paper_prints_are_read():
    assert queries(TABLE_8, "graph") == [
        (0, "Who is the director of Ek Paheli?"),
        (1, "Who is the director of When Father Was Away On Business?"),
    ]
    assert queries(TABLE_10) == [(None, "When was Houston Baptist University founded?")]
    assert (
        EVIPATH.parse_planner(TABLE_10_LAST, "text", candidates=0, max_searches=4).answer == "1960"
    )
    reply = EVIPATH.parse_worker(TABLE_11, materials=9)
    assert reply.selected == (1,)
    assert reply.sentence == "LaIsha was founded in 1947."
    assert reply.well_formed is True


def test_the_bare_sentence_is_the_reply_where_no_evidence_matches():
    for text in (
        NOTHING_FOUND,
        f'"{NOTHING_FOUND}"',
        "No relevant information found",
        f"<think> a </think>\n{NOTHING_FOUND}",
    ):
        reply = EVIPATH.parse_worker(text, materials=3)

    assert reply.selected == ()
    assert reply.sentence == NOTHING_FOUND
    assert reply.well_formed is True
    assert reply.has_selection is False
    assert EVIPATH.write_worker("a thought", [], "") == NOTHING_FOUND
    assert not EVIPATH.parse_worker("No idea.", materials=3).well_formed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<action> Search ("Who?") </action>', ["Who?"]),
        ('<action>\nSearch("Who?")\nSearch("Where?")\n</action>', ["Who?", "Where?"]),
        ('<action> Search("Who sang "Eat It"?") </action>', ['Who sang "Eat It"?']),
        ("<action> Search(“Who?”) </action>", ["Who?"]),
        ('<action> Search("Who?") Search("Who?") </action>', ["Who?"]),
        ('Search("Who?")', []),
        ('<think> <action> Search("Who?") </action> </think>', []),
        ("<search> Who? </search>", []),
        ('<action> Search("") </action>', []),
    ],
    ids=[
        "a space",
        "two lines",
        "quotes inside",
        "curly quotes",
        "twice",
        "no tag",
        "in a thought",
        "mujica's",
        "empty",
    ],
)
def test_searches_over_text_are_calls_inside_an_action(text, expected):
    action = EVIPATH.parse_planner(text, "text", candidates=0, max_searches=4)
    assert [call.query for call in action.searches] == expected
    assert (action.refused is StopReason.NO_ACTION) == (not expected)


def test_too_many_searches_are_refused():
    text = '<action> Search("a b") Search("c d") Search("e f") </action>'
    action = EVIPATH.parse_planner(text, "text", candidates=0, max_searches=2)
    assert action.refused is StopReason.TOO_MANY_SEARCHES


def test_what_is_written_is_read_back():
    calls = [
        SearchCall(query="Who directed Amber Tide?", candidate=None),
        SearchCall(query="Where is it?", candidate=None),
    ]
    assert queries(EVIPATH.write_searches("t", calls, "text")) == [
        (None, call.query) for call in calls
    ]
    numbered = [SearchCall(query="Who?", candidate=1)]
    assert queries(EVIPATH.write_searches("t", numbered, "graph"), "graph") == [(1, "Who?")]
    reply = EVIPATH.parse_worker(EVIPATH.write_worker("t", [0, 2], "It is so."), materials=3)
    assert reply.selected == (0, 2)
    assert reply.sentence == "It is so."
    assert reply.well_formed is True


def test_observations_are_those_of_tables_8_and_10():
    sentences = [
        "The director of Ek Paheli is Naresh Kumar.",
        "Emir Kusturica was born on 24 November 1954.",
    ]
    assert EVIPATH.planner_observation(sentences, [[DIRECTOR], [CITY, FILM]], 2, "graph") == (
        "Observation:\nThe director of Ek Paheli is Naresh Kumar. Candidate: [2] Ilse Vand\n"
        "Emir Kusturica was born on 24 November 1954. Candidate: [3] Ghent [4] Amber Tide"
    )
    assert EVIPATH.planner_observation(["It is so."], [[]], 0, "text") == "Obs: It is so."
    assert EVIPATH.worker_opening("Who?", [("LaIsha: A magazine.",)], "text", "zero_shot") == (
        "Question: Who?\nSupporting evidences:\n[0] LaIsha: A magazine."
    )


@pytest.mark.parametrize("kind", ["graph", "text"])
@pytest.mark.parametrize("role", ["planner", "worker"])
def test_every_worked_example_is_read_by_the_parser(role, kind):
    """The agent accepts the assistant's turns of each example."""
    turns = [reply for _, reply in EVIPATH.opening(role, kind, "few_shot").examples]
    assert turns
    for turn in turns:
        if role == "planner":
            assert (
                EVIPATH.parse_planner(turn, kind, candidates=2, max_searches=4).refused is None
            ), turn
        else:
            assert EVIPATH.parse_worker(turn, materials=2).well_formed, turn


def test_the_planner_s_rules_have_the_clauses_of_table_10():
    planner = EVIPATH.opening("planner", "text", "zero_shot").system
    assert "<action>" in planner
    assert 'Search("question")' in planner
    assert "<search>" not in planner
    assert "pronouns" in planner
    assert "<answer> *** </answer>" in planner


def test_the_executor_s_rules_have_the_clauses_of_table_11():
    worker = EVIPATH.opening("worker", "text", "zero_shot").system
    assert f'respond with "{NOTHING_FOUND}" and nothing else' in worker
    assert "<sentence>" not in worker
    assert "select all of them" in worker


def test_without_parallel_the_planner_is_shown_one_search_a_turn():
    alone = EVIPATH.opening("planner", "text", "few_shot", parallel=False)
    assert "Write one search a turn" in alone.system
    assert alone.examples
    assert not any("The Tin Orchard" in message for pair in alone.examples for message in pair)


def test_a_configuration_chooses_the_contract():
    assert isinstance(contract_of(AGENT), EviPathContract)
    assert type(contract_of(CONFIG)) is Contract
    config = load_config("tiny_world_evipath")
    assert config.agent == dataclasses.replace(config.agent, protocol="evipath")
    with pytest.raises(UserError, match=r"agent.protocol evipath.* add --agent.protocol mujica"):
        check(dataclasses.replace(config, agent=dataclasses.replace(config.agent, split=False)))


def model_turns(trajectory: Trajectory) -> list[str]:
    return [turn.text for c in trajectory.conversations for turn in c.turns if turn.role == "model"]


def test_an_episode_over_text_is_played_with_these_tags():
    plans = [
        '<think> a </think>\n<action> Search("Who made Amber Tide?") </action>',
        '<think> b </think>\n<action> Search("Where was Ilse Vand born?") </action>',
        "<think> c </think>\n<answer> Ghent </answer>",
    ]
    reads = {
        "Who made Amber Tide?": "<think> d </think>\n<select> [0] </select>\n<answer> Ilse Vand made it. </answer>",
        "Where was Ilse Vand born?": NOTHING_FOUND,
    }
    policy = ToldPolicy(plans, reads)
    world = LittleWorld(
        kind="text",
        materials={"Who made Amber Tide?": [Material(text="Amber Tide: By Ilse Vand.")]},
    )
    episode = Mujica(tokenizer(), AGENT).run(
        attempt(dataclasses.replace(QUESTION, candidates=())), world, policy
    )
    trajectory = asyncio.run(episode)
    planner = [turn.text for turn in trajectory.conversations[0].turns if turn.role == "context"]
    assert planner[1:] == ["Obs: Ilse Vand made it.", f"Obs: {NOTHING_FOUND}"]
    assert (trajectory.answer, trajectory.counts["malformed_workers"]) == ("Ghent", 0)
    assert [search.found for search in trajectory.searches] == [True, False]
    planner_stops = policy.requests[0].params.stop_strings
    worker_stops = policy.requests[1].params.stop_strings
    assert planner_stops == ("</action>", "</answer>", "Obs:")
    assert worker_stops == (
        "</answer>",
        "Obs:",
    )
    state = policy.requests[2].state
    assert isinstance(state, PlannerState)
    assert state.observation == "Obs: Ilse Vand made it."


def test_the_script_writes_these_tags_over_a_graph():
    evidences = (
        Evidence(subject="Amber Tide", relation="director", object="Ilse Vand"),
        Evidence(subject="Ilse Vand", relation="place of birth", object="Ghent"),
    )
    question = dataclasses.replace(QUESTION, evidences=evidences)
    script = ScriptedPolicy(tokenizer(), contract=EVIPATH)
    trajectory = asyncio.run(
        Mujica(tokenizer(), AGENT).run(attempt(question), LittleWorld(), script)
    )
    assert trajectory.answer == "Ghent"
    assert not any("<sentence>" in turn for turn in model_turns(trajectory))
    lacking = LittleWorld(materials={**GRAPH, DIRECTOR.id: ()})
    missed = asyncio.run(Mujica(tokenizer(), AGENT).run(attempt(question), lacking, script))
    assert NOTHING_FOUND in model_turns(missed)
