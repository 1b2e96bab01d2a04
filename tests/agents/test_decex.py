"""The DecEx agent: an episode by hand, parser and writer, bad turns, pieces, forks, hostile
passages, demonstrations.
"""

import asyncio
import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mujica_jax import metrics
from mujica_jax.agents import decex
from mujica_jax.agents.decex import Decex, DecexState, first_piece
from mujica_jax.config.agents import DecexConfig
from mujica_jax.demonstrations.policy import ScriptedPolicy, sample_text
from mujica_jax.models.tokenizer import TAG_PATTERN, Tokenizer
from mujica_jax.records import StopReason, Trajectory
from tests.agents.test_baselines import FILM, PERSON, QUESTION, Told, world
from tests.agents.test_hostile_text import HOSTILE, known_tokens, pieces, turns_of
from tests.helpers.little_agent import attempt, completion, rewarded, tokenizer
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_worlds import small_world

CONFIG = DecexConfig(
    prompt="zero_shot",
    max_iterations=2,
    max_turn_tokens=300,
    max_trajectory_tokens=4000,
    max_observation_tokens=900,
)
WHO = "<think> I need the director. So, the next sub-question is: Who made Amber Tide?\n"
LOOKED_UP = "I need to look this up. </think>\n<search> Amber Tide director </search>"
BORN = "<think> It was Ilse Vand. So, the next sub-question is: Where was she born?\n"
KNOWN = "I know about this: she is Flemish. I recall that she was born in Ghent.\n"
DONE = "Done. </think>\n<answer> Ghent </answer>"
TURNS = [WHO + LOOKED_UP, BORN + KNOWN + DONE]
words = (
    st.text("abc <>/?.,\n\u2028İ", min_size=1).map(lambda text: " ".join(text.split())).filter(bool)
)
plain = words.filter(lambda text: "<" not in text)
# Table 3 of the paper, as it is printed, without its passages.
TABLE_3 = [
    "<think> To determine if Scott Derrickson and Ed Wood share the same nationality, I need to "
    "identify the nationalities of both individuals. Starting with Scott Derrickson. So, the next "
    "sub-question is: What is Scott Derrickson’s nationality? I recall that Scott Derrickson’s "
    "nationality is American. Now, I need to determine Ed Wood’s nationality. I am less familiar "
    "with him, so I require additional information. </think>\n"
    "<search> Ed Wood nationality </search>",
    "<think> The information provided confirms that Ed Wood was an American filmmaker. Scott "
    "Derrickson is also American. Both are of the same nationality. </think>\n"
    "<answer> yes </answer>",
]


def agent(**changes) -> Decex:
    return Decex(tokenizer(), dataclasses.replace(CONFIG, **changes))


def play(turns: list[str], passages=None, **changes) -> Trajectory:
    playing = agent(**changes).run(attempt(QUESTION), passages or world(), Told(turns))
    return rewarded(asyncio.run(asyncio.wait_for(playing, HANG_SECONDS)), QUESTION)


def test_an_episode_by_hand():
    trajectory = play(TURNS)
    assert trajectory.answer == "Ghent"
    assert trajectory.stop_reason == StopReason.ANSWERED
    assert trajectory.reward == 1.0
    assert trajectory.counts == {"recalls": 1.0}
    (search,) = trajectory.searches
    assert search.iteration == 0
    assert search.query == "Amber Tide director"
    assert search.materials == (FILM, PERSON)
    (conversation,) = trajectory.conversations
    context = [turn.text for turn in conversation.turns if turn.role == "context"]
    information = f"<information>\n[0] {FILM}\n[1] {PERSON}\n</information>"
    assert context == [f"Question: {QUESTION.text}", information]
    assert [turn.text for turn in conversation.turns if turn.role == "model"] == TURNS
    assert all(turn.trained == (turn.role == "model") for turn in conversation.turns)


