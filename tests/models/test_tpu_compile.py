"""Training steps and engine programs of published models compile for real TPU topologies and fit
their memory, on a machine without a TPU.

`make test-slow` installs the TPU compiler (libtpu) into a folder of its own beside the environment.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from mujica_jax.runtime.chips import CHIPS
from tests.helpers.paths import ROOT
from tests.helpers.patience import HANG_SECONDS

COMPILER = ROOT / ".venv" / "tpu"
# checkpoint and topology of one configuration for each program: others have the same, which
CONFIGS = {
    # tests/repository/test_configurations.py holds
    "two_wiki_text_v5e": ("qwen2.5-7b", "v5e:4x8"),
    "two_wiki_text_qwen3_8b_v5e": ("qwen3-8b", "v5e:4x8"),
    "two_wiki_text_llama_8b_v5e": ("llama-3.1-8b", "v5e:4x8"),
    "two_wiki_text_dapo_staged_qwen3_8b_v5e": ("qwen3-8b", "v5e:4x8"),
    "two_wiki_text_decex_v5e": ("qwen2.5-7b", "v5e:4x8"),  # with longer rows, and DPO's loss
}
# Those whose chips have each a row to themselves: nothing is split over an axis `tensor`.
WHOLE_ROWS = ("two_wiki_text_v5e", "two_wiki_text_qwen3_8b_v5e", "two_wiki_text_llama_8b_v5e")
# configurations whose methods learn by another loss than maximum likelihood
OTHER_LOSSES = {"two_wiki_kg_grpo_v5e": ("qwen2.5-7b", "v5e:4x8")}
HOST = "v5e:2x2"  # of these topologies: where an engine lies
COMPUTE_BYTES = 2  # of a number that is multiplied
PARAMETER_BYTES = 4  # of a number that is added up
LANES = 128  # columns of a TPU's tile: parts that are narrower are summed whole and cut afterwards
ROWS_BYTES = 2e6  # token ids, segments and positions of a batch are less

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (COMPILER / "libtpu").is_dir() and importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: `make test-slow` does it",
    ),
]


@pytest.mark.parametrize("config", [*CONFIGS, *OTHER_LOSSES])
def test_the_training_step_of_a_configuration_compiles_and_fits(config):
    topology = (CONFIGS | OTHER_LOSSES)[config][1]
    assert trained(config)["bytes"] < memory_bytes(topology)


def documented_phases(config: str) -> dict[str, list[str]]:
    """Return the cells of a configuration's rows in docs/concepts/memory.md, by phase."""
    phases = {}
    for line in (ROOT / "docs" / "concepts" / "memory.md").read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.split("|")]
        if len(cells) > 3 and cells[1] == f"{config}.py":
            phases[cells[2]] = cells[3:]
    return phases


@pytest.mark.parametrize("config", CONFIGS)
def test_every_phase_of_a_configuration_fits(config):
    """The numbers are those of docs/concepts/memory.md, with an engine over chips of one host."""
    plan = memory(config)
    assert plan["chips_a_host"] % plan["tensor"] == 0
    documented = documented_phases(config)
    assert documented.keys() == plan["phases"].keys()
    for phase, parts in plan["phases"].items():
        total = sum(parts.values())
        assert total < memory_bytes(CONFIGS[config][1])
        assert [float(cell) for cell in documented[phase] if cell] == pytest.approx(
            [total / 1e9, *(size / 1e9 for size in parts.values())], rel=0.02, abs=0.05
        )


@pytest.mark.parametrize("config", WHOLE_ROWS)
def test_weights_are_gathered_layer_by_layer(config):
    """The head is gathered once.

    A scan over layers gathers one matrix of one layer at a time, never the stack of them.
    """
    program = trained(config)
    gathered = [
        collective for collective in program["collectives"] if collective["kind"] == "all-gather"
    ]
    in_layers = [collective["bytes"] for collective in gathered if collective["loops"]]
    outside = [
        collective["bytes"]
        for collective in gathered
        if not collective["loops"] and collective["bytes"] > ROWS_BYTES
    ]
    assert max(in_layers, default=0) <= COMPUTE_BYTES * max(program["layer_matrices"].values())
    assert outside == [COMPUTE_BYTES * program["head"]]


@pytest.mark.parametrize("config", WHOLE_ROWS)
def test_gradients_are_reduce_scattered(config):
    """Each device gets its part of a matrix's gradient and no whole one.

    It comes by a reduce-scatter, or by a ring of parts that the TPU compiler makes of a product and
    its sum. Norms and biases, which are kept whole, are summed whole.
    """
    program = trained(config)
    in_parts = {
        collective["bytes"]
        for collective in program["collectives"]
        if collective["kind"] in ("reduce-scatter", "collective-permute")
        and "transpose" in collective["source"]
        and collective["loops"]
    }
    parts = {
        name: COMPUTE_BYTES * size // program["fsdp"]
        for name, size in program["layer_matrices"].items()
    }
    assert {name for name, size in parts.items() if size not in in_parts} == set()
    summed_whole = [
        collective["bytes"]
        for collective in program["collectives"]
        if collective["kind"] == "all-reduce"
    ]
    head = [size for size in summed_whole if size > PARAMETER_BYTES * program["layer_vector"]]
    aligned = program["hidden_size"] // program["fsdp"] % LANES == 0
    assert head == ([] if aligned else [PARAMETER_BYTES * program["head"]])


