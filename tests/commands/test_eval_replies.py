"""`eval` of an endpoint whose model now and then gives no usable reply: the episode ends, the
evaluation does not.
"""

import json
from collections import Counter

import pytest

from mujica_jax.commands import eval as evaluation
from mujica_jax.commands import index
from mujica_jax.inference.remote import generator
from tests.commands.test_eval_endpoint import command
from tests.helpers.local_endpoint import Answer, Request, serving

ANSWER = "<answer> Ghent </answer>"
QUESTIONS = 6
# What the model's reply to question 0 is, and how its episode ends.
REPLIES = {
    "no text, it thought for all its tokens": (
        {"content": None, "reasoning_content": "hm"},
        "length",
        "turn_length",
    ),
    "cut in the middle": ({"content": "<think> and so"}, "length", "turn_length"),
    "a filter": ({"content": None}, "content_filter", "filtered"),
    "a filter that leaves a part": ({"content": ANSWER}, "content_filter", "filtered"),
    "a refusal": ({"content": None, "refusal": "I cannot help with that."}, "stop", "filtered"),
    "a part that is a refusal": (
        {"content": [{"type": "refusal", "refusal": "no"}]},
        "stop",
        "filtered",
    ),
    "parts without text": (
        {"content": [{"type": "image_url", "image_url": {}}]},
        "stop",
        "no_action",
    ),
    "parts of text": ({"content": [{"type": "text", "text": ANSWER}]}, "stop", "answered"),
    "an unknown end": ({"content": ANSWER}, "tool_calls", "bad_reply"),
    "no end": ({"content": ANSWER}, None, "bad_reply"),
    "an end of another server": ({"content": ANSWER}, "eos", "answered"),
    "an end in capital letters": ({"content": ANSWER}, "STOP", "answered"),
    "cut, in capital letters": ({"content": "and so"}, "MAX_TOKENS", "turn_length"),
    "a filter of another server": ({"content": None}, "RECITATION", "filtered"),
    "no message": (None, "stop", "bad_reply"),
}
# What the server answers in the place of a reply: status, body, and how the episode ends.
ERRORS = {
    "an error with status 200": (
        200,
        {"error": {"message": "provider returned error", "code": 502}},
        "bad_reply",
    ),
    "no choices": (200, {"choices": []}, "bad_reply"),
    "a prompt that is too long": (
        400,
        {"error": {"message": "maximum context length is 4096"}},
        "bad_reply",
    ),
    "a filter with status 400": (
        400,
        {"error": {"code": "content_filter", "message": "content_filter"}},
        "filtered",
    ),
    "a request that is too large": (413, {"error": "too large"}, "bad_reply"),
    "a filter with status 403": (
        403,
        {"error": {"message": "your input was flagged by moderation"}},
        "filtered",
    ),
    "withheld for legal reasons": (451, {"error": "unavailable"}, "filtered"),
    # Of the server itself, each time that the request is sent:
    "status 500": (500, {"error": "context length exceeded"}, "bad_reply"),
    "a page": (200, b"<html>gateway</html>", "bad_reply"),
    "nothing": (200, b"", "bad_reply"),
    "a list": (200, [], "bad_reply"),
    "a stream": (200, b'data: {"choices":[]}\n\n', "bad_reply"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> list[str]:
    """Return flags of a task with its questions and an index."""
    folder = tmp_path_factory.mktemp("task")
    lines = [f"Where was person {number} born?,Ghent" for number in range(QUESTIONS)]
    (folder / "questions.csv").write_text("\n".join(["Question,Answer", *lines]) + "\n")
    corpus = folder / "corpus.jsonl"
    built = folder / "index"
    corpus.write_text(
        '{"title": "Ghent", "text": "A town."}\n{"title": "Bruges", "text": "Another town."}\n'
    )
    assert (
        index.main(["build", "--corpus", str(corpus), "--kind", "bm25", "--out", str(built)]) == 0
    )
    flags = ["--task.data-dir", str(folder), "--task.index", str(built), "--task.retriever", "bm25"]
    return [*flags, "--task.top-k", "2", "--task.dev-percent", "0"]


def reply(message: object, finish: object) -> dict:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def evaluate(
    monkeypatch, tmp_path, tokenizer, task, first: Answer, others: Answer | None = None
) -> dict:
    """Return the greedy part of the result, where question 0 gets the `first` answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual = others or Answer(content=reply({"role": "assistant", "content": ANSWER}, "stop"))

    def answer(request: Request, before: int) -> Answer:
        return first if "person 0" in request.body["messages"][-1]["content"] else usual

    with serving(answer) as endpoint:
        flags = command(
            endpoint.base_url, tokenizer, "--agent.kind", "direct", "--no-sampled", *task
        )
        status = evaluation.main(
            ["nq_qwen3_4b_v5e", "--task.kind", "bamboogle", *flags[1:], "--eval.split", "test"]
        )
    assert status == 0
    return json.loads((tmp_path / "eval" / "bamboogle-text-direct-test.json").read_text())["greedy"]


def check(result: dict, ends: str) -> None:
    is_right = ends == "answered"
    assert result["questions"] == QUESTIONS
    assert result["em"] == pytest.approx(100 * (QUESTIONS - 1 + is_right) / QUESTIONS, abs=0.01)
    assert result["stop_reasons"] == dict(Counter(["answered"] * (QUESTIONS - 1) + [ends]))


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_cannot_be_used_ends_its_episode(name, monkeypatch, tmp_path, tokenizer, task):
    message, finish, ends = REPLIES[name]
    check(
        evaluate(monkeypatch, tmp_path, tokenizer, task, Answer(content=reply(message, finish))),
        ends,
    )


@pytest.mark.parametrize("name", ERRORS)
def test_a_request_that_is_refused_ends_its_episode(name, monkeypatch, tmp_path, tokenizer, task):
    # This is the wait between two attempts.
    monkeypatch.setattr(generator, "MAX_WAIT_SECONDS", 0.01)
    status, body, ends = ERRORS[name]
    check(
        evaluate(monkeypatch, tmp_path, tokenizer, task, Answer(status=status, content=body)), ends
    )


def test_an_endpoint_that_refuses_everything_has_no_score(
    monkeypatch, tmp_path, tokenizer, task, capsys
):
    refusal = Answer(status=400, content={"error": {"message": "seed is not supported"}})
    with pytest.raises(AssertionError, match="assert 2 == 0"):
        evaluate(monkeypatch, tmp_path, tokenizer, task, refusal, refusal)
    messages = capsys.readouterr().err
    assert f"refused all of {QUESTIONS} requests. The last refusal was: " in messages
    assert "seed is not supported" in messages
    assert not (tmp_path / "eval" / "bamboogle-text-direct-test.json").exists()