def test_a_row_reads_as_the_published_format():
    """Table 3 has one thought and one search or answer a step, and information between two steps."""
    (conversation,) = play(TURNS).conversations
    shape = re.sub(
        r"<\|[^<>]*\|>",
        "",
        "".join(tokenizer().decode(turn.token_ids) for turn in conversation.turns[1:]),
    )
    assert re.findall(r"</?(?:think|search|information|answer)>", shape) == [
        *("<think>", "</think>", "<search>", "</search>", "<information>", "</information>"),
        *("<think>", "</think>", "<answer>", "</answer>"),
    ]
    information = next(turn for turn in conversation.turns[1:] if turn.role == "context")
    tags = [tokenizer().encode_model(tag)[0] for tag in ("<information>", "</information>")]
    assert [id for id in information.token_ids if id in tags] == tags, (
        "the tags are ours, and tokens of their own"
    )


def test_the_papers_own_example_is_read():
    trajectory = play(TABLE_3, max_turn_tokens=1500)
    assert trajectory.answer == "yes"
    assert [search.query for search in trajectory.searches] == ["Ed Wood nationality"]
    assert trajectory.counts == {"recalls": 1.0}
    piece = first_piece(TABLE_3[0], in_thought=False, has_sub_question=False)
    assert piece is not None
    assert (piece.kind, piece.text) == ("sub-question", "What is Scott Derrickson’s nationality?")
    rest = first_piece(TABLE_3[0][piece.end :], in_thought=True, has_sub_question=True)
    assert rest is not None
    assert rest.kind == "memory"
    assert rest.text.startswith("Scott Derrickson’s nationality is Am")


def test_the_policy_is_told_what_the_model_knows():
    states: list[DecexState] = []

    class Asked(Told):
        async def generate(self, prompt, params, *, state, continues):
            assert isinstance(state, DecexState)
            states.append(state)
            return await super().generate(prompt, params, state=state, continues=continues)

    three = [WHO + LOOKED_UP, BORN + LOOKED_UP, "<think> " + DONE]
    asyncio.run(agent().run(attempt(QUESTION), world(), Asked(three)))
    assert [len(state.steps) for state in states] == [0, 1, 2]
    first, second = states[-1].steps
    assert first.question == "Who made Amber Tide?"
    assert first.thought == "I need the director."
    assert first.query == "Amber Tide director"
    assert [material.text for material in second.materials] == [FILM, PERSON]


@given(thought=plain, question=plain, answer=plain)
def test_what_is_written_is_read_back(thought, question, answer):
    asked = first_piece(
        "<think> " + decex.write_sub_question(thought, f"{question}?"),
        in_thought=False,
        has_sub_question=False,
    )
    assert asked is not None
    assert (asked.kind, asked.text) == ("sub-question", f"{question}?")
    recalled = first_piece(
        decex.write_memory(thought, answer), in_thought=True, has_sub_question=True
    )
    assert recalled is not None
    assert (recalled.kind, recalled.text) == ("memory", answer)
    for written, kind in (
        (decex.write_search(question), "search"),
        (decex.write_answer("", question), "answer"),
    ):
        piece = first_piece(written, in_thought=True, has_sub_question=True)
        assert piece is not None
        assert (piece.kind, piece.text) == (kind, question)


@given(
    text=st.lists(
        pieces | st.sampled_from([decex.SUB_QUESTION, decex.RECALL, "</think>", "\n", "a?"])
    ).map("".join),
    in_thought=st.booleans(),
    asked=st.booleans(),
)
def test_no_text_breaks_the_parser(text, in_thought, asked):
    piece = first_piece(text, in_thought=in_thought, has_sub_question=asked)
    if piece is not None:
        assert 0 <= piece.start <= piece.end <= len(text)
        assert piece.kind != "memory" or asked


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["no tags"], StopReason.NO_ACTION),
        (["<think> <search> x </search> </think>"], StopReason.NO_ACTION),
        (["<think> <answer> Ghent </answer>"], StopReason.NO_ACTION),
        (["<think> a </think> <search>  </search>"], StopReason.NO_ACTION),
        ([WHO], StopReason.NO_ACTION),
        ([WHO + KNOWN], StopReason.NO_ACTION),
        (["<think> " + "word " * 700], StopReason.TURN_LENGTH),
        ([WHO + "I know about this: " + "word " * 700], StopReason.TURN_LENGTH),
        ([WHO + KNOWN + BORN + KNOWN + BORN], StopReason.ITERATION_LIMIT),
        (
            [*[WHO + LOOKED_UP] * 2, "<think> a </think> <search> x </search>"],
            StopReason.ITERATION_LIMIT,
        ),
    ],
)
def test_a_turn_that_cannot_be_read_ends_the_episode(turns, reason):
    trajectory = play(turns, max_turn_tokens=600)
    assert trajectory.answer == ""
    assert trajectory.stop_reason == reason
    assert trajectory.reward == 0.0


