"""Ask packages that the project's environment does not have, by the programs in `peers/`.

An environment variable names the Python of an environment that has the package. Without it, the
test is skipped.
"""

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.paths import HELPERS
from tests.helpers.patience import HANG_SECONDS

# Nothing is downloaded or reported. vLLM takes at most one GiB for its KV cache.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Variables of the project's environment that would mislead another Python.
UNWANTED_VARIABLES = ("PYTHONPATH", "VIRTUAL_ENV")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Another package that reads our files.

    Attributes:
        package: Its name.
        variable: The environment variable that names a Python with the package.
        program: The program that this Python runs.
    """

    package: str
    variable: str
    program: Path

    def answer(self, request: Mapping[str, Any], folder: Path) -> dict[str, np.ndarray]:
        """Return the arrays that the program writes. `folder` is for its files."""
        python = os.environ.get(self.variable)
        if not python:
            pytest.skip(f"{self.variable} names no Python with {self.package}")
        answer_file = folder / "answer.npz"
        environment = os.environ | SETTINGS
        for name in UNWANTED_VARIABLES:
            environment.pop(name, None)
        ended = subprocess.run(
            [python, self.program, json.dumps(request), answer_file],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        with np.load(answer_file) as arrays:
            return dict(arrays)


VLLM = Peer(
    package="vllm",
    variable="MUJICA_VLLM_PYTHON",
    program=HELPERS / "peers" / "read_with_vllm.py",
)
PEFT = Peer(
    package="peft",
    variable="MUJICA_PEFT_PYTHON",
    program=HELPERS / "peers" / "read_with_peft.py",
)
