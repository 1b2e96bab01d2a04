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
CHIP_BYTES = {"v5e:4x8": 16e9, "v5e:2x4": 16e9, "v6e:2x2": 32e9}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COMPILER / "libtpu").is_dir() and importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: `make test-slow` does it",
    ),
]


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"])
def test_a_training_step_compiles_for_v5e_and_fits(model):
    assert trained(model)["bytes"] < CHIP_BYTES["v5e:4x8"]


def test_a_step_of_adapters_takes_half_of_the_memory():
    assert trained("qwen2.5-7b", "16")["bytes"] < 5e9


@pytest.mark.parametrize(
    ("topology", "tensor", "gigabytes", "kept"),
    [
        ("v5e:2x4", "4", "8", ()),
        ("v6e:2x2", "4", "20", ()),
        ("v5e:2x4", "2", "4", ("int8", "int8", "filtered")),  # cache, weights; with top-k, top-p and min-p
        ("v6e:2x2", "2", "10", ("fp8", "fp8", "filtered")),
    ],
)
def test_the_engine_compiles_with_its_kernel_fits_and_works_in_place(topology, tensor, gigabytes, kept):
    """Heads split over four chips (on v5e:2x4 two engines stand side by side) or two."""
    found = compiled("engine", "qwen2.5-7b", topology, tensor, gigabytes, *kept)
    for kind in ("decode", "prefill"):
        program = found[kind]
        assert program["kernels"] == 1, "one kernel, in a scan over layers"
        assert found["page_bytes"] <= program["in_place"], "the pages are not copied"
        assert program["temporaries"] < 0.6e9
        assert program["bytes"] < CHIP_BYTES[topology], found


def test_one_head_a_chip_in_eight_bits_is_more_than_the_kernel_can():
    """What `ragged.check_tiles` refuses before a run begins."""
    with pytest.raises(AssertionError, match="can not be XLA fully tiled"):
        compiled("engine", "qwen2.5-7b", "v6e:2x2", "4", "10", "int8")


@pytest.mark.parametrize(("storage", "recall_target"), [("bfloat16", ()), ("bfloat16", ("0.95",)), ("int8", ())])
def test_the_search_of_a_whole_wikipedia_compiles_and_fits(storage, recall_target):
    """21 million passages of 1,024 numbers; what the program needs beside them is a few scores."""
    found = compiled("search", "21000000", "1024", "v5e:4x8", storage, *recall_target)
    assert found["chips"] == 32 and found["embedding_bytes"] < 1.4e9
    assert found["temporaries"] < 0.5e9
    assert found["bytes"] < CHIP_BYTES["v5e:4x8"] / 2, "the encoder and its activations have the rest"


def trained(model: str, *lora_rank: str) -> dict:
    found = compiled("train", model, "v5e:4x8", CONFIG, *lora_rank)
    assert found["splash"] and found["kernels"] >= 3, "forward, and the gradients of queries and of keys and values"
    return found


def compiled(*arguments: str) -> dict:
    paths = [str(COMPILER), str(ROOT), str(ROOT / "tests")]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tpu_programs.py"), *arguments],
        # The lock is for processes that share a TPU; here there is none.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(finished.stdout)  # bytes a chip, shown with -rP
    return json.loads(finished.stdout.splitlines()[-1])