def test_a_thought_that_the_template_opened_is_read():
    trajectory = play([TURNS[0].removeprefix("<think>"), TURNS[1].removeprefix("<think>")])
    assert (trajectory.answer, trajectory.counts) == ("Ghent", {"recalls": 1.0})


async def test_a_piece_of_a_thought_that_the_template_opened_is_read():
    turn = TURNS[0].removeprefix("<think>")
    chain = agent().begin(attempt(QUESTION), world(), Told([turn, " Amber Tide </search>"]))
    await chain.decide()
    assert chain.asked == "Who made Amber Tide?"
    assert chain.pieces().turns[-1].text == WHO.removeprefix("<think>")
    await chain.solve("search")
    assert chain.steps[0].query == "Amber Tide"


def test_a_search_that_fails_ends_the_episode():
    trajectory = play(TURNS, world(failing=frozenset({"Amber Tide director"})))
    assert trajectory.stop_reason is StopReason.RETRIEVER_FAILED


# Pieces of a turn


async def test_pieces_are_the_tokens_of_the_turn():
    """A conversation that is cut after each piece and continued there equals the one written turn
    by turn.
    """
    at_once = await agent().run(attempt(QUESTION), world(), Told(TURNS))
    begun = "I need to look this up. </think>\n<search>"
    told = Told(
        [TURNS[0], LOOKED_UP.removeprefix(begun), BORN + KNOWN + DONE, KNOWN[18:] + DONE, DONE]
    )
    chain = agent().begin(attempt(QUESTION), world(), told)
    await chain.decide()
    assert (chain.asked, chain.pieces().turns[-1].text) == ("Who made Amber Tide?", WHO)
    assert chain.pieces().turns[-1].logprobs is not None, "sampled tokens keep their numbers"
    await chain.solve("search")
    assert chain.record().turns[1].text == TURNS[0]
    await chain.decide()
    await chain.solve("memory")
    await chain.decide()
    trajectory = await chain.finish()
    assert [turn.text for turn in chain.pieces().turns if turn.role == "model"][2:] == [
        BORN,
        KNOWN,
        DONE,
    ]
    assert trajectory.conversations[0].token_ids == at_once.conversations[0].token_ids
    assert trajectory.conversations[0].loss_mask == at_once.conversations[0].loss_mask
    assert trajectory.answer == at_once.answer
    assert trajectory.counts == at_once.counts
    assert trajectory.searches == at_once.searches


class HalfACharacter(Told):
    """A policy that writes a byte that is no whole character in the place of each `~`."""

    async def generate(self, *arguments, **options):
        written = await super().generate(*arguments, **options)
        words = tokenizer()
        byte = next(id for id in range(words.vocab_size) if words.token_bytes(id) == b"\xa2")
        ids = tuple(byte if words.decode([id]) == "~" else id for id in written.token_ids)
        return dataclasses.replace(written, token_ids=ids)


async def test_half_a_character_in_a_sub_question_or_query_can_be_searched_and_stored():
    """A byte-level model may write any bytes. Files and requests hold only whole text."""
    told = HalfACharacter([WHO.replace("Amber", "A~mber"), " A~ </search>"])
    chain = agent().begin(attempt(QUESTION), world(), told)
    await chain.decide()
    assert chain.asked == "Who made A\ufffdmber Tide?"
    await chain.solve("search")
    assert [search.query for search in chain.searches] == ["A\ufffd"]
    assert chain.record().turns[1].text.count("\ufffd") == 2


