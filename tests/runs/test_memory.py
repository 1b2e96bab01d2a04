"""What lies on a chip in each phase, counted by hand for a decoder of 3,008 numbers."""

import dataclasses
import json
import subprocess
import sys

import pytest

from mujica_jax.config.files import CONFIG_FOLDER, load_config
from mujica_jax.errors import UserError
from mujica_jax.learning.trainer import Trainer
from mujica_jax.runs import memory
from mujica_jax.runs.memory import PhaseMemory, check_memory, phases
from mujica_jax.runtime.chips import CHIPS
from tests.helpers.packed_rows import MODEL, TRAINER
from tests.helpers.paths import ROOT

# The embedding, four projections of the attention, three of the perceptron, norms of a layer and
# its heads, the last.
NUMBERS = 48 * 16 + 4 * 16 * 16 + 3 * 16 * 24 + (2 * 16 + 2 * 8) + 16
# keys and values of 32 tokens: two heads, filled up to a tile, of two bytes a number
PAGE = 2 * 32 * 2 * 128 * 2
V5E = next(chip for chip in CHIPS if chip.name == "v5e")


def configured(**engine):
    config = load_config(CONFIG_FOLDER / "two_wiki_text_v5e.py")
    engine = {
        "max_num_seqs": 4,
        "page_tokens": 32,
        "tensor_parallel_size": 1,
        "cache_gigabytes": 1.0,
        "cache_dtype": "compute",
    } | engine
    return dataclasses.replace(
        config,
        trainer=dataclasses.replace(TRAINER, dtype="bfloat16"),
        engine=dataclasses.replace(config.engine, **engine),
        agent=dataclasses.replace(config.agent, max_trajectory_tokens=60),
    )


def planned(**engine) -> dict[str, PhaseMemory]:
    config = configured(**engine)
    phases_of_run = phases(
        config, MODEL, Trainer(MODEL, config.trainer), step=1000, calls=200, retrieval=30
    )
    return {phase.name: phase for phase in phases_of_run}


def test_each_phase_holds_what_it_says():
    phases_by_name = planned()
    state = {
        memory.PARAMETERS: 4 * NUMBERS,
        memory.MOMENTS: phases_by_name["learning"].parts[memory.MOMENTS],
    }
    assert 0 <= state[memory.MOMENTS] - 2 * 4 * NUMBERS < 64, "two moments in float32, and counters"
    state |= {memory.CACHE: 4 * 2 * PAGE, memory.RETRIEVAL: 30}
    engine = {memory.ENGINE: 2 * NUMBERS}
    assert {name: dict(phase.parts) for name, phase in phases_by_name.items()} == {
        "loading": {memory.CHECKPOINT: 4 * NUMBERS, **state},
        "syncing": {memory.POLICY: 2 * NUMBERS, **state, **engine},
        "sampling": {**state, **engine, memory.CALLS: 200},
        "learning": {**state, memory.STEP: 1000},
    }
    assert phases_by_name["learning"].bytes == sum(state.values()) + 1000


def test_keys_and_values_are_no_more_than_was_allowed_and_none_where_nothing_was_said():
    assert planned(cache_gigabytes=1e-4)["sampling"].parts[memory.CACHE] == 100_000
    assert planned(cache_gigabytes=0.0)["sampling"].parts[memory.CACHE] == 0
    assert planned(tensor_parallel_size=2)["sampling"].parts[memory.CACHE] == 4 * 2 * PAGE // 2


@pytest.mark.parametrize(
    ("part", "change"),
    [(memory.STEP, "raise trainer.accumulation_steps"), (memory.MOMENTS, "raise trainer.fsdp")],
)
def test_what_does_not_fit_is_told_with_its_sum_its_largest_part_and_what_to_change(part, change):
    phases_of_run = [
        PhaseMemory(name="sampling", parts={part: int(15e9)}),
        PhaseMemory(name="learning", parts={memory.PARAMETERS: int(4e9), part: int(13.1e9)}),
    ]
    with pytest.raises(UserError) as refused:
        check_memory(configured(), phases_of_run, V5E)
    message = str(refused.value)
    assert (
        "two_wiki_text_v5e needs 17.1 GB per chip while learning, but a v5e has 16.0 GB" in message
    )
    assert f"The largest part is {part} with 13.1 GB: {change}" in message
    check_memory(configured(), phases_of_run[:1], V5E)


# --- the parts of a plan ---

# Of a rank-2 adapter: four projections of the attention, and three of the perceptron.
ADAPTER_NUMBERS = 4 * 2 * (16 + 16) + 3 * 2 * (16 + 24)


def trainer_with(**changes) -> Trainer:
    return Trainer(MODEL, dataclasses.replace(TRAINER, **changes))


def test_all_parameters_are_counted_and_with_adapters_only_these_are_trained():
    assert memory.count_parameters(trainer_with()) == (NUMBERS, NUMBERS)
    numbers = memory.count_parameters(trainer_with(lora_rank=2))
    assert numbers == (NUMBERS + ADAPTER_NUMBERS, ADAPTER_NUMBERS)


def test_the_gradient_has_four_bytes_for_each_trained_number():
    assert memory.gradient_bytes(trainer_with()) == 4 * NUMBERS
    assert memory.gradient_bytes(trainer_with(parameter_dtype="bfloat16")) == 4 * NUMBERS
    assert memory.gradient_bytes(trainer_with(lora_rank=2)) == 4 * ADAPTER_NUMBERS


ON_TWO_DEVICES = """
import dataclasses, json, jax
jax.config.update("jax_num_cpu_devices", 2)
from mujica_jax.learning.trainer import Trainer
from mujica_jax.runs import memory
from tests.helpers.packed_rows import MODEL, TRAINER
trainer = Trainer(MODEL, dataclasses.replace(TRAINER, fsdp=2, accumulation_steps=2))
print(json.dumps([
    memory.gradient_bytes(trainer),
    memory.layer_input_bytes(trainer),
    memory.checkpoint_bytes(trainer),
    *memory.count_parameters(trainer),
]))
"""


def test_two_chips_split_the_gradient_and_the_rows_and_share_a_checkpoint():
    ended = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    gradient, inputs, checkpoint, all_numbers, trained_numbers = json.loads(ended.stdout)
    # Norms are whole on each chip.
    norms = (2 * 16 + 2 * 8) + 16
    assert gradient == 4 * ((NUMBERS - norms) // 2 + norms)
    # 2 rows of 32 tokens on each chip at once.
    assert inputs == 2 * 32 * 16 * 4
    assert 0 <= checkpoint - 3 * 4 * NUMBERS < 64
    assert all_numbers == trained_numbers == NUMBERS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 8 rows of 32 tokens of width 16 in one layer, four bytes a number.
        ({}, 8 * 32 * 16 * 4),
        ({"dtype": "bfloat16"}, 8 * 32 * 16 * 2),
        ({"accumulation_steps": 4}, 2 * 32 * 16 * 4),
    ],
)
def test_each_layer_keeps_its_input_for_the_rows_that_a_chip_computes_at_once(changes, expected):
    assert memory.layer_input_bytes(trainer_with(**changes)) == expected


def test_a_checkpoint_has_parameters_and_two_moments_and_counters():
    assert 0 <= memory.checkpoint_bytes(trainer_with()) - 3 * 4 * NUMBERS < 64


def test_conversations_take_whole_pages():
    config = configured()
    # A conversation has at most 60 tokens, which are two pages of 32.
    assert memory.conversations_bytes(config, MODEL, 1) == 2 * PAGE
    assert memory.conversations_bytes(config, MODEL, 3) == 3 * 2 * PAGE
