"""The training steps of published models compile for real TPU topologies and fit their memory, on a machine without a TPU.

`make test-slow` installs the TPU compiler (libtpu) into a folder of its own beside the environment.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = ROOT / ".venv" / "tpu"
CONFIG = "configs/two_wiki_text_v5e.py"
V5E_BYTES = 16e9

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COMPILER / "libtpu").is_dir() and importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: `make test-slow` does it",
    ),
]


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"])
def test_a_training_step_compiles_for_v5e_and_fits(model):
    assert compiled(model)["bytes"] < V5E_BYTES


def test_a_step_of_adapters_takes_half_of_the_memory():
    assert compiled("qwen2.5-7b", "16")["bytes"] < 5e9


def compiled(model: str, *lora_rank: str) -> dict:
    paths = [str(COMPILER), str(ROOT), str(ROOT / "tests")]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tpu_programs.py"), model, CONFIG, "v5e:4x8", *lora_rank],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["splash"] and found["kernels"] >= 3, "forward, and the gradients of queries and of keys and values"
    return found
