"""Compile the training step of one model for a TPU topology that is not here; prints JSON. Started by `test_tpu_compile.py`.

python tests/tpu_programs.py MODEL CONFIG TOPOLOGY [LORA_RANK]
"""

import dataclasses
import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

from jax.experimental import topologies
from test_families import LLAMA3_1_8B, QWEN2_5_7B, QWEN3_8B

from mujica_jax.config_files import load_config
from mujica_jax.learning.trainer import Trainer
from mujica_jax.models.families import from_hugging_face

PUBLISHED = {"qwen2.5-7b": QWEN2_5_7B, "qwen3-8b": QWEN3_8B, "llama-3.1-8b": LLAMA3_1_8B}


def main(name: str, config: str, topology: str, lora_rank: str = "0") -> None:
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    configured = dataclasses.replace(load_config(config).trainer, lora_rank=int(lora_rank))
    trainer = Trainer(from_hugging_face(PUBLISHED[name]), configured, devices)
    lowered = trainer.lower_step()
    memory = lowered.compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes  # the new state takes the place of the old one
    text = lowered.as_text()
    print(json.dumps({"bytes": used, "splash": "splash" in text, "kernels": text.count("tpu_custom_call")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
