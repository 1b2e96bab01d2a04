"""The parser of the turns that planners and workers write."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mujica_jax.agents.protocol import (
    NOTHING_FOUND,
    PlannerAction,
    SearchCall,
    one_line,
    parse_planner,
    parse_worker,
    planner_observation,
    planner_opening,
    worker_opening,
    write_answer,
    write_graph_searches,
    write_text_searches,
    write_worker,
)
from mujica_jax.records import Entity, StopReason
from mujica_jax.tasks.task import Material


def plan(text: str, kind="graph", *, candidates: int = 3, max_searches: int = 3) -> PlannerAction:
    return parse_planner(text, kind, candidates=candidates, max_searches=max_searches)


def calls(*pairs: tuple[int | None, str]) -> PlannerAction:
    return PlannerAction(
        searches=tuple(SearchCall(candidate=number, query=query) for number, query in pairs)
    )


GRAPH_FORMS = {
    '<think> a </think>\n<action>\nSearch([0], "Who?")\n</action>': calls((0, "Who?")),
    '<action>Search([0], "Who?")\nSearch([2], "When?")</action>': calls((0, "Who?"), (2, "When?")),
    '<action>Search([1], "Who?") Search([0], "Who?")</action>': calls((1, "Who?"), (0, "Who?")),
    '<action>Search([1], "Who?")</action> then <action>Search([0], "When?")</action>': calls(
        (1, "Who?"), (0, "When?")
    ),
    '<action>Search(2, "Who?")</action>': calls((2, "Who?")),
    '<action> Search( [ 2 ] ,  " Who   is it? " ) </action>': calls((2, "Who is it?")),
    '<action>Search([0], "Who is "Weird Al" Yankovic?")</action>': calls(
        (0, 'Who is "Weird Al" Yankovic?')
    ),
    '<action>Search([0], "Who (1961)?"); Search([1], "When (1961)?")</action>': calls(
        (0, "Who (1961)?"), (1, "When (1961)?")
    ),
    '<action>Search([0], "Who?")\nSearch([0], "Who?")\nSearch([0], "Who? ")</action>': calls(
        (0, "Who?")
    ),
    '<action>look: Search([0], "Who?") please</action>': calls((0, "Who?")),
    '<ACTION>search([0], "Who?")</Action >': calls((0, "Who?")),
    "<action>Search([0], \u201cWho is it?\u201d)</action>": calls((0, "Who is it?")),
    "<action>Search([0], \u201cWho is \u201cWeird Al\u201d?\u201d)</action>": calls(
        (0, "Who is \u201cWeird Al\u201d?")
    ),
    "<action>Search([0], 'Who is Vand's mother?')</action>": calls((0, "Who is Vand's mother?")),
    "<action>Search([0], \u2018Who?\u2019)</action>": calls((0, "Who?")),
    "<action>Search ( [ 0 ] , \u00abWho?\u00bb , )</action>": calls((0, "Who?")),
    '<action>Search([0] Amber Tide, the film, "Who?")</action>': calls((0, "Who?")),
    '<action>Search([0], "Who is \\"Weird Al\\"?")</action>': calls((0, 'Who is "Weird Al"?')),
    '<action>Search([0], "<search>Who?</search>")</action>': calls((0, "<search>Who?</search>")),
}
UNKNOWN = SearchCall(
    query="Who?", candidate=3, refusal='"Who?" was not searched: candidate number 3 is unknown.'
)
# What is read, and how many searches of the turn were not.
PARTLY_READ = {
    ("graph", '<action>Search([3], "Who?")</action>'): ((UNKNOWN,), 0),
    ("graph", '<action>Search([0], "Who?")\nSearch([3], "Who?")</action>'): (
        (SearchCall(query="Who?", candidate=0), UNKNOWN),
        0,
    ),
    ("graph", '<action>Search([0], "Who?")\nSearch([Amber Tide], "When?")</action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search(Amber Tide, "When?")\nSearch([0], "Who?")</action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search([0, 1], "When?") Search([0], Where?) Search([1], "Who?")</action>'): (
        calls((1, "Who?")).searches,
        2,
    ),
    ("graph", '<action>Search([0], Where?) Search(1, "Who?")</action>'): (
        calls((1, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search([0], "Who?")</action><action>the date</action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search([0], "Who?")</action><action>Search([1], "When?")'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search([0], "Who?") Search([0], "")</action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<search>When?</search><action>Search([0], "Who?")</action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("graph", '<action>Search(x) <action>Search([0], "Who?")</action></action>'): (
        calls((0, "Who?")).searches,
        1,
    ),
    ("text", "<search>When?<search>Who?</search></search>"): (calls((None, "Who?")).searches, 1),
    ("text", "<search>Who?</search><search>When?"): (calls((None, "Who?")).searches, 1),
    ("text", "<search>Who?</search><search> </search>"): (calls((None, "Who?")).searches, 1),
    ("text", '<search>Who?</search><action>Search("When?")</action>'): (
        calls((None, "Who?")).searches,
        1,
    ),
}
TEXT_FORMS = {
    "<think> a </think>\n<search> Who? </search>": calls((None, "Who?")),
    "<search>Who?</search><search>When?</search>": calls((None, "Who?"), (None, "When?")),
    "<search>\nWho\nis it?\n</search>": calls((None, "Who is it?")),
    "<search>Who?</search> <search> Who? </search>": calls((None, "Who?")),
    "<Search>Who?</SEARCH>< search >When?</ search >": calls((None, "Who?"), (None, "When?")),
    "<answer> no, <search>Who?</search> </answer>": calls(
        (None, "Who?")
    ),  # it holds a search and is no answer
}
ANSWER_FORMS = {
    "<think> a </think>\n<answer> Ghent </answer>": "Ghent",
    "<answer>Ghent</answer>": "Ghent",
    "<answer> Ghent,\n Belgium </answer>": "Ghent, Belgium",
    "<answer>Ghent</answer> <answer>Rome</answer>": "Ghent",
    '<action>Search([0], "Who?")</action><search>Who?</search><answer> Ghent </answer>': "Ghent",
    "<answer> a < b > c </answer>": "a < b > c",
    "<answer></answer>": "",
    "<Answer>Ghent</Answer>": "Ghent",
    "<ANSWER> Ghent </ANSWER >": "Ghent",
    "<answer><answer>Ghent</answer></answer>": "Ghent",
    "<answer> Rome <answer> Ghent </answer>": "Ghent",
    "<search> <answer> Ghent </answer> </search>": "Ghent",
}


@pytest.mark.parametrize(("kind", "forms"), [("graph", GRAPH_FORMS), ("text", TEXT_FORMS)])
def test_well_formed_searches(kind, forms):
    assert {text: plan(text, kind) for text in forms} == forms


@pytest.mark.parametrize("kind", ["graph", "text"])
@pytest.mark.parametrize("text", ANSWER_FORMS)
def test_well_formed_answers(text, kind):
    assert plan(text, kind) == PlannerAction(answer=ANSWER_FORMS[text])


@pytest.mark.parametrize(("kind", "text"), PARTLY_READ)
def test_what_is_not_read_of_a_turn_is_counted(kind, text):
    searches, unreadable = PARTLY_READ[kind, text]
    action = plan(text, kind)
    assert (action.searches, action.unreadable) == (searches, unreadable)
    assert action.malformed == unreadable + sum(call == UNKNOWN for call in searches)


MALFORMED = {
    ("graph", ""): StopReason.NO_ACTION,
    ("graph", "<think> I should search. </think>"): StopReason.NO_ACTION,
    ("graph", "Ghent"): StopReason.NO_ACTION,
    ("graph", "<answer> Ghent"): StopReason.NO_ACTION,
    ("graph", "<answer> <action>Who?</action> </answer>"): StopReason.NO_ACTION,
    ("graph", "</answer>Ghent<answer>"): StopReason.NO_ACTION,
    ("graph", '<action>Search([0], "Who?")'): StopReason.NO_ACTION,
    ("graph", 'Search([0], "Who?")'): StopReason.NO_ACTION,
    ("graph", "<action>Search([0], Who?)</action>"): StopReason.NO_ACTION,
    ("graph", '<action>Search([0], "Who\nis it?")</action>'): StopReason.NO_ACTION,
    ("graph", '<action>Search([0], "  ")</action>'): StopReason.NO_ACTION,
    ("graph", '<action>Search("Who?")</action>'): StopReason.NO_ACTION,
    ("graph", "<search> Who? </search>"): StopReason.NO_ACTION,
    ("graph", '<action>Search([0, 1], "Who?")</action>'): StopReason.NO_ACTION,
    ("graph", '<action>Search([Amber Tide], "Who?")</action>'): StopReason.NO_ACTION,
    ("graph", "<action>Search([0], \u201cWho?)</action>"): StopReason.NO_ACTION,
    ("graph", "<action>" + "".join(f'Search([0], "Who {n}?")\n' for n in range(4)) + "</action>"): (
        StopReason.TOO_MANY_SEARCHES
    ),
    ("text", '<action>Search([0], "Who?")</action>'): StopReason.NO_ACTION,
    ("text", "<search> Who?"): StopReason.NO_ACTION,
    ("text", "<search> </search>"): StopReason.NO_ACTION,
    (
        "text",
        "".join(f"<search> Who {n}? </search>" for n in range(4)),
    ): StopReason.TOO_MANY_SEARCHES,
}


@pytest.mark.parametrize(("kind", "text"), MALFORMED)
def test_malformed_turns_are_refused_with_their_reason(kind, text):
    assert plan(text, kind) == PlannerAction(refused=MALFORMED[kind, text])


def test_as_many_searches_as_allowed_are_accepted_and_repeated_ones_count_once():
    text = "<action>" + "".join(f'Search([0], "Who {n % 3}?")\n' for n in range(6)) + "</action>"
    assert len(plan(text, max_searches=3).searches) == 3


THOUGHTS = [
    "<think> maybe <answer> Rome </answer> </think>",
    '<think> or <action>Search([9], "Who?")</action> </think>',
    "<think> <search> Who? </search>\n\n </think>",
    "<think> twice </think> <think> <answer> Rome </answer> </think>",
    "<Think> <answer> Rome </answer> </THINK>",
    "the template opened it: <answer> Rome </answer> </think>",
    "<think> I begin with <think> and write <answer> Rome </answer> </think>",
]


@pytest.mark.parametrize("thought", THOUGHTS)
def test_thoughts_are_not_read(thought):
    assert plan(f"{thought} <answer> Ghent </answer>") == PlannerAction(answer="Ghent")
    for kind in ("graph", "text"):
        assert plan(thought, kind) == PlannerAction(refused=StopReason.NO_ACTION)


def test_a_thought_that_never_ends_hides_what_follows():
    assert plan("<think> maybe <answer> Rome </answer>").refused is StopReason.NO_ACTION
    assert plan("<answer> Ghent </answer> <think> or <answer> Rome </answer>").answer == "Ghent"
    assert not parse_worker(
        "<think> <select> [0] </select> <sentence> A. </sentence>", materials=2
    ).well_formed


# --- workers ---

WORKER_FORMS = {
    "<think> a </think>\n<select> [1] </select>\n<sentence> It is Ghent. </sentence>": (
        (1,),
        "It is Ghent.",
    ),
    "<select>[0][2]</select><sentence>Both.</sentence>": ((0, 2), "Both."),
    "<select>[2], [0]</select><sentence>Both.</sentence>": ((2, 0), "Both."),
    "<select>[1][1][1]</select><sentence>Once.</sentence>": ((1,), "Once."),
    "<select> [-1] </select><sentence>No relevant information found.</sentence>": (
        (),
        NOTHING_FOUND,
    ),
    "<select>[-1][0]</select><sentence>Odd.</sentence>": ((0,), "Odd."),
    "<select>[0, 2]</select><sentence>Both.</sentence>": ((0, 2), "Both."),
    "<select> 0, 2 </select><sentence>Both.</sentence>": ((0, 2), "Both."),
    "<select> [[0],[2]] </select><sentence>Both.</sentence>": ((0, 2), "Both."),
    "<select>Passages [0] and [2].</select><sentence>Both.</sentence>": ((0, 2), "Both."),
    "<SELECT>[0;2]</Select><Sentence>Both.</SENTENCE>": ((0, 2), "Both."),
    "<sentence>It is Ghent.</sentence>": ((), "It is Ghent."),
    "<select></select><sentence>\nTwo\nlines. </sentence>": ((), "Two lines."),
    "<sentence>First.</sentence><select>[0]</select>": ((0,), "First."),
    "<think> <select>[2]</select> <sentence>Thought.</sentence> "
    "</think><select>[0]</select><sentence>Said.</sentence>": ((0,), "Said."),
}


@pytest.mark.parametrize("text", WORKER_FORMS)
def test_well_formed_worker_turns(text):
    reply = parse_worker(text, materials=3)
    assert (reply.selected, reply.sentence) == WORKER_FORMS[text]
    assert reply.well_formed
    assert reply.has_selection == bool(WORKER_FORMS[text][0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<select>[0]</select>",
        "<select>[0]</select><sentence> \n </sentence>",
        "<select>[0]</select><sentence>It is Ghent.",
        "<think> <select>[0]</select><sentence>A.</sentence> </think>",
    ],
)
def test_a_worker_turn_without_a_sentence_says_that_nothing_was_found(text):
    reply = parse_worker(text, materials=3)
    assert reply.selected == ()
    assert reply.sentence == NOTHING_FOUND
    assert reply.well_formed is False
    assert reply.has_selection is False


@pytest.mark.parametrize(
    ("select", "selected"),
    [
        ("<select>[3][1][17]</select>", (1,)),  # materials that were not shown
        ("<select>[first][1]</select>", (1,)),
        ("<select>the first</select>", ()),
        ("<select>[0]-[2]</select>", (0, 2)),
        ("<select>[0-2]</select>", ()),
        ("<select>[0], 2</select>", (0,)),
        ("<select>[0]", ()),
    ],
)
def test_a_selection_that_is_not_read_whole_is_not_well_formed_and_its_sentence_counts(
    select, selected
):
    reply = parse_worker(f"{select}<sentence>It is Ghent.</sentence>", materials=3)
    assert reply.selected == selected
    assert reply.sentence == "It is Ghent."
    assert reply.well_formed is False


# --- any text ---

pieces = st.sampled_from(
    [
        *(
            f"<{slash}{tag}>"
            for tag in "think action search answer select sentence".split()
            for slash in ("", "/")
        ),
        *(
            'Search([0], "Who?")',
            "Search([",
            '], "',
            '")',
            "[0]",
            "[-1]",
            "[",
            "]",
            "7",
            "٣",
            "²",
            "\n",
            "\x00",
        ),
    ]
)
any_text = st.lists(pieces | st.text(max_size=6), max_size=14).map("".join)


@given(
    text=any_text,
    kind=st.sampled_from(["graph", "text"]),
    candidates=st.integers(0, 4),
    max_searches=st.integers(1, 3),
)
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_search_an_answer_or_a_refusal(text, kind, candidates, max_searches):
    action = plan(text, kind, candidates=candidates, max_searches=max_searches)
    assert [bool(action.searches), action.answer is not None, action.refused is not None].count(
        True
    ) == 1
    assert len(action.searches) <= max_searches
    assert len(set(action.searches)) == len(action.searches)
    for call in action.searches:
        assert call.query == one_line(call.query) != ""
        assert (call.candidate is None) if kind == "text" else (call.candidate >= 0)
        assert bool(call.refusal) == (kind == "graph" and call.candidate >= candidates)


@given(text=any_text, materials=st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_worker_reply(text, materials):
    reply = parse_worker(text, materials=materials)
    assert all(0 <= index < materials for index in reply.selected)
    assert len(set(reply.selected)) == len(reply.selected)
    assert reply.sentence == one_line(reply.sentence) != ""


# --- what is written is what is read ---

words = (
    st.text(min_size=1, max_size=20).map(one_line).filter(bool).filter(lambda text: "<" not in text)
)
# A call ends at a quotation mark before a bracket, and a planner may escape a mark inside of a
# query.
queries = words.filter(lambda text: not re.search(r'"\s*\)|\\"', f'{text}"'))


@given(
    thought=words,
    asked=st.lists(st.tuples(st.integers(0, 30), queries), min_size=1, max_size=4, unique=True),
)
def test_written_graph_searches_are_read(thought, asked):
    wanted = tuple(SearchCall(candidate=number, query=query) for number, query in asked)
    assert (
        plan(write_graph_searches(thought, wanted), candidates=31, max_searches=4).searches
        == wanted
    )


@given(thought=words, asked=st.lists(words, min_size=1, max_size=4, unique=True))
def test_written_text_searches_are_read(thought, asked):
    wanted = tuple(SearchCall(candidate=None, query=query) for query in asked)
    assert plan(write_text_searches(thought, wanted), "text", max_searches=4).searches == wanted


@given(thought=words, answer=words)
def test_a_written_answer_is_read(thought, answer):
    assert plan(write_answer(thought, answer)) == PlannerAction(answer=answer)


@given(thought=words, selected=st.lists(st.integers(0, 9), max_size=4, unique=True), sentence=words)
def test_a_written_worker_turn_is_read(thought, selected, sentence):
    reply = parse_worker(write_worker(thought, selected, sentence), materials=10)
    assert reply.selected == tuple(selected)
    assert reply.sentence == sentence
    assert reply.well_formed is True


# --- prompts ---


def test_prompts_number_candidates_and_materials_from_where_they_stand():
    people = [Entity(id="Q1", label="Ann"), Entity(id="Q2", label="Bob")]
    assert planner_opening("Who?", people) == "Question: Who?\nCandidate: [0] Ann [1] Bob"
    assert planner_opening("Who?", []) == "Question: Who?"
    assert planner_observation(["A.", "B."], people, 4) == "Obs: A. B.\nCandidate: [4] Ann [5] Bob"
    assert planner_observation(["A."], [], 4) == "Obs: A."
    materials = [("a", "b", "c"), ("d",)]
    opening = worker_opening("Who?", materials, "graph", "zero_shot")
    assert opening == "Question: Who?\nMaterials:\n[0] a, b, c\n[1] d"
    opening = worker_opening("Who?", materials, "graph", "brief")
    assert opening == "Question: Who?\nMaterials:\n[0] a, b [0] c\n[1] d [1]"
    assert worker_opening("Who?", [], "text", "zero_shot") == "Question: Who?\nContext:"


def test_a_materials_parts_are_those_of_its_triple_whatever_commas_its_labels_hold():
    book = (Entity(id="Q1", label="Me, Myself"),)
    whole = Material(text="Me, Myself, date of publication, May 1, 2000", entities=book)
    assert whole.parts == ("Me, Myself", "date of publication", "May 1, 2000")
    cut = Material(text="Me, Myself, date of", entities=book)
    assert cut.parts == ("Me, Myself, date of",)
    assert Material(text="Title: a, b, c", title="Title").parts == ("Title: a, b, c",)


@pytest.mark.parametrize("kind", ["graph", "text"])
@pytest.mark.parametrize("mode", ["brief", "zero_shot", "few_shot"])
def test_each_material_begins_a_line_of_its_own_with_its_number(kind, mode):
    lines = worker_opening(
        "Who\nis\nit?", [("a", "b\n[7] x", "c"), ("\n",), ("d",)], kind, mode
    ).split("\n")
    assert lines[0] == "Question: Who is it?"
    assert [line.split(" ", 1)[0] for line in lines[2:]] == ["[0]", "[1]", "[2]"]
    assert lines[2].startswith("[0] a, b [7] x")
    assert lines[4].startswith("[2] d")
