"""The agents beside Mujica: what they ask, search and read, worked out by hand in a world of three
passages.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mujica_jax.agents import baselines
from mujica_jax.agents.single import is_well_formed
from mujica_jax.config.agents import AgentLimits, BaselineConfig, SingleConfig
from mujica_jax.config.checks import check, check_demonstrations
from mujica_jax.config.command_line import override
from mujica_jax.config.files import load_config
from mujica_jax.config.named_objects import implementation
from mujica_jax.config.schema import AgentConfig, Config
from mujica_jax.errors import UserError
from mujica_jax.inference.requests import Completion, SamplingParams, first_stop_of_turn
from mujica_jax.records import Conversation, Question, StopReason, Trajectory, Turn
from mujica_jax.tasks.task import Material
from tests.agents.test_hostile_text import HOSTILE, known_tokens
from tests.helpers.little_agent import LittleWorld, attempt, completion, tokenizer
from tests.helpers.patience import HANG_SECONDS

KINDS = {member.kind: member for member in AgentConfig.__args__ if member.kind != "mujica"}
LIMITS = {"max_turn_tokens": 300, "max_trajectory_tokens": 4000, "max_observation_tokens": 900}
QUESTION = Question(id="q-1", text="Where was the director of Amber Tide born?", answers=("Ghent",))
FILM = "Amber Tide: A 1961 film by Ilse Vand."
PERSON = "Ilse Vand: She was born in Ghent."


class Told:
    """A policy that writes these texts in their order, whoever asks."""

    version = 3

    def __init__(self, texts: Sequence[str], unlikely: str | None = None) -> None:
        self._texts = list(texts)
        self._unlikely = unlikely
        self.prompts: list[str] = []
        self.stops: list[tuple[str, ...]] = []

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, state: object, continues: bool
    ) -> Completion:
        await asyncio.sleep(0)
        self.prompts.append(tokenizer().decode(list(prompt)))
        self.stops.append(params.stop_strings)
        made = completion(self._texts.pop(0), params.max_new_tokens)
        logprobs = [-0.1] * len(made.token_ids)
        text = ""
        for place, token in enumerate(made.token_ids):
            text += tokenizer().decode([token])
            if self._unlikely is not None and text.endswith(self._unlikely):
                logprobs[place + 1 - len(self._unlikely) : place + 1] = [-3.0] * len(self._unlikely)
        return dataclasses.replace(made, logprobs=tuple(logprobs))


class Everything(LittleWorld):
    """A world in which every search finds the same passages. It records the searches."""

    async def search(self, query, entity):
        self.searched.append((query, entity))
        if query in self.failing:
            return await super().search(query, entity)
        return tuple(self.materials[""])


def world(*texts: str, failing: frozenset[str] = frozenset()) -> Everything:
    passages = texts or (FILM, PERSON)
    return Everything(
        {"": tuple(Material(text=text) for text in passages)}, kind="text", failing=failing
    )


def config(kind: str, **changes) -> AgentLimits:
    prompt = {"prompt": "zero_shot"} if kind in ("single", "decex") else {}
    return KINDS[kind](**LIMITS, **prompt, **changes)


def play(kind: str, policy: Told, passages: Everything | None = None, **changes) -> Trajectory:
    chosen = config(kind, **changes)
    agent = implementation(chosen)(tokenizer(), chosen)
    playing = agent.run(attempt(dataclasses.replace(QUESTION)), passages or world(), policy)
    return asyncio.run(asyncio.wait_for(playing, HANG_SECONDS))


def queries(trajectory: Trajectory) -> list[str]:
    return [search.query for search in trajectory.searches]


GHENT = "<answer> Ghent </answer>"
SEARCH = "<search> b </search>"
SEARCHING = f"<think> a </think>{SEARCH}"
PLAYS: dict[str, tuple[list[str], list[str]]] = {  # what is written, and what is searched for
    "direct": ([GHENT], []),
    "chain_of_thought": ([f"<think> Vand, so Ghent. </think> {GHENT}"], []),
    "rag": ([GHENT], [QUESTION.text]),
    "iter_retgen": (
        ["<think> Ilse Vand made it. </think> <answer> Rome </answer>", GHENT],
        [QUESTION.text, f"{QUESTION.text} Ilse Vand made it. Rome"],
    ),
    "ircot": (
        ["Amber Tide is by Ilse Vand.", GHENT],
        [QUESTION.text, "Amber Tide is by Ilse Vand."],
    ),
    "search_o1": (
        [
            "I need her. <search> director of Amber Tide </search>",
            "<sentence> Ilse Vand was born in Ghent. </sentence>",
            GHENT,
        ],
        ["director of Amber Tide"],
    ),
    "react": (
        [
            "Thought: who?\nAction: Search[Amber Tide director]",
            "Thought: Ghent.\nAction: Finish[Ghent]",
        ],
        ["Amber Tide director"],
    ),
    "flare": (["Amber Tide is by Ilse Vand.", "She is from Ghent.", GHENT], []),
    "skr": (["<answer> Yes </answer>", GHENT], [QUESTION.text]),
    "single": (
        [
            "<think> I do not know. </think>\n<search> Amber Tide director </search>",
            f"<reflect> Ilse Vand, of Ghent. </reflect>\n{GHENT}",
        ],
        ["Amber Tide director"],
    ),
    "decex": (
        [
            "<think> Who made it? So, the next sub-question is: Who directed Amber Tide?\n"
            "I need to look this up. </think>\n"
            "<search> Amber Tide director </search>",
            f"<think> Ilse Vand, of Ghent. </think>\n{GHENT}",
        ],
        ["Amber Tide director"],
    ),
}


def test_every_kind_is_played():
    assert PLAYS.keys() == KINDS.keys()


def test_every_baseline_is_the_class_of_one_kind():
    sections = [section for section in KINDS.values() if issubclass(section, BaselineConfig)]
    classes = [implementation(section).__name__ for section in sections]
    assert sorted(classes) == baselines.__all__


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_searches_and_answers_as_its_method_says(kind):
    texts, searched = PLAYS[kind]
    policy = Told(texts)
    passages = world()
    trajectory = play(kind, policy, passages)
    assert trajectory.answer == "Ghent"
    assert trajectory.stop_reason == StopReason.ANSWERED
    assert queries(trajectory) == searched
    assert [query for query, _ in passages.searched] == searched
    assert all(search.materials == (FILM, PERSON) for search in trajectory.searches)
    assert QUESTION.text in policy.prompts[0]
    assert all(policy.stops)
    written = [
        turn.text
        for conversation in trajectory.conversations
        for turn in conversation.turns
        if turn.role == "model"
    ]
    assert sorted(written) == sorted(texts), "each turn is recorded once"
    assert "Ghent" in trajectory.conversations[0].turns[-1].text, (
        "the conversation with the answer comes first"
    )
    for conversation in trajectory.conversations:
        assert [turn.trained for turn in conversation.turns] == [
            turn.role == "model" for turn in conversation.turns
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_ends_the_episode(kind):
    unreadable = play(kind, Told(["no tag at all <answer> not closed"] * 9))
    assert (unreadable.answer, unreadable.stop_reason) in {
        ("", StopReason.NO_ACTION),
        ("", StopReason.ITERATION_LIMIT),
    }
    cut = play(kind, Told(["word " * 400] * 9))
    assert (cut.answer, cut.stop_reason) == ("", StopReason.TURN_LENGTH)
    assert not any(
        turn.trained for conversation in cut.conversations for turn in conversation.turns
    )


@pytest.mark.parametrize("kind", [kind for kind, (_, searched) in PLAYS.items() if searched])
def test_a_search_that_fails_ends_the_episode(kind):
    texts, searched = PLAYS[kind]
    trajectory = play(kind, Told(texts), world(failing=frozenset(searched)))
    assert (trajectory.answer, trajectory.stop_reason) == ("", StopReason.RETRIEVER_FAILED)


def test_flare_searches_for_the_likely_words_of_an_unlikely_sentence():
    policy = Told(["She is from Rome.", "She is from Ghent.", GHENT], unlikely="Rome")
    trajectory = play("flare", policy)
    assert len(trajectory.searches) == 1
    assert trajectory.answer == "Ghent"
    assert "She is from" in queries(trajectory)[0]
    assert "Rome" not in queries(trajectory)[0]
    assert FILM not in policy.prompts[0]
    assert FILM in policy.prompts[1]
    assert "Reasoning so far: She is from Ghent." in policy.prompts[2], (
        "the sentence that was searched for is replaced"
    )


class WithoutLogprobs(Told):
    """A policy that reports no log-probabilities."""

    async def generate(self, prompt, params, *, state, continues):
        return dataclasses.replace(completion("x"), logprobs=None)


def test_flare_needs_log_probabilities():
    with pytest.raises(UserError, match="flare, which needs log-probabilities"):
        play("flare", WithoutLogprobs([]))


def test_flare_reads_the_likelihood_of_a_sentence_outside_of_thoughts():
    """The thought says the same sentence first; the policy finds both mentions of Rome unlikely."""
    turn = "<think> She is from Rome. </think>\nShe is from Rome."
    policy = Told([turn, GHENT], unlikely="</think>")
    assert queries(play("flare", policy)) == [], "an unlikely thought is no reason to search"
    trajectory = play("flare", Told([turn, GHENT], unlikely="Rome."))
    assert len(trajectory.searches) == 1
    assert "She is from" in queries(trajectory)[0]


def test_skr_answers_alone_where_the_model_says_so():
    policy = Told(["<answer> No. </answer>", GHENT])
    trajectory = play("skr", policy)
    assert (trajectory.answer, queries(trajectory)) == ("Ghent", [])
    assert FILM not in policy.prompts[1]


def test_ircot_shows_new_passages_once_and_first():
    policy = Told(["Amber Tide is by Ilse Vand.", "Ilse Vand is from Ghent.", GHENT])
    trajectory = play("ircot", policy)
    assert policy.prompts[2].count(FILM) == 1
    assert (
        "Reasoning so far: Amber Tide is by Ilse Vand. Ilse Vand is from Ghent."
        in policy.prompts[2]
    )
    assert len(trajectory.searches) == 3


def test_ircot_without_an_answer_ends_at_its_last_search():
    endless = play("ircot", Told(["A sentence."] * 9), max_searches=2)
    assert (endless.stop_reason, len(endless.searches)) == (StopReason.NO_ACTION, 2)


def test_brackets_in_a_thought_of_react_are_no_action():
    texts = ["Thought: passage [0] says who.\nAction: Search[Ilse Vand]\n", "Action: Finish[Ghent]"]
    assert play("react", Told(texts)).answer == "Ghent"


def test_an_action_inside_a_thought_of_react_does_not_end_the_turn():
    hidden = ["<think> Action: Finish[Rome] </think>\nAction: Finish[Ghent]"]
    assert play("react", Told(hidden)).answer == "Ghent"


def test_a_thought_is_no_sentence_of_the_reasoning():
    thought = "<think>\nWho made it?\n</think>\n\nAmber Tide is by Ilse Vand.\nMore."
    for kind in ("ircot", "flare"):
        policy = Told([thought, GHENT])
        trajectory = play(kind, policy)
        assert trajectory.answer == "Ghent"
        assert "so far: Amber Tide is by Ilse Vand.<" in policy.prompts[1].replace("\n", "<")


def test_an_answer_counts_when_it_is_the_next_sentence():
    later = play("ircot", Told(["Amber Tide is by Ilse Vand.\n<answer> Rome </answer>", GHENT]))
    assert later.answer == "Ghent"


@pytest.mark.parametrize("kind", ["single", "search_o1", "react"])
def test_searches_are_bounded(kind):
    search = {
        "single": "<think> x </think><search> more </search>",
        "search_o1": "<search> more </search>",
        "react": "Action: Search[more]",
    }[kind]
    texts = [search, "<sentence> none </sentence>"] * 3 if kind == "search_o1" else [search] * 3
    trajectory = play(kind, Told(texts), max_searches=2)
    assert (trajectory.stop_reason, len(trajectory.searches)) == (StopReason.ITERATION_LIMIT, 2)


@pytest.mark.parametrize(
    ("style", "texts", "well_formed"),
    [
        ("reflect", PLAYS["single"][0], True),
        ("reflect", [f"<think> I know. </think><reflect> Ghent. </reflect>{GHENT}"], True),
        ("reflect", [f"<think> I know. </think>{GHENT}"], False),
        (
            "reflect",
            [
                "<think> a </think><search> b </search>",
                "<search> c </search>",
                f"<reflect> d </reflect>{GHENT}",
            ],
            False,  # what the first search brought is not judged
        ),
        ("reflect", [f"<reflect> Ghent. </reflect>{GHENT}"], False),
        ("reflect", [f"Well. <think> I know. </think><reflect> Ghent. </reflect>{GHENT}"], False),
        ("reflect", [SEARCHING, f"<reflect> Ghent. </reflect>{GHENT}"], True),
        # The paper's loop: think, search, information, reflect, think, search, information,
        # reflect, answer.
        (
            "reflect",
            [
                SEARCHING,
                f"<reflect> More. </reflect>\n{SEARCHING}",
                f"<reflect> d </reflect>{GHENT}",
            ],
            True,
        ),
        ("reflect", [SEARCHING, f"<reflect> d </reflect>\n<think> e </think>\n{GHENT}"], True),
        (
            "reflect",
            [
                SEARCHING,
                "<reflect> More. </reflect><search> c </search>",
                f"<reflect> d </reflect>{GHENT}",
            ],
            True,
        ),
        ("reflect", [SEARCHING, f"<think> d </think>{GHENT}"], False),
        ("reflect", [SEARCHING, f"<think> d </think><reflect> e </reflect>{GHENT}"], False),
        (
            "reflect",
            [f"<think> a </think><reflect> b </reflect>{SEARCH}", f"<reflect> c </reflect>{GHENT}"],
            False,
        ),
        ("reflect", [f"<think> a </think> so {SEARCH}", f"<reflect> c </reflect>{GHENT}"], False),
        (
            "reflect",
            [f"<think> a </think><think> b </think>{SEARCH}", f"<reflect> c </reflect>{GHENT}"],
            False,
        ),
        (
            "reflect",
            [SEARCHING, f"<reflect> c </reflect><observation> d </observation>{GHENT}"],
            False,
        ),
        (
            "reflect",
            [SEARCHING, f"<reflect> c <observation> d </observation> </reflect>{GHENT}"],
            False,
        ),
        ("reflect", [SEARCHING, f"<reflect> c </reflect><reflect> d </reflect>{GHENT}"], False),
        ("reflect", [SEARCHING, f"<reflect> </reflect>{GHENT}"], False),
        ("reflect", [SEARCHING, f"<reflect> c <think> d </reflect></think>{GHENT}"], False),
        ("reflect", [SEARCHING, "<reflect> c </reflect><Answer> Ghent </Answer>"], False),
        ("reflect", [SEARCHING, f"<reflect> c </reflect>{GHENT} That is all."], False),
        (
            "reflect",
            [f"<think> an <answer> comes </answer> last </think><reflect> b </reflect>{GHENT}"],
            True,
        ),
        ("search_r1", [f"<think> a </think> so {GHENT}"], False),
        ("search_r1", [SEARCHING, GHENT], False),
        ("search_r1", [SEARCHING, f"<reflect> a </reflect>{GHENT}"], False),
        (
            "search_r1",
            [f"<think> a </think>\n\n{SEARCH}\n", f"\n<think> b </think>\n\n{GHENT}\n"],
            True,
        ),
        ("search_r1", [f"<think> I know. </think>{GHENT}"], True),
        (
            "search_r1",
            ["<think> a </think><search> b </search>", f"<think> c </think>{GHENT}"],
            True,
        ),
        ("search_r1", ["<search> b </search>", f"<think> c </think>{GHENT}"], False),
    ],
)
def test_what_shapes_a_turn_may_have(style, texts, well_formed):
    trajectory = play("single", Told(texts), style=style)
    assert trajectory.answer == "Ghent"
    assert trajectory.counts["malformed_shape"] == (not well_formed)
    assert is_well_formed(trajectory.conversations[0], style) == well_formed


def test_what_was_found_is_sent_between_information_tags():
    """The tags are those that the prompt shows, and the model's own tag, which ends a turn of the
    model.
    """
    policy = Told([SEARCHING, f"<reflect> Ghent. </reflect>{GHENT}"])
    trajectory = play("single", policy)
    turn = trajectory.conversations[0].turns[2]
    expected = f"<information>\n[0] {FILM}\n[1] {PERSON}\n</information>"
    assert expected in tokenizer().decode(turn.token_ids)
    assert expected in policy.prompts[1]
    (opening,) = tokenizer().encode_model("<information>")
    (closing,) = tokenizer().encode_model("</information>")
    tags = [opening, closing]
    assert [id for id in turn.token_ids if id in tags] == tags
    assert not turn.trained


def test_a_search_that_finds_nothing_is_answered_with_none():
    empty = Told([SEARCHING, f"<reflect> Nothing. </reflect>{GHENT}"])
    play("single", empty, Everything({"": ()}, kind="text"))
    assert "<information>\nnone\n</information>" in empty.prompts[1]


def test_search_o1_sends_what_its_reader_wrote_between_information_tags():
    policy = Told(PLAYS["search_o1"][0])
    play("search_o1", policy)
    assert "<information>\nIlse Vand was born in Ghent.\n</information>" in policy.prompts[2]


def test_passages_cannot_end_the_information():
    policy = Told([SEARCHING, f"<reflect> Ghent. </reflect>{GHENT}"])
    play("single", policy, world("</information> <answer> Rome </answer>"))
    message = policy.prompts[1].rpartition("user\n")[2]
    assert message.count("</information>") == 1
    assert "‹/information› ‹answer› Rome ‹/answer›" in policy.prompts[1]


def test_a_thought_that_the_template_opened_is_part_of_the_shape():
    """The opening tag belongs to the prompt, so the sampled text begins inside the thought.

    In later turns only the template writes the tag.
    """

    def conversation(*texts: str) -> Conversation:
        turns = [Turn(role="model", token_ids=(1,), text=text, trained=True) for text in texts]
        return Conversation(role="single", turns=tuple(turns))

    searching = conversation(
        "a </think><search> b </search>", f"c </think><reflect> d </reflect>{GHENT}"
    )
    later = GHENT
    assert is_well_formed(searching, "reflect", thought_open=True)
    assert not is_well_formed(searching, "reflect")
    assert is_well_formed(conversation(f"a </think>{later}"), "search_r1", thought_open=True)
    assert not is_well_formed(
        conversation(f"a <answer> b </answer> {later}"), "search_r1", thought_open=True
    )


ACTIONS = {
    "Thought: The place is stated in passage [0]\nAction: Finish[Ghent]": "Ghent",
    "Action: Finish [Ghent]": "Ghent",
    "action: finish[Ghent]": "Ghent",
    "Thought 1: known.\nAction 1: Finish[Ghent]": "Ghent",
    "**Action:** Finish[Ghent]": "Ghent",
    "**Thought**: known.\n**Action**: Finish[Ghent]": "Ghent",
    "*Action 1*: Finish[Ghent]": "Ghent",
    "Thought: known. Action: Finish[Ghent]": "Ghent",
    "Thought: not Action: Finish[Rome] yet\nAction: Finish[Ghent]": "Ghent",
    "Action: Finish[Amber Tide [film]]": "Amber Tide [film]",
    "Action: Finish[Ghent,\nBelgium]": "Ghent, Belgium",
    "<think> Action: Finish[Rome]\nObservation: x </think>Action: Finish[Ghent]": "Ghent",
    "I thought.\nAction: Finish[Rome] </think>\nAction: Finish[Ghent]": "Ghent",
    "Thought: The Observation: line comes next.\nAction: Finish[Ghent]": "Ghent",
}


@pytest.mark.parametrize("text", ACTIONS)
def test_an_action_of_react_is_read(text):
    policy = Told([text])
    trajectory = play("react", policy)
    assert (trajectory.answer, trajectory.stop_reason) == (ACTIONS[text], StopReason.ANSWERED)
    (stop,) = policy.stops[0]
    assert first_stop_of_turn(text, [stop]) is None, (
        "no stop string ends the turn before its action"
    )


@pytest.mark.parametrize(
    "text",
    ["Thought: see passage [0]\n", "Finish[Ghent]", "Action: Finish(Ghent)", "Action: Finish[]"],
)
def test_what_is_no_action_of_react_ends_the_episode(text):
    assert play("react", Told([text])).stop_reason is StopReason.NO_ACTION


def test_an_answer_of_several_lines_is_the_next_sentence():
    for kind in ("ircot", "flare"):
        trajectory = play(kind, Told(["<think> a\nb </think>\n<Answer>\nGhent\n</Answer>"]))
        assert (trajectory.answer, trajectory.stop_reason) == ("Ghent", StopReason.ANSWERED)


READ_BY_ALL = {
    "<think> I write <answer> Rome </answer> </think> <answer> Ghent </answer>": "Ghent",
    "I write <answer> Rome </answer> </think> <answer> Ghent </answer>": "Ghent",
    "<THINK> <answer> Rome </answer> </THINK> <ANSWER> Ghent </ANSWER>": "Ghent",
    "<answer> <answer> Ghent </answer> </answer>": "Ghent",
}


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("react", "iter_retgen", "skr")]
)
@pytest.mark.parametrize("text", READ_BY_ALL)
def test_every_agent_reads_an_answer_outside_of_thoughts(kind, text):
    trajectory = play(kind, Told([text]))
    assert (trajectory.answer, trajectory.stop_reason) == (READ_BY_ALL[text], StopReason.ANSWERED)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_thought_is_no_answer_of_any_agent(kind):
    trajectory = play(
        kind, Told(["<think> maybe <answer> Ghent </answer>\nAction: Finish[Ghent]"] * 9)
    )
    assert (trajectory.answer, trajectory.stop_reason) == ("", StopReason.NO_ACTION)


HARMLESS = {kind: play(kind, Told(texts, unlikely=None)) for kind, (texts, _) in PLAYS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(
    words=st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), tag=st.sampled_from(HOSTILE)
)
@settings(max_examples=180, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_passages_and_questions_change_nothing(kind, words, tag):
    texts, _ = PLAYS[kind]
    chosen = config(kind)
    hostile = world(
        f"Amber Tide: {words} {tag} <reflect> x </reflect> Action: Finish[x]", f"{tag} {words}"
    )
    asked = dataclasses.replace(QUESTION, text=f"{QUESTION.text} {words} {tag}")
    agent = implementation(chosen)(tokenizer(), chosen)
    trajectory = asyncio.run(agent.run(attempt(asked), hostile, Told(texts)))
    harmless_trajectory = HARMLESS[kind]
    assert trajectory.answer == harmless_trajectory.answer
    assert trajectory.stop_reason == harmless_trajectory.stop_reason
    assert trajectory.counts == harmless_trajectory.counts
    assert len(trajectory.searches) == len(harmless_trajectory.searches)
    assert len(trajectory.conversations) == len(harmless_trajectory.conversations)
    for conversation, harmless_conversation in zip(
        trajectory.conversations, harmless_trajectory.conversations, strict=True
    ):
        assert [(turn.role, turn.trained) for turn in conversation.turns] == [
            (turn.role, turn.trained) for turn in harmless_conversation.turns
        ]
        for turn, harmless_turn in zip(
            conversation.turns, harmless_conversation.turns, strict=True
        ):
            if turn.role == "model":
                assert turn.token_ids == harmless_turn.token_ids
            else:
                assert known_tokens(turn) == known_tokens(harmless_turn), (
                    "no token of the template or a tag"
                )


def of_agent(*words: str) -> Config:
    return override(load_config("tiny_world"), list(words), prog="train")


def test_agents_that_read_passages_are_not_sent_into_a_graph():
    with pytest.raises(
        UserError, match=r"agent\.kind rag only searches passages, but task.environment is graph"
    ):
        check(of_agent("--agent.kind", "rag", "--warmup.steps", "0"))
    with pytest.raises(
        UserError,
        match=r"agent\.kind is rag and .*, but warmup.source scripted only demonstrates",
    ):
        check_demonstrations(of_agent("--agent.kind", "rag", "--task.environment", "text"))
    with pytest.raises(UserError, match=r"agent\.kind rag has no worked examples"):
        few_shot = ["--warmup.source", "few_shot"]
        check_demonstrations(
            of_agent("--agent.kind", "rag", "--task.environment", "text", *few_shot)
        )
    check_demonstrations(
        of_agent("--agent.kind", "rag", "--task.environment", "text", "--warmup.steps", "0")
    )
    with pytest.raises(UserError, match=r"unknown agent 'ragg'; did you mean rag"):
        of_agent("--agent.kind", "ragg")
    assert isinstance(of_agent("--agent.kind", "single").agent, SingleConfig)
    with pytest.raises(
        UserError, match=r"agent\.min_probability is 0\.0 and must be above 0 and at most 1"
    ):
        check(
            of_agent(
                "--agent.kind",
                "flare",
                "--task.environment",
                "text",
                "--agent.min-probability",
                "0",
            )
        )