async def test_what_is_sampled_beyond_a_piece_is_counted_and_left_out():
    chain = agent().begin(attempt(QUESTION), world(), Told([TURNS[0]]))
    before = chain.tokens
    await chain.decide()
    assert chain.tokens - before == len(completion(TURNS[0]).token_ids)
    assert len(chain.record().token_ids) - before == len(tokenizer().encode_model(WHO))


@pytest.mark.parametrize(
    ("text", "asked"), [(WHO, "Who made Amber Tide?"), (WHO.removesuffix("Tide?\n"), None)]
)
async def test_a_limit_that_cuts_what_comes_after_a_piece_does_not_cut_the_piece(text, asked):
    limit = len(tokenizer().encode_model(text))
    chain = agent(max_turn_tokens=limit).begin(attempt(QUESTION), world(), Told([WHO + LOOKED_UP]))
    await chain.decide()
    assert chain.asked == asked
    assert (chain.outcome is None) == (asked is not None)
    assert chain.pieces().turns[-1].trained == (asked is not None)
    assert chain.outcome in (None, ("", StopReason.TURN_LENGTH))


async def test_forks_share_their_past_and_nothing_else():
    told = Told([TURNS[0], " she is known. I recall that Ghent.\nDone", " director </search>"])
    chain = agent().begin(attempt(QUESTION), world(), told)
    await chain.decide()
    memory = chain.fork("a")
    search = chain.fork("b")
    await memory.solve("memory")
    await search.solve("search")
    assert chain.asked == "Who made Amber Tide?"
    assert chain.steps == ()
    assert chain.searches == []
    assert memory.steps[0].recalled == "Ghent."
    assert not memory.searches
    assert search.steps[0].recalled is None
    assert [entry.query for entry in search.searches] == ["director"]
    past = chain.record().token_ids
    assert memory.record().token_ids[: len(past)] == past
    assert search.record().token_ids[: len(past)] == past
    turn = memory.pieces().turns[-1]
    text = "I know about this: she is known. I recall that Ghent.\n"
    assert turn.text == text
    assert turn.trained is True
    assert turn.logprobs is None
    assert turn.token_ids == tuple(tokenizer().encode_model(text)), (
        "as if it had been written in one piece"
    )


async def test_the_other_decision_keeps_the_thought():
    told = Told(
        [
            TURNS[0],
            " Ghent </answer>",
            "<think> Enough. </think>\n<answer> Ghent </answer>",
            " Who is it?\n",
        ]
    )
    root = agent().begin(attempt(QUESTION), world(), told)
    asked = root.fork("a")
    stopped = root.fork("b")
    await asked.decide()
    await stopped.decide_otherwise(asked, "stop")
    assert stopped.outcome == ("Ghent", StopReason.ANSWERED)
    assert (
        stopped.pieces().turns[-1].text
        == "<think> I need the director. </think>\n<answer> Ghent </answer>"
    )
    answered = root.fork("c")
    goes_on = root.fork("d")
    await answered.decide()
    await goes_on.decide_otherwise(answered, "go_on")
    assert (goes_on.asked, goes_on.outcome) == ("Who is it?", None)
    assert (
        goes_on.pieces().turns[-1].text
        == "<think> Enough. So, the next sub-question is: Who is it?\n"
    )


async def test_another_piece_than_the_one_asked_for_is_no_branch():
    told = Told(
        [
            WHO,
            " nothing. </think>\n<search> x </search>",
            "<think> a </think>\n<search> x </search>",
        ]
    )
    passages = world()
    chain = agent().begin(attempt(QUESTION), passages, told)
    await chain.decide()
    await chain.solve("memory")
    assert chain.outcome == ("", StopReason.NO_ACTION)
    assert not passages.searched
    second_chain = agent().begin(attempt(QUESTION), passages, told)
    await second_chain.decide()
    assert second_chain.outcome == ("", StopReason.NO_ACTION)
    assert not passages.searched


