"""Where the samples of public benchmarks lie. Tests that read them skip, with this reason, where
they are missing.
"""

import os
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

DATA = Path(os.environ.get("MUJICA_DATA", ROOT.parent / "shared" / "data"))
TWO_WIKI = DATA / "2wikimultihopqa"

needs_data = pytest.mark.skipif(
    not TWO_WIKI.is_dir(),
    reason=f"the data folder {DATA} is missing; set MUJICA_DATA to a folder with 2wikimultihopqa/",
)
