"""A whole run that a judge rewards. The judge changes its mind when it is asked again, so only kept
verdicts give a killed run the numbers of an undisturbed one.
"""

import signal
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.local_endpoint import Answer, LocalEndpoint, Request, serving
from tests.helpers.whole_runs import CONFIG, disturbed, outcome, rest


def judge_of_two_minds() -> Callable[[Request, int], Answer]:
    """Return a judge that contradicts itself when it is asked again."""
    asked: Counter[str] = Counter()

    def reply(request: Request, before: int) -> Answer:
        text = request.body["messages"][1]["content"]
        says_yes = (zlib.crc32(text.encode()) + asked[text]) % 2 == 0
        asked[text] += 1
        message = {"role": "assistant", "content": "YES" if says_yes else "NO"}
        return Answer(content={"choices": [{"message": message, "finish_reason": "stop"}]})

    return reply


def words(directory: Path, endpoint: LocalEndpoint, tokenizer: Path) -> dict:
    judge = [
        "--judge.base-url",
        endpoint.base_url,
        "--judge.model",
        "judge",
        "--judge.mode",
        "chat",
    ]
    judge += ["--judge.tokenizer", str(tokenizer), "--judge.concurrency", "1"]
    flags = ["--reward", "judge", "--eval.no-control", "--run", str(directory)]
    return {"words": [str(CONFIG), *flags, *judge], "own_rewards": True}


@pytest.mark.slow
def test_a_killed_run_with_a_judge_asks_nothing_twice_and_ends_with_the_same_numbers(
    tokenizer, tmp_path
):
    with serving(judge_of_two_minds()) as endpoint:
        undisturbed = tmp_path / "undisturbed"
        rest(undisturbed, **words(undisturbed, endpoint, tokenizer))
        predictions = [request.body["messages"][1]["content"] for request in endpoint.requests[1:]]
        assert len(predictions) == len(set(predictions)) > 0
        assert len(list(undisturbed.glob("verdicts/*/*.json"))) == len(predictions)
        asked = len(endpoint.requests)
        rest(undisturbed, **words(undisturbed, endpoint, tokenizer))
        assert len(endpoint.requests) == asked, (
            "a finished run asks nothing, not even whether the judge is there"
        )
    with serving(judge_of_two_minds()) as endpoint:
        killed = tmp_path / "killed"
        starts = [
            {
                **words(killed, endpoint, tokenizer),
                "signal": signal.SIGKILL.name,
                "phase": phase,
                "update": update,
            }
            for phase, update in {
                "warm-up: learning": 3,
                "round 1: sampling": 4,
                "round 2: sampling": 2,
            }.items()
        ]
        ends = disturbed(killed, *starts)
        assert [end.status for end in ends] == [-9] * 3, [end.messages for end in ends]
        rest(killed, **words(killed, endpoint, tokenizer))
        texts = Counter(request.body["messages"][1]["content"] for request in endpoint.requests)
        (check, starts_of_runs), *others = texts.most_common()
        assert check == "Prediction: paris\nReference: paris"
        assert starts_of_runs == 4
        assert {count for _, count in others} == {1}
        assert {text for text, _ in others} == set(predictions)
    assert outcome(killed) == outcome(undisturbed)


@pytest.mark.slow
def test_a_run_whose_judge_never_answers_ends_before_it_begins(tokenizer, tmp_path):
    with serving(lambda request, before: Answer(fault="silent")) as endpoint:
        flags = words(tmp_path / "run", endpoint, tokenizer)
        flags["words"] += ["--judge.deadline-seconds", "1"]
        (ended,) = disturbed(tmp_path / "run", flags)
    assert ended.status == 2
    assert "Traceback" not in ended.messages
    messages = " ".join(ended.messages.split())
    assert "the judge judge gives no verdict" in messages
    assert "within the deadline of 1 s" in messages
    assert not (tmp_path / "run").exists()
