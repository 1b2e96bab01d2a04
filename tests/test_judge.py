"""A judge behind a scripted endpoint: strict words, failures, disagreement, and nothing asked twice."""

import dataclasses
from pathlib import Path

import pytest
from little_agent import QUESTION, ToldPolicy, answer, play
from local_endpoint import Answer, LocalEndpoint, Request, serving

from mujica_jax.config.fields import check_remote
from mujica_jax.config.schema import RemoteConfig
from mujica_jax.errors import UserError
from mujica_jax.methods.judge import Judge, Judgement
from mujica_jax.methods.remote import open_endpoint
from mujica_jax.metrics import normalise_squad
from mujica_jax.records import StopReason

# what was answered to a question whose answer is Ghent, what the judge says, and its verdict
SAID = [
    ("Ghent", "YES", True),
    ("the city of Ghent", "YES", True),  # no exact match
    ("Ghent, Belgium", "no", False),
    ("Gent", "Yes, because it is the same city", None),
    ("Ghentish", "", None),
    ("Gand", "500", None),
    ("Rome", " No. ", False),
]


def judged(endpoint: LocalEndpoint, tokenizer: Path) -> Judgement:
    remote = RemoteConfig(
        base_url=endpoint.base_url, model="judge", mode="chat", tokenizer=str(tokenizer), deadline_seconds=2.0
    )
    opened = open_endpoint(remote, tokenizer)
    questions = [dataclasses.replace(QUESTION, id=str(number)) for number in range(len(SAID) + 1)]
    episode = play(ToldPolicy([answer("Ghent")]))
    trajectories = [dataclasses.replace(episode, answer=given) for given, _, _ in SAID]
    trajectories.append(dataclasses.replace(episode, stop_reason=StopReason.NO_ACTION))
    judge = Judge(opened.generator, opened.tokenizer, opened.name)
    return judge.judge(questions, trajectories, "two_wiki")


def test_a_judge_says_yes_or_no_and_nothing_else(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replies = {f"Given answer: {normalise_squad(given)}": said for given, said, _ in SAID}

    def reply(request: Request, before: int) -> Answer:
        assert "YES" in request.body["messages"][0]["content"]
        asked = request.body["messages"][1]["content"]
        assert asked.endswith("Right answer: ghent") and QUESTION.text in asked
        said = replies[asked.splitlines()[1]]
        if said == "500":
            return Answer(status=500)
        message = {"role": "assistant", "content": said}
        return Answer(content={"choices": [{"message": message, "finish_reason": "stop"}]})

    with serving(reply) as endpoint:
        first = judged(endpoint, tokenizer)
        asked = len(endpoint.requests)
        again = judged(endpoint, tokenizer)
        kinds = [request.body["messages"][1]["content"] for request in endpoint.requests[asked:]]
    assert first.verdicts == again.verdicts == (*(verdict for *_, verdict in SAID), False), "the last gave no answer"
    failing = {f"Given answer: {normalise_squad(given)}" for given, _, verdict in SAID if verdict is None}
    assert {text.splitlines()[1] for text in kinds} == failing, "verdicts are kept, failures are not"
    summary = first.summary()
    assert (summary["judge"], summary["judge_failures"]) == (25.0, 3)
    assert (summary["judge_yes_not_exact"], summary["judge_no_but_exact"]) == (1, 0)


def test_disagreement_is_counted_by_hand():
    found = Judgement(verdicts=(True, True, False, None, False), exact=(True, False, True, True, False)).summary()
    assert (found["judge"], found["judge_failures"]) == (40.0, 1)
    assert (found["judge_yes_not_exact"], found["judge_no_but_exact"]) == (1, 1)


def test_half_a_judge_is_refused():
    with pytest.raises(UserError, match=r"--judge\.model is j and there is no endpoint: give --judge\.base-url too"):
        check_remote(RemoteConfig(model="j"), "judge")