@pytest.mark.parametrize("config", WHOLE_ROWS)
def test_nothing_of_the_optimisers_state_travels(config):
    program = trained(config)
    largest = max(collective["bytes"] for collective in program["collectives"])
    assert largest <= PARAMETER_BYTES * program["head"] < program["optimizer_bytes"] / 10


def test_a_step_of_adapters_takes_half_of_the_memory():
    assert trained("two_wiki_text_v5e", "16")["bytes"] < 5e9


def test_a_step_over_two_slices_compiles_and_fits():
    """The data axis crosses the network between them.

    No weight is gathered from the other slice.
    """
    program = trained("two_wiki_text_v5e", "0", "2")
    assert program["bytes"] < memory_bytes("v5e:4x8")
    gathered = [
        collective["bytes"]
        for collective in program["collectives"]
        if collective["kind"] == "all-gather" and collective["loops"]
    ]
    assert max(gathered) <= COMPUTE_BYTES * max(program["layer_matrices"].values())


@pytest.mark.parametrize(
    ("model", "topology", "tensor", "gigabytes", "formats"),
    [
        ("qwen2.5-7b", "v5e:2x4", "4", "8", ()),
        ("qwen2.5-7b", "v6e:2x2", "4", "20", ()),
        (
            "qwen2.5-7b",
            "v5e:2x4",
            "2",
            "4",
            ("int8", "int8", "filtered"),
        ),  # cache, weights; top-k, top-p and min-p
        ("qwen2.5-7b", "v6e:2x2", "2", "10", ("fp8", "fp8", "filtered")),
        ("qwen2.5-7b", "v5e:2x4", "4", "8", ("bfloat16", "w8a8")),
        ("qwen3-4b", "v5e:2x2", "4", "2", ()),  # configs/*_qwen3_4b_v5e.py
    ],
)
def test_the_engine_compiles_with_its_kernel_fits_and_works_in_place(
    model, topology, tensor, gigabytes, formats
):
    """Heads split over four chips (on v5e:2x4 two engines stand side by side) or two.

    The engine behind JetStream's interface runs these two programs and no other one.
    """
    engine = compiled("engine", model, topology, tensor, gigabytes, *formats)
    for kind in ("decode", "prefill"):
        program = engine[kind]
        assert program["kernels"] == 1, "one kernel, in a scan over layers"
        assert engine["page_bytes"] <= program["in_place"], "the pages are not copied"
        assert program["temporaries"] < 0.6e9
        assert program["bytes"] < memory_bytes(topology), engine


def test_one_head_a_chip_in_eight_bits_is_more_than_the_kernel_can():
    """`ragged.check_tiles` refuses this before a run begins."""
    with pytest.raises(AssertionError, match="can not be XLA fully tiled"):
        compiled("engine", "qwen2.5-7b", "v6e:2x2", "4", "10", "int8")


@pytest.mark.parametrize(
    ("storage", "recall_target"), [("bfloat16", ()), ("bfloat16", ("0.95",)), ("int8", ())]
)
def test_the_search_of_a_whole_wikipedia_compiles_and_fits(storage, recall_target):
    """The index has 21 million passages of 1,024 numbers.

    Beside them the program needs a few scores.
    """
    search = compiled("search", "21000000", "1024", "v5e:4x8", storage, *recall_target)
    assert search["chips"] == 32
    assert search["embedding_bytes"] < 1.4e9
    assert search["temporaries"] < 0.5e9
    assert search["bytes"] < memory_bytes("v5e:4x8") / 2, (
        "the encoder and its activations have the rest"
    )


def memory_bytes(topology: str) -> int:
    """Return the bytes of one chip of a topology such as `v5e:4x8`."""
    return next(chip.memory_bytes for chip in CHIPS if chip.name == topology.partition(":")[0])


@functools.cache
def trained(config: str, *lora_rank_and_slices: str) -> dict:
    model, topology = (CONFIGS | OTHER_LOSSES)[config]
    program = compiled("train", model, topology, f"configs/{config}.py", *lora_rank_and_slices)
    # One kernel is forward, two give the gradients of queries and of keys and values.
    assert program["splash"]
    assert program["kernels"] >= 3
    return program


def memory(config: str) -> dict:
    """Return the bytes of each phase by part, with the temporaries of its compiled programs."""
    (model, topology) = CONFIGS[config]
    file = f"configs/{config}.py"
    asked = compiled("plan", model, topology, file, "0", "0")
    programs = compiled("engine", model, HOST, str(asked["tensor"]), asked["cache"])
    calls = max(programs[kind]["temporaries"] for kind in ("decode", "prefill"))
    return compiled("plan", model, topology, file, str(trained(config)["temporaries"]), str(calls))


def compiled(*arguments: str) -> dict:
    paths = [str(COMPILER), str(ROOT)]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.tpu_programs", *arguments],
        # The lock is for processes that share a TPU; here there is none.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    # Show bytes a chip with -rP.
    print(finished.stdout)
    return json.loads(finished.stdout.splitlines()[-1])
