"""`eval` of a model behind an endpoint: started as users start it, against a server on this
machine; mistakes in one sentence.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mujica_jax.agents import protocol
from mujica_jax.commands import eval as evaluation
from mujica_jax.config.files import load_config
from mujica_jax.runs.setup import build_task
from tests.helpers.local_endpoint import Answer, Request, serving
from tests.helpers.paths import HELPERS, ROOT
from tests.helpers.patience import HANG_SECONDS

SMOKE = str(HELPERS / "smoke_config.py")
EXAMPLES = protocol.opening("planner", "graph", "few_shot").examples
LIMITS = [
    "--agent.max-trajectory-tokens",
    "20000",
    "--agent.max-turn-tokens",
    "400",
    "--eval.questions",
    "2",
]


def command(base_url: str, tokenizer: Path, *flags: str) -> list[str]:
    described = [
        "--remote.base-url",
        base_url,
        "--remote.model",
        "gpt-test",
        "--remote.mode",
        "chat",
    ]
    return [SMOKE, *described, "--remote.tokenizer", str(tokenizer), *flags]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "mujica_jax.eval", *arguments]
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "NO_PROXY": "*",
        "COLUMNS": "200",
    }
    return subprocess.run(
        program, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )


def test_a_model_behind_an_endpoint_is_scored_like_a_policy(tokenizer, tmp_path):
    """The model searches once and then answers the first question right.

    It answers the second one wrong, at once. The first request fails.
    """
    config = load_config(SMOKE)
    right, wrong = build_task(config).questions(config.eval.split)[:2]

    def reply(messages: list[dict[str, str]]) -> str:
        if "<select>" in messages[0]["content"]:
            return (
                "<think>The first.</think>\n<select>[0]</select>\n<sentence>It says so.</sentence>"
            )
        # The worked examples are chat turns before the question.
        shown = [text for exchange in EXAMPLES for text in exchange]
        assert [message["content"] for message in messages[1 : 1 + len(shown)]] == shown
        asked, *later = messages[1 + len(shown) :]
        if wrong.text in asked["content"]:
            return "<think>I guess.</think>\n<answer>Nobody at all</answer>"
        assert right.text in asked["content"]
        if later:
            assert "It says so." in later[-1]["content"], "what the worker found comes back"
            return f"<think>Done.</think>\n<answer>{right.answers[0]}</answer>"
        return '<think>I search.</think>\n<action>Search([0], "Who is it?")</action>'

    def answer(request: Request, before: int) -> Answer:
        if before == 0:
            return Answer(status=503)
        assert request.body["model"] == "gpt-test"
        assert request.path == "/v1/chat/completions"
        message = {"role": "assistant", "content": reply(request.body["messages"])}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return Answer(
            content={"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        )

    with serving(answer) as endpoint:
        done = run(
            tmp_path, *command(endpoint.base_url, tokenizer, "--agent.prompt", "few_shot", *LIMITS)
        )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "eval" / "tiny_world-graph-dev.json").read_text())
    for kind in ("greedy", "sampled"):
        assert result[kind]["em"] == 50.0
        assert result[kind]["questions"] == 2
        assert result[kind]["searches"] == 0.5
        assert result[kind]["stop_reasons"] == {"answered": 2}
    assert result["endpoint"] == endpoint.base_url
    assert result["model"] == "gpt-test"
    assert result["mode"] == "chat"
    assert result["prompt"] == "few_shot"
    assert "policy" not in result
    assert "checkpoint" not in result
    # Twice, greedily and sampled: a search, its worker and an answer, and an answer.
    counted = result["statistics"]
    assert counted["requests"] == 8
    assert counted["retries"] == 1
    assert counted["failed"] == 0
    assert counted["prompt_tokens"] == 800
    assert counted["generated_tokens"] == 80
    assert "8 requests, 1 retries, 0 failed; 800 prompt and 80 generated tokens" in " ".join(
        done.stdout.split()
    )
    predictions = (
        (tmp_path / "eval" / "tiny_world-graph-dev.predictions.jsonl").read_text().splitlines()
    )
    assert [json.loads(line)["prediction"] for line in predictions] == [
        right.answers[0],
        "Nobody at all",
    ]
    assert {request.body["temperature"] for request in endpoint.requests} == {0.0, 1.0}


def test_two_models_are_compared_question_by_question_over_several_samples(tokenizer, tmp_path):
    """The first model is always wrong.

    The second one is right at the first question greedily and in one of two samples: 50 EM, and
    half of it sampled.
    """
    config = load_config(SMOKE)
    question = build_task(config).questions(config.eval.split)[0]
    sampled_requests = []

    def reply_of(text: str) -> Answer:
        message = {"role": "assistant", "content": f"<think>So.</think>\n<answer>{text}</answer>"}
        return Answer(content={"choices": [{"message": message, "finish_reason": "stop"}]})

    def first_model(request: Request, before: int) -> Answer:
        return reply_of("Nobody at all")

    def second_model(request: Request, before: int) -> Answer:
        if question.text not in request.body["messages"][-1]["content"]:
            return reply_of("Nobody at all")
        if request.body["temperature"] > 0:
            sampled_requests.append(request)
            if len(sampled_requests) > 1:
                return reply_of("Nobody at all")
        return reply_of(question.answers[0])

    flags = [*LIMITS, "--samples", "2", "--out"]
    with serving(first_model) as endpoint:
        done = run(tmp_path, *command(endpoint.base_url, tokenizer, *flags, "first"))
    assert done.returncode == 0, done.stderr
    earlier = "first/tiny_world-graph-dev.json"
    with serving(second_model) as endpoint:
        words = command(endpoint.base_url, tokenizer, *flags, "second", "--beside", earlier)
        done = run(tmp_path, *words)
        other_questions = [*words, "--eval.questions", "3"]
        refused = run(tmp_path, *other_questions)
    assert done.returncode == 0, done.stderr
    assert len(sampled_requests) == 2

    result = json.loads((tmp_path / "second" / "tiny_world-graph-dev.json").read_text())
    assert result["greedy"]["em"] == 50.0
    assert result["sampled"]["em"] == 25.0
    assert result["sampled"]["questions"] == 2
    assert result["sampled"]["stop_reasons"] == {"answered": 4}
    differences = {name: values["difference"] for name, values in result["beside"].items()}
    assert differences["em"] == 50.0
    assert differences["em_sampled"] == 25.0
    assert "+25.0 (+0.0 to +50.0)" in done.stdout
    assert refused.returncode == 2
    assert f"--beside {earlier} has 2 questions and this evaluation has 3" in refused.stderr


def test_the_commands_of_the_document_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(
        r"^```\n(.*?)^```",
        (ROOT / "docs" / "guides" / "endpoints.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    lines = [
        line
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("python -m mujica_jax.eval")
    ]
    command_lines = [evaluation.command_line(shlex.split(line)[3:]) for line in lines]
    assert [options.remote.mode for options, _ in command_lines] == ["chat", "completions"]
    assert {config.agent.prompt for _, config in command_lines} == {"few_shot"}


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Call eval with a mistake, and return the sentence it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        assert evaluation.main(arguments) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: "), message
        assert message.count("\n") == 1, message
        assert not (tmp_path / "eval").exists()
        return message

    return call


def test_an_endpoint_that_is_down_ends_with_one_sentence(
    turned_clock, tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as unused:
        # The port is taken, and no program listens.
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert (
            evaluation.main(command(url, tokenizer, *LIMITS, "--remote.deadline-seconds", "2")) == 2
        )
    message = capsys.readouterr().err
    assert message.startswith(f"error: {url}/chat/completions gave no answer within")
    assert message.count("\n") == 1
    assert "ConnectError" in message


URL = "http://127.0.0.1:9/v1"


def test_an_endpoint_is_described_wholly(refused, tokenizer):
    whole = command(URL, tokenizer)
    for flag in ("model", "mode", "tokenizer"):
        place = whole.index(f"--remote.{flag}")
        message = refused(*whole[:place], *whole[place + 2 :])
        assert f"--remote.base-url is {URL}, but --remote.{flag} is missing" in message


def test_a_described_endpoint_needs_an_address(refused):
    message = refused(SMOKE, "--checkpoint", "x", "--remote.model", "gpt-4.1")
    assert "--remote.model is gpt-4.1, but there is no endpoint: add --remote.base-url" in message
    alone = refused(SMOKE, "--remote.model", "gpt-4.1")
    assert (
        "--remote.model is given without the address of an endpoint: add --remote.base-url" in alone
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--remote.concurrency", "0"], "--remote.concurrency is 0 and must be at least 1"),
        (
            ["--remote.timeout-seconds", "-1"],
            "--remote.timeout-seconds is -1.0 and must be above 0",
        ),
        (
            ["--remote.deadline-seconds", "nan"],
            "--remote.deadline-seconds is nan and must be above 0",
        ),
        (["--remote.api-key-variable", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--policy", "3"], "--policy is 3, but http"),
        (
            ["--checkpoint", "run"],
            "an endpoint needs the name of a configuration and excludes a checkpoint",
        ),
    ],
)
def test_flags_that_do_not_fit_are_explained(refused, tokenizer, flags, sentence):
    assert sentence in refused(*command(URL, tokenizer, *flags))


def test_an_endpoint_needs_a_configuration(refused, tokenizer):
    message = refused(*command(URL, tokenizer)[1:])
    assert f"`python -m mujica_jax.eval tiny_world --remote.base-url {URL} ...`" in message


def test_an_address_without_server_and_a_folder_without_tokenizer_are_named(
    refused, tokenizer, tmp_path
):
    assert "names no server" in refused(*command("localhost:8000/v1", tokenizer))
    assert "has no tokenizer.json" in refused(*command(URL, tmp_path))


def test_a_mistyped_flag_is_answered_with_the_right_one(capsys, tokenizer):
    with pytest.raises(SystemExit) as ended:
        evaluation.main(command(URL, tokenizer, "--remote.modle", "x"))
    assert ended.value.code == 2
    assert "--remote.model" in capsys.readouterr().err
