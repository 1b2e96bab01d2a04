"""Training steps and engine programs of published models compile for real TPU topologies and fit their memory, on a machine without a TPU.

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
V5E_BYTES, V6E_BYTES = 16e9, 32e9

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COMPILER / "libtpu").is_dir() and importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: `make test-slow` does it",
    ),
]


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"])
def test_a_training_step_compiles_for_v5e_and_fits(model):
    assert trained(model)["bytes"] < V5E_BYTES


def test_a_step_of_adapters_takes_half_of_the_memory():
    assert trained("qwen2.5-7b", "16")["bytes"] < 5e9


@pytest.mark.parametrize(("topology", "gigabytes", "most"), [("v5e:2x4", "8", V5E_BYTES), ("v6e:2x2", "20", V6E_BYTES)])
def test_the_engine_compiles_with_its_kernel_fits_and_works_in_place(topology, gigabytes, most):
    """Heads split over four chips: on v5e:2x4 two engines stand side by side. Nearly all memory that is left holds pages."""
    found = compiled("engine", "qwen2.5-7b", topology, "4", gigabytes)
    for kind in ("decode", "prefill"):
        program = found[kind]
        assert program["kernels"] == 1, "one kernel, in a scan over layers"
        assert found["page_bytes"] <= program["in_place"], "the pages are not copied"
        assert program["temporaries"] < 0.6e9
        assert program["bytes"] < most, found


def trained(model: str, *lora_rank: str) -> dict:
    found = compiled("train", model, "v5e:4x8", CONFIG, *lora_rank)
    assert found["splash"] and found["kernels"] >= 3, "forward, and the gradients of queries and of keys and values"
    return found


def compiled(*arguments: str) -> dict:
    paths = [str(COMPILER), str(ROOT), str(ROOT / "tests")]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tpu_programs.py"), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(finished.stdout)  # bytes a chip, shown with -rP
    return json.loads(finished.stdout.splitlines()[-1])
