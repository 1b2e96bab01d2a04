"""The program that serves a policy: started as a user starts it, asked over its port, and ended by
a signal.
"""

import contextlib
import dataclasses
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from mujica_jax.commands import serve
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import save_checkpoint
from tests.helpers.packed_rows import MODEL
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.tiny_models import filled_decoder
from tests.helpers.whole_runs import ENVIRONMENT

SIZES = [
    "--max-tokens",
    "64",
    "--max-new-tokens",
    "8",
    "--dtype",
    "float32",
    "--engine.max-num-seqs",
    "2",
]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    tokenizer = Tokenizer.train(iter(["Who is the director of The Purple Shore?"]), 300)
    sized = dataclasses.replace(
        MODEL, vocab_size=tokenizer.vocab_size, eos_token_ids=tuple(tokenizer.stop_token_ids)
    )
    save_checkpoint(filled_decoder(sized), tmp_path / "checkpoint", tokenizer=tokenizer)
    return tmp_path / "checkpoint"


@contextlib.contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start the program, and yield it with the lines that it printed until it serves."""
    command = [sys.executable, "-m", "mujica_jax.serve", *words]
    server = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("serving"):
            line = server.stdout.readline()
            if not line:
                raise AssertionError(server.communicate()[1])
            lines.append(line)
        yield server, lines
    finally:
        server.kill()


@pytest.mark.parametrize("kind", ["native", "jetstream"])
def test_a_checkpoint_is_served_until_a_signal_comes(checkpoint, kind):
    """Two clients ask: OpenAI's, and the stub of JetStream's protocol. Either engine answers."""
    words = [str(checkpoint), "--port", "0", "--grpc-port", "0", *SIZES, "--engine.kind", kind]
    with started(*words) as (server, lines):
        grpc_address = re.fullmatch(r"gRPC .* at (127.0.0.1:\d+)\n", lines[0])
        served = re.fullmatch(r"serving .*checkpoint at (http://127.0.0.1:\d+); .*\n", lines[1])
        assert grpc_address
        assert served

        client = openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", timeout=HANG_SECONDS)
        assert [model.id for model in client.models.list()] == ["policy"]
        messages = [{"role": "user", "content": "Who is the director?"}]
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
        assert 0 < answer.usage.completion_tokens <= 5

        with grpc.insecure_channel(grpc_address[1]) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            text = jetstream_pb2.DecodeRequest.TextContent(text="Who is the director?")
            answers = stub.Decode(
                jetstream_pb2.DecodeRequest(text_content=text, max_tokens=5), timeout=HANG_SECONDS
            )
            tokens = [
                token for chunks in answers for token in chunks.stream_content.samples[0].token_ids
            ]
        assert 0 < len(tokens) <= 5
        with urllib.request.urlopen(f"{served[1]}/metrics") as page:
            assert b"mujica_requests_total 2.0" in page.read()

        server.send_signal(signal.SIGTERM)
        output, messages = server.communicate(timeout=HANG_SECONDS)
        assert server.returncode == 0, messages
        assert output == "", messages


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--init", "nowhere"], "there is no directory nowhere: give --checkpoint a run directory"),
        (
            ["--init", "x", "--engine.max-num-seqs", "0"],
            "engine.max_num_seqs is 0 and must be at least 1",
        ),
        (["--init", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0 and must be at least 1"),
        (
            ["--init", "x", "--port", "99999"],
            "--port is 99999 and must be from 0, which chooses a free port, to 65535",
        ),
        (
            ["--init", "x", "--max-tokens", "512"],
            "--max-new-tokens is 512, which leaves no room for a prompt",
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(capsys, words, sentence):
    assert serve.main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert sentence in message


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x", "--task.top-k", "3"], "--task.top-k is given, but x has no configuration"),
        (
            ["x", "--config", "tiny_world", "--max-tokens", "300", "--max-new-tokens", "9"],
            "--max-tokens is 300, but conversations of the agent may have "
            "agent.max_trajectory_tokens 320",
        ),
        (["x", "--config", "tiny_wurld"], "did you mean tiny_world"),
        (
            ["x", "--config", "tiny_world", "--sources", "films"],
            "--sources is 'films': give NAME=DIRECTORY",
        ),
        (["x", "--api-key-file", "nowhere"], "--api-key-file nowhere cannot be read"),
    ],
)
def test_what_an_agent_or_a_key_lacks_is_said_in_a_sentence(capsys, words, sentence):
    assert serve.main([*words, "--port", "0"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_told_before_the_model_is_read(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert serve.main(["nowhere", "--port", port]) == 2
    assert f"127.0.0.1:{port} cannot be opened" in capsys.readouterr().err


def test_without_jetstream_its_protocol_is_refused_before_the_model_is_read(capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("jetstream."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    assert serve.main(["nowhere", "--grpc-port", "0"]) == 2
    assert capsys.readouterr().err == (
        "error: --grpc-port needs the package jetstream, but jetstream is not "
        "installed: install the extra `jetstream`, as in `pip install -e '.[jetstream]'` where "
        "mujica_jax was cloned\n"
    )


def test_the_programs_of_the_library_page_run(checkpoint, tmp_path):
    """They run as they stand there, with this checkpoint.

    What the second one saves is used by the first.
    """
    page = (ROOT / "docs" / "guides" / "from_python.md").read_text()
    *_, lower_parts = page.partition("## Lower-level parts")
    generate, tune = re.findall(r"```python\n(.*?)```", lower_parts, re.DOTALL)
    program = tune.replace("HF_DIR", str(checkpoint)) + generate.replace(
        "HF_DIR", str(tmp_path / "tuned")
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    losses = [float(line.split()[1]) for line in lines[:20]]
    assert losses[-1] < losses[0]
    assert len(lines) == 22
