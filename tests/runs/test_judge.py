"""A judge behind a scripted endpoint: strict words, failures, disagreement, nothing asked twice,
and its rewards.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.config.checks import check, check_judge_is_asked, check_remote
from mujica_jax.config.files import load_config
from mujica_jax.config.methods import StagedRewardConfig
from mujica_jax.config.schema import Config, FaultConfig, JudgeConfig, RemoteConfig
from mujica_jax.errors import StoreError, UserError
from mujica_jax.inference.requests import RequestError
from mujica_jax.metrics import normalise_squad
from mujica_jax.records import Search, StopReason, Trajectory
from mujica_jax.retrieval.search_cache import SearchCache
from mujica_jax.rewards.reward import NoVerdictError, find_reward
from mujica_jax.runs.judge import Judge, JudgeLostError, Judgement, RunVerdicts, open_judge
from mujica_jax.runs.parts import make_reward
from mujica_jax.trajectories.store import Store
from tests.helpers.little_agent import QUESTION, ToldPolicy, answer, play
from tests.helpers.local_endpoint import Answer, LocalEndpoint, Request, serving
from tests.helpers.paths import HELPERS
from tests.helpers.turned_clock import TurnedClock

SMOKE = load_config(str(HELPERS / "smoke_config.py"))
# what was answered to a question whose answer is Ghent, what the judge says, and its verdict
PREDICTIONS = [
    ("Ghent", "YES", True),
    ("the city of Ghent", "YES", True),  # no exact match
    ("Ghent, Belgium", "no", False),
    ("Gent", "Yes, because it is the same city", None),
    ("Ghentish", "", None),
    ("Gand", "500", None),
    ("Rome", " No. ", False),
]


@pytest.fixture(autouse=True)
def clock(turned_clock) -> TurnedClock:
    """No test of this module depends on how fast the machine is."""
    return turned_clock


def episode(prediction: str, **changes) -> Trajectory:
    return dataclasses.replace(play(ToldPolicy([answer("Ghent")])), answer=prediction, **changes)


def chat_reply(text: str) -> Answer:
    message = {"role": "assistant", "content": text}
    return Answer(content={"choices": [{"message": message, "finish_reason": "stop"}]})


def prediction_in(request: Request) -> str:
    """Return the prediction that the judge is asked about."""
    lines = request.body["messages"][1]["content"].splitlines()
    return next(
        line.removeprefix("Prediction: ") for line in lines if line.startswith("Prediction: ")
    )


def config_of(endpoint: LocalEndpoint, tokenizer: Path, reward: str = "judge", **changes) -> Config:
    judge = JudgeConfig(
        base_url=endpoint.base_url,
        model="judge",
        mode="chat",
        tokenizer=str(tokenizer),
        deadline_seconds=2.0,
    )
    return dataclasses.replace(SMOKE, reward=reward, judge=dataclasses.replace(judge, **changes))


def opened(config: Config, verdicts=None) -> Judge:
    judge = open_judge(config, verdicts, out=Path())
    assert judge is not None
    return judge


def judged(config: Config) -> Judgement:
    trajectories = [episode(prediction) for prediction, _, _ in PREDICTIONS]
    trajectories.append(episode("Ghent", stop_reason=StopReason.NO_ACTION))
    trajectories.append(episode("Ghent", stop_reason=StopReason.RETRIEVER_FAILED))
    questions = [
        dataclasses.replace(QUESTION, id=str(number)) for number in range(len(trajectories))
    ]
    return opened(config).judge(questions, trajectories, "two_wiki")


@pytest.mark.parametrize("show_question", [False, True])
def test_a_judge_says_yes_or_no_and_nothing_else(tokenizer, tmp_path, monkeypatch, show_question):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replies = {normalise_squad(prediction): text for prediction, text, _ in PREDICTIONS}

    def reply(request: Request, before: int) -> Answer:
        assert "YES" in request.body["messages"][0]["content"]
        shown = request.body["messages"][1]["content"]
        expected = [f"Prediction: {prediction_in(request)}", "Reference: ghent"]
        if show_question:
            expected.insert(0, f"Question: {QUESTION.text}")
        assert shown.splitlines() == expected
        text = replies[prediction_in(request)]
        return Answer(status=500) if text == "500" else chat_reply(text)

    with serving(reply) as endpoint:
        config = config_of(endpoint, tokenizer, show_question=show_question)
        first = judged(config)
        asked = len(endpoint.requests)
        repeated = judged(config)
        kinds = {prediction_in(request) for request in endpoint.requests[asked:]}
    assert (
        first.verdicts == repeated.verdicts == (*(verdict for *_, verdict in PREDICTIONS), False)
    ), "the last gave no answer"
    failing = {
        normalise_squad(prediction) for prediction, _, verdict in PREDICTIONS if verdict is None
    }
    assert kinds == failing, "verdicts are kept, failures are not"
    summary = first.summary()
    # Right are 2 of the 5 that have a verdict.
    assert summary["judge"] == 40.0
    assert summary["judge_failures"] == 3
    assert summary["judge_yes_not_exact"] == 1
    assert summary["judge_no_but_exact"] == 0


def test_disagreement_is_counted_by_hand():
    counts = Judgement(
        verdicts=(True, True, False, None, False), exact=(True, False, True, True, False)
    ).summary()
    # Right are 2 of 4: a failing judge is not the policy's fault.
    assert counts["judge"] == 50.0
    assert counts["judge_failures"] == 1
    assert counts["judge_yes_not_exact"] == 1
    assert counts["judge_no_but_exact"] == 1
    nothing = Judgement(verdicts=(None,), exact=(True,)).summary()
    assert nothing["judge"] is None
    assert nothing["judge_interval"] is None


def test_half_a_judge_is_refused():
    with pytest.raises(
        UserError, match=r"--judge\.model is j, but there is no endpoint: add --judge\.base-url"
    ):
        check_remote(RemoteConfig(model="j"), "judge")


# As a reward


def yes_if(right: Callable[[str], bool]) -> Callable[[Request, int], Answer]:
    return lambda request, before: chat_reply("YES" if right(prediction_in(request)) else "NO")


def earned(
    config: Config, *trajectories: Trajectory, verdicts=None, stage_round: int = 0
) -> list[Trajectory]:
    """Reward all episodes at the same time, as `run_episodes` does."""
    reward = make_reward(config, "two_wiki", opened(config, verdicts)).at(stage_round)

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(
            *(reward.rewarded(trajectory, QUESTION) for trajectory in trajectories)
        )

    return asyncio.run(all_of_them())


def test_a_judge_gives_the_reward_and_equal_answers_are_asked_about_once(tokenizer, tmp_path):
    # The first three are equal when normalised.
    answers = ["Gent", "Gent", "gent.", "Rome"]
    unanswered = episode("Gent", stop_reason=StopReason.ITERATION_LIMIT)
    with serving(yes_if(lambda prediction: prediction == "gent")) as endpoint:
        config = config_of(endpoint, tokenizer)
        trajectories = earned(
            config, *map(episode, answers), unanswered, verdicts=RunVerdicts(Store(tmp_path))
        )
        assert sorted(map(prediction_in, endpoint.requests)) == ["gent", "rome"]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert trajectories[0].rewards_by_part == {"judge": 1.0}


def test_staged_rewards_by_a_judge_worked_by_hand(tokenizer, tmp_path):
    """ "Gent" is no exact match, and right by the judge.

    It earns 1 in stage one and 1 - 2 x 0.3 in stage two; "Rome" earns -1 + 2 x 0.3 and -1. The
    format earns 1. The two queries share no word, so the search part is 0.
    """
    searches = tuple(
        Search(iteration=place, query=query)
        for place, query in enumerate(("amber tide", "vandermark"))
    )
    gent, rome = (episode(prediction, searches=searches) for prediction in ("Gent", "Rome"))
    staged = StagedRewardConfig(correctness="judge", stage_two_round=3)
    with serving(yes_if(lambda prediction: prediction == "gent")) as endpoint:
        config = dataclasses.replace(config_of(endpoint, tokenizer, "staged"), staged=staged)
        totals = [
            trajectory.reward
            for number in (2, 3)
            for trajectory in earned(
                config, gent, rome, verdicts=RunVerdicts(Store(tmp_path)), stage_round=number
            )
        ]
    assert totals == pytest.approx([2.0, 0.6, 1.4, 0.0])


def test_a_run_that_goes_on_asks_nothing_twice_whatever_the_judge_says_now(tokenizer, tmp_path):
    with serving(yes_if(lambda prediction: True)) as endpoint:
        config = config_of(endpoint, tokenizer)
        (before,) = earned(config, episode("Gent"), verdicts=RunVerdicts(Store(tmp_path)))
    # The judge has another address and gives other verdicts.
    with serving(yes_if(lambda prediction: False)) as endpoint:
        (after,) = earned(
            config_of(endpoint, tokenizer), episode("Gent"), verdicts=RunVerdicts(Store(tmp_path))
        )
        assert endpoint.requests == []
        (other,) = earned(
            config_of(endpoint, tokenizer, model="other"),
            episode("Gent"),
            verdicts=RunVerdicts(Store(tmp_path)),
        )
        (shown,) = earned(
            config_of(endpoint, tokenizer, show_question=True),
            episode("Gent"),
            verdicts=RunVerdicts(Store(tmp_path)),
        )
    assert before.reward == 1.0
    assert after.reward == 1.0
    # Another model or another prompt is asked anew.
    assert other.reward == 0.0
    assert shown.reward == 0.0


def test_of_two_processes_the_first_verdict_stays(tmp_path):
    verdicts = RunVerdicts(Store(tmp_path))
    assert verdicts.read("ab12") is None
    assert verdicts.write("ab12", "YES") == "YES"
    assert RunVerdicts(Store(tmp_path)).write("ab12", "NO") == "YES"
    assert json.loads((tmp_path / "verdicts" / "ab" / "ab12.json").read_text()) == {"reply": "YES"}


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"reply": 5}', '{"reply": "perhaps"}'])
def test_a_damaged_verdict_of_a_run_is_one_sentence(damage, tmp_path):
    (tmp_path / "verdicts" / "ab").mkdir(parents=True)
    (tmp_path / "verdicts" / "ab" / "ab12.json").write_text(damage)
    with pytest.raises(StoreError, match=r"ab12.json does not hold a verdict: remove this file"):
        RunVerdicts(Store(tmp_path)).read("ab12")


def test_a_kept_reply_that_is_no_verdict_is_asked_about_again(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(yes_if(lambda prediction: True)) as endpoint:
        config = config_of(endpoint, tokenizer)
        assert [episode.reward for episode in earned(config, episode("Gent"))] == [1.0]
        cache = SearchCache(tmp_path / "mujica_jax" / "verdicts", "replies")
        with contextlib.closing(sqlite3.connect(cache.path)) as database:
            with database:
                assert database.execute("UPDATE hits SET found = 'YE'").rowcount == 1
            assert [episode.reward for episode in earned(config, episode("Gent"))] == [1.0]
            assert len(endpoint.requests) == 2
            assert database.execute("SELECT found FROM hits").fetchall() == [("YES",)]


def test_an_answer_of_articles_reaches_the_judge_as_it_is_written(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    band = dataclasses.replace(QUESTION, answers=("The The",))
    with serving(yes_if(lambda prediction: True)) as endpoint:
        judge = open_judge(config_of(endpoint, tokenizer), None, out=tmp_path)
        assert judge is not None
        assert asyncio.run(judge(band, "A"))
        (request,) = endpoint.requests
    assert request.body["messages"][1]["content"].splitlines() == [
        "Prediction: A",
        "Reference: The The",
    ]


def test_an_answer_without_a_verdict_is_left_out_and_a_judge_that_is_gone_ends_the_program(
    tokenizer, tmp_path
):
    # refused: it is not asked again
    with serving(lambda request, before: Answer(status=400)) as endpoint:
        config = dataclasses.replace(
            config_of(endpoint, tokenizer), faults=FaultConfig(max_in_a_row=2)
        )
        two = earned(
            config, episode("Gent"), episode("Rome"), verdicts=RunVerdicts(Store(tmp_path))
        )
        assert [trajectory.is_rewarded for trajectory in two] == [False, False]
        assert [trajectory.reward for trajectory in two] == [0.0, 0.0]
        sentence = (
            r"the judge judge gave no verdict 3 times in a row, but faults\.max_in_a_row is 2\. "
            r"The last error: .*400"
        )
        with pytest.raises(JudgeLostError, match=sentence):
            earned(
                config,
                *map(episode, ("Gent", "Rome", "Gand")),
                verdicts=RunVerdicts(Store(tmp_path)),
            )
        with pytest.raises(
            UserError, match=r"the judge judge gives no verdict .*: check --judge\.base-url"
        ):
            opened(config).check()
    assert list(tmp_path.rglob("*.json")) == [], "nothing is kept of a failure"


def test_a_judge_that_never_answers_has_a_deadline(clock, tokenizer):
    silent = Answer(fault="silent", meanwhile=lambda: clock.turn(0.11))
    with serving(lambda request, before: silent) as endpoint:
        config = config_of(endpoint, tokenizer, deadline_seconds=0.3, timeout_seconds=0.1)
        with pytest.raises(UserError, match=r"gave no answer within the deadline of 0\.3 s"):
            opened(config).check()


class Slow:
    """Gives one verdict after the other, and counts what is under way."""

    def __init__(self, replies: list[str]) -> None:
        self.replies = replies
        self.under_way = 0
        self.max_under_way = 0

    async def generate(self, prompt, params, *, continues=False):
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        reply = self.replies.pop(0)
        if reply == "fails":
            raise RequestError("it failed")
        from tests.helpers.little_agent import completion

        return completion(reply)


def test_failures_count_in_a_row_only_and_requests_wait_for_a_place(tmp_path):
    from tests.helpers.little_agent import tokenizer as little_tokenizer

    slow = Slow(["fails", "fails", "YES", "fails", "NO", "fails"])
    judge = Judge(
        slow,
        little_tokenizer(),
        "judge",
        concurrency=1,
        verdicts=RunVerdicts(Store(tmp_path)),
        max_failures_in_a_row=2,
    )

    async def all_of_them() -> list[bool | BaseException]:
        asked = (judge(QUESTION, f"answer {number}") for number in range(6))
        return await asyncio.gather(*asked, return_exceptions=True)

    verdicts = asyncio.run(all_of_them())
    assert sum(isinstance(verdict, NoVerdictError) for verdict in verdicts) == 4
    assert [verdict for verdict in verdicts if isinstance(verdict, bool)] == [True, False]
    assert slow.max_under_way == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"reward": "judge"},
            "the reward judge needs a judge, but judge.base_url is None: give --judge.base-url",
        ),
        (
            {"reward": "staged", "staged": StagedRewardConfig(correctness="judge")},
            "the reward staged with staged.correctness judge needs a judge, but judge.base_url is "
            "None",
        ),
        (
            {"reward": "staged", "staged": StagedRewardConfig(unified=True, stage_two=False)},
            "staged.unified is True, but staged.stage_one is True and staged.stage_two False: set "
            "both stages to True",
        ),
        ({"faults": FaultConfig(repeats=-1)}, "faults.repeats is -1 and must be at least 0"),
        ({"faults": FaultConfig(repeats=101)}, "faults.repeats is 101 and must be at most 100"),
        (
            {"faults": FaultConfig(max_in_a_row=0)},
            "faults.max_in_a_row is 0 and must be at least 1",
        ),
        (
            {"judge": JudgeConfig(show_question=True)},
            "--judge.show-question is True, but there is no endpoint",
        ),
    ],
)
def test_a_reward_without_its_judge_is_refused(changes, sentence):
    with pytest.raises(UserError) as refused:
        check(dataclasses.replace(SMOKE, **changes))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "asking"), [("judge", "judge"), ("staged", "staged with staged.correctness judge")]
)
def test_a_reward_that_asks_a_judge_is_not_made_without_one(name, asking):
    with pytest.raises(
        UserError, match=f"the reward {re.escape(asking)} needs a judge and there is none"
    ):
        find_reward(name, "two_wiki", StagedRewardConfig(correctness="judge"))


def test_a_judge_that_nothing_asks_is_refused_where_a_run_is_trained(tokenizer):
    judge = JudgeConfig(
        base_url="http://localhost:1/v1", model="m", mode="chat", tokenizer=str(tokenizer)
    )
    config = dataclasses.replace(SMOKE, judge=judge)
    with pytest.raises(
        UserError,
        match=r"judge\.base_url is http://localhost:1/v1, but the reward f1 asks no judge",
    ):
        check_judge_is_asked(config)
    check_judge_is_asked(dataclasses.replace(config, reward="judge"))
    unused = dataclasses.replace(
        config, reward="staged", staged=StagedRewardConfig(correctness="judge", answer=False)
    )
    with pytest.raises(UserError, match="the reward staged asks no judge"):
        check_judge_is_asked(unused)


def test_an_evaluation_has_the_judge_of_its_run_unless_another_reward_is_named(tokenizer, tmp_path):
    judge = JudgeConfig(
        base_url="http://localhost:1/v1", model="m", mode="chat", tokenizer=str(tokenizer)
    )
    trained = dataclasses.replace(SMOKE, reward="judge", judge=judge)
    config = {"config": dataclasses.asdict(trained)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options, config = evaluation.command_line(["--checkpoint", str(tmp_path)])
    assert options.judge == config.judge == judge
    assert config.reward == "judge"
    options, config = evaluation.command_line(["--checkpoint", str(tmp_path), "--reward", "em"])
    assert options.judge.base_url is None
    assert config.judge.base_url is None
    flags = ["--judge.base-url", "http://other/v1", "--faults.repeats", "5"]
    options, config = evaluation.command_line(["--checkpoint", str(tmp_path), *flags])
    assert options.judge.base_url == "http://other/v1"
    assert config.judge.model == "m"
    assert config.faults.repeats == 5
