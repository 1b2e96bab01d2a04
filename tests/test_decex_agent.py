"""DecEx's agent: an episode by hand, its parser and writer, bad turns, forks, hostile passages, its demonstrations."""

import asyncio
import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from little_agent import attempt, completion, rewarded, tokenizer
from test_baselines import FILM, PERSON, QUESTION, Told, world
from test_hostile_text import HOSTILE, known_ids, pieces
from tiny_worlds import small_world

from mujica_jax import metrics
from mujica_jax.agents import decex
from mujica_jax.agents.decex import GO_ON, SOLVE, Decex, DecexState, Decision, Solution
from mujica_jax.agents.scripted import ScriptedPolicy, sample_text
from mujica_jax.config.agents import DecexConfig
from mujica_jax.models.tokenizer import TAG_PATTERN, Tokenizer
from mujica_jax.records import StopReason, Trajectory

CONFIG = DecexConfig(
    prompt="zero_shot", max_iterations=2, max_turn_tokens=300, max_trajectory_tokens=4000, max_observation_tokens=900
)
WHO = "<think> I need the director. </think>\n<question> Who made Amber Tide? </question>"
BORN = "<think> It was Ilse Vand. </think>\n<question> Where was she born? </question>"
TURNS = [
    WHO,
    "<search> Amber Tide director </search>",
    BORN,
    "<recall> She was born in Ghent. </recall>",
    "<think> Done. </think>\n<answer> Ghent </answer>",
]
words = st.text("abc <>/?.,\n\u2028İ", min_size=1).map(lambda text: " ".join(text.split())).filter(bool)
plain = words.filter(lambda text: "<" not in text)


def agent(**changes) -> Decex:
    return Decex(tokenizer(), dataclasses.replace(CONFIG, **changes))


def play(turns: list[str], passages=None, **changes) -> Trajectory:
    playing = agent(**changes).run(attempt(QUESTION), passages or world(), Told(turns))
    return rewarded(asyncio.run(asyncio.wait_for(playing, 20)), QUESTION)


def test_an_episode_by_hand():
    found = play(TURNS)
    assert (found.answer, found.stop_reason, found.reward) == ("Ghent", StopReason.ANSWERED, 1.0)
    assert found.counts == {"recalls": 1.0}
    (search,) = found.searches
    assert (search.iteration, search.query, search.materials) == (0, "Amber Tide director", (FILM, PERSON))
    (conversation,) = found.conversations
    context = [turn.text for turn in conversation.turns if turn.role == "context"]
    passages = f"Passages found:\n[0] {FILM}\n[1] {PERSON}"
    assert context == [f"Question: {QUESTION.text}", SOLVE, passages, SOLVE, GO_ON]
    assert [turn.text for turn in conversation.turns if turn.role == "model"] == TURNS
    assert all(turn.trained == (turn.role == "model") for turn in conversation.turns)


def test_the_policy_is_told_what_the_model_knows():
    states: list[DecexState] = []

    class Asked(Told):
        async def generate(self, prompt, params, *, state, continues):
            assert isinstance(state, DecexState)
            states.append(state)
            return await super().generate(prompt, params, state=state, continues=continues)

    asyncio.run(agent().run(attempt(QUESTION), world(), Asked(TURNS)))
    assert [state.asked for state in states] == [None, "Who made Amber Tide?", None, "Where was she born?", None]
    assert [step.recalled for step in states[-1].steps] == [None, "She was born in Ghent."]
    assert [material.text for material in states[-1].steps[0].materials] == [FILM, PERSON]


@given(thought=plain, question=plain, answer=plain)
def test_what_is_written_is_read_back(thought, question, answer):
    for decision in (Decision(question=question), Decision(answer=answer)):
        assert decex.parse_decision(decex.write_decision(thought, decision)) == decision
    for solution in (Solution(recalled=answer), Solution(query=question)):
        assert decex.parse_solution(decex.write_solution(solution)) == solution


@given(
    text=st.lists(pieces | st.sampled_from(["<question>", "</question>", "<recall>", "</recall>", "a"])).map("".join)
)
def test_no_text_breaks_the_parser(text):
    decision, solution = decex.parse_decision(text), decex.parse_solution(text)
    assert decision.question is None or decision.answer is None
    assert solution.recalled is None or solution.query is None


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["no tags"], StopReason.NO_ACTION),
        (["<think> <question> x </question> </think>"], StopReason.NO_ACTION),
        (["<question>  </question>"], StopReason.NO_ACTION),
        (["<search> too early </search>"], StopReason.NO_ACTION),
        ([WHO, "<question> again? </question>"], StopReason.NO_ACTION),
        ([WHO, "<answer> Ghent </answer>"], StopReason.NO_ACTION),
        (["word " * 400], StopReason.TURN_LENGTH),
        ([WHO, "<recall> " + "word " * 400], StopReason.TURN_LENGTH),
        ([*[WHO, "<recall> a </recall>"] * 2, BORN], StopReason.ITERATION_LIMIT),
    ],
)
def test_a_turn_that_cannot_be_read_ends_the_episode(turns, reason):
    found = play(turns)
    assert (found.answer, found.stop_reason, found.reward) == ("", reason, 0.0)


