"""The program that serves a policy: started as a user starts it, asked over its port, and ended by
a signal.
"""

import dataclasses
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
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


@pytest.mark.parametrize("kind", ["native", "jetstream"])
def test_a_checkpoint_is_served_until_a_signal_comes(checkpoint, kind):
    """The stub of JetStream's protocol asks. Either engine stands behind it."""
    command = [
        sys.executable,
        "-m",
        "mujica_jax.serve",
        "--init",
        str(checkpoint),
        "--port",
        "0",
        *SIZES,
    ]
    command += ["--engine.kind", kind]
    server = subprocess.Popen(
        [*command, "--metrics-port", "0"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        metrics = re.fullmatch(
            r"metrics at (http://127.0.0.1:\d+/metrics)\n", server.stdout.readline()
        )
        served = re.fullmatch(r".*checkpoint at (127.0.0.1:\d+)\n", server.stdout.readline())
        assert metrics
        assert served
        with grpc.insecure_channel(served[1]) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            text = jetstream_pb2.DecodeRequest.TextContent(text="Who is the director?")
            answers = stub.Decode(
                jetstream_pb2.DecodeRequest(text_content=text, max_tokens=5), timeout=HANG_SECONDS
            )
            tokens = [
                token for chunks in answers for token in chunks.stream_content.samples[0].token_ids
            ]
        assert 0 < len(tokens) <= 5
        with urllib.request.urlopen(metrics[1]) as page:
            assert b"generated_tokens" in page.read()
        server.send_signal(signal.SIGTERM)
        output, messages = server.communicate(timeout=HANG_SECONDS)
        assert server.returncode == 0, messages
        assert output == "", messages
    finally:
        server.kill()


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


def test_without_jetstream_serving_is_refused_before_the_model_is_read(capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("jetstream."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    assert serve.main(["--init", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "error: python -m mujica_jax.serve needs the package jetstream, but jetstream is not "
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