async def test_the_pieces_of_a_turn_share_its_limit():
    chain = agent().begin(attempt(QUESTION), world(), Told([WHO]))
    await chain.decide()
    written = len(tokenizer().encode_model(WHO))
    chain.limits = chain._config = dataclasses.replace(CONFIG, max_turn_tokens=written + 2)
    await chain.solve("memory")
    assert chain.outcome == ("", StopReason.TURN_LENGTH)
    assert not chain.record().turns[-1].trained
    assert len(chain.pieces().turns[-1].token_ids) == 2


async def test_each_piece_of_each_fork_has_a_seed_of_its_own():
    seeds: list[int] = []

    class Seeds(Told):
        async def generate(self, prompt, params, *, state, continues):
            assert isinstance(state, DecexState)
            seeds.append(params.seed)
            return completion(
                WHO if state.asked is None else KNOWN.removeprefix("I know about this:")
            )

    chain = agent(max_iterations=4).begin(attempt(QUESTION), world(), Seeds([]))
    await chain.decide()
    for place in ("a", "b"):
        fork = chain.fork(place)
        await fork.solve("memory")
        await fork.fork("a").decide()
        await fork.fork("b").decide()
    assert len(set(seeds)) == len(seeds) == 7


# Hostile passages


def judged(text: str) -> tuple:
    """Return all that decides about an episode in which a passage has this text."""
    trajectory = play(TURNS, world(text, PERSON), max_observation_tokens=2000, prompt="brief")
    (conversation,) = trajectory.conversations
    model_turns = [
        (turn.text, turn.token_ids, turn.trained) for turn in turns_of(conversation, "model")
    ]
    context_turns = turns_of(conversation, "context")
    scaffold = [known_tokens(turn) for turn in context_turns]
    shown = [tokenizer().decode(turn.token_ids) for turn in context_turns]
    tags = [match[0] for text in shown for match in TAG_PATTERN.finditer(text)]
    assert tags == ["<information>", "</information>"], "no tag but ours can be read as one"
    searched_queries = [search.query for search in trajectory.searches]
    mask = [turn.role == "model" for turn in conversation.turns for _ in turn.token_ids]
    assert conversation.loss_mask == mask
    return (
        trajectory.answer,
        trajectory.stop_reason,
        trajectory.reward,
        trajectory.counts,
        searched_queries,
        model_turns,
        scaffold,
    )


TAGS = [
    "</information>",
    "< Information >",
    f"{decex.SUB_QUESTION} x?",
    f"{decex.RECALL} x",
    decex.MEMORY,
    decex.LOOK_UP,
]


@pytest.mark.parametrize("text", [*HOSTILE, *TAGS])
def test_hostile_passages_decide_nothing(text):
    assert judged(text) == judged("harmless")


@given(
    text=st.lists(pieces | st.sampled_from(TAGS) | st.text(max_size=4), min_size=1, max_size=8).map(
        "".join
    )
)
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
    policy = ScriptedPolicy(of_task)
    right = 0
    kinds = set()
    shape = re.compile(r"<think> [^<]+ </think>\n<(search|answer)> [^<]+ </\1>")
    for question, environment in task.demonstrations():
        trajectory = asyncio.run(playing.run(attempt(question), environment, policy))
        right += metrics.score(trajectory.final_answer, question.answers, task.rule).em == 1.0

        # What is known is recalled and not searched for; all else is searched for.
        known = question.kind.endswith("known")
        kinds.add(known)
        if known:
            assert not trajectory.searches
        else:
            assert not trajectory.counts["recalls"]

        turns = [turn.text for turn in turns_of(trajectory.conversations[0], "model")]
        if trajectory.final_answer is not None:
            assert all(shape.fullmatch(text) for text in turns)
        if trajectory.searches:
            asked = re.findall(r"next sub-question is: (.*)\n", turns[0])
            assert trajectory.searches[0].query not in asked, "a query of its own"
        recalls = re.findall(r"\nI know about this: .+\. I recall that .+", turns[0])
        assert len(recalls) == trajectory.counts["recalls"]
    assert kinds == {True, False}
    assert right >= 55


def test_the_words_of_the_script_are_tokens_of_a_vocabulary_of_its_own():
    others = [text for text in sample_text()]
    assert "recall" in " ".join(sample_text("decex"))
    assert "recall" not in " ".join(others)