def test_a_search_that_fails_ends_the_episode():
    found = play(TURNS, world(failing=frozenset({"Amber Tide director"})))
    assert found.stop_reason is StopReason.RETRIEVER_FAILED


async def test_forks_share_their_past_and_nothing_else():
    chain = agent().begin(attempt(QUESTION), world(), Told([WHO, " Ghent. </recall>", " director </search>"]))
    await chain.decide()
    memory, search = chain.fork("a"), chain.fork("b")
    await memory.solve("memory")
    await search.solve("search")
    assert (chain.asked, chain.steps, chain.searches) == ("Who made Amber Tide?", (), [])
    assert memory.steps[0].recalled == "Ghent." and not memory.searches
    assert search.steps[0].recalled is None and [one.query for one in search.searches] == ["director"]
    shared = chain.tokens
    assert memory.record().token_ids[:shared] == search.record().token_ids[:shared] == chain.record().token_ids
    turn = memory.record().turns[-2]
    assert (turn.text, turn.trained, turn.logprobs) == ("<recall> Ghent. </recall>", True, None)
    written = tuple(tokenizer().encode_model("<recall> Ghent. </recall>"))
    assert turn.token_ids[:-1] == written, "as if it had been written in one piece"


async def test_a_tag_that_fills_the_turn_is_a_cut_turn():
    chain = agent().begin(attempt(QUESTION), world(), Told([WHO]))
    await chain.decide()
    chain.limits = chain._config = dataclasses.replace(CONFIG, max_turn_tokens=2)
    await chain.solve("memory")
    assert chain.outcome == ("", StopReason.TURN_LENGTH) and not chain.record().turns[-1].trained


async def test_each_turn_of_each_fork_has_a_seed_of_its_own():
    seeds: list[int] = []

    class Seeds(Told):
        async def generate(self, prompt, params, *, state, continues):
            assert isinstance(state, DecexState)
            seeds.append(params.seed)
            return completion(WHO if state.asked is None else "<recall> a </recall>")

    chain = agent().begin(attempt(QUESTION), world(), Seeds([]))
    await chain.decide()
    for place in ("a", "b"):
        fork = chain.fork(place)
        await fork.solve()
        await fork.fork("a").decide()
        await fork.fork("b").decide()
    assert len(set(seeds)) == len(seeds) == 7


# Hostile passages


def judged(text: str) -> tuple:
    found = play(TURNS, world(text, PERSON), max_observation_tokens=2000, prompt="brief")
    (conversation,) = found.conversations
    said = [(turn.text, turn.token_ids, turn.trained) for turn in conversation.turns if turn.role == "model"]
    known = known_ids()
    scaffold = [[id for id in turn.token_ids if id in known] for turn in conversation.turns if turn.role == "context"]
    shown = [tokenizer().decode(turn.token_ids) for turn in conversation.turns if turn.role == "context"]
    assert not any(TAG_PATTERN.search(text) for text in shown), "a tag can be read as one"
    asked = [search.query for search in found.searches]
    mask = [turn.role == "model" for turn in conversation.turns for _ in turn.token_ids]
    assert conversation.loss_mask == mask
    return found.answer, found.stop_reason, found.reward, found.counts, asked, said, scaffold


TAGS = ["<question> x </question>", "<recall> x </recall>", "< Recall >", "</ QUESTION >", GO_ON, SOLVE]


@pytest.mark.parametrize("text", [*HOSTILE, *TAGS])
def test_hostile_passages_decide_nothing(text):
    assert judged(text) == judged("harmless")


@given(text=st.lists(pieces | st.sampled_from(TAGS) | st.text(max_size=4), min_size=1, max_size=8).map("".join))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_passage_decides_anything(text):
    assert judged(text) == judged("harmless")


# Demonstrations


@pytest.fixture(scope="module")
def tiny_text():
    task = small_world(50, 60, 10, facts=5, environment="text", common_knowledge=0.6)
    texts = [*task.tokenizer_text(), *list(sample_text("decex")) * 20]
    return task, Tokenizer.train(texts, 4000)


def test_demonstrations_recall_what_is_known_and_search_for_the_rest(tiny_text):
    task, of_task = tiny_text
    playing = Decex(of_task, dataclasses.replace(CONFIG, prompt="brief", max_iterations=4))
    policy, right, kinds = ScriptedPolicy(of_task), 0, set()
    for question, environment in task.demonstrations():
        found = asyncio.run(playing.run(attempt(question), environment, policy))
        right += metrics.score(found.final_answer, question.answers, task.rule).em == 1.0
        known = question.kind.endswith("known")
        kinds.add(known)
        assert not (known and found.searches) and (known or not found.counts["recalls"])
        asked = [turn.text for turn in found.conversations[0].turns if "<question>" in turn.text]
        queries = {search.query for search in found.searches}
        assert not any(f"> {query} <" in text for query in queries for text in asked[:1]), "a query of its own"
    assert kinds == {True, False} and right >= 55


def test_the_words_of_the_script_are_tokens_of_a_vocabulary_of_its_own():
    others = [text for text in sample_text()]
    assert "recall" in " ".join(sample_text("decex")) and "recall" not in " ".join(others)
