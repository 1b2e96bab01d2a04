"""The table of faults names tests that there are."""

import re

from tests.helpers.paths import ROOT

ROWS = [
    line
    for line in (ROOT / "docs" / "concepts" / "faults.md").read_text().splitlines()
    if line.startswith("| ")
][1:]


def test_every_fault_has_a_test_that_exists():
    assert len(ROWS) > 10
    for row in ROWS:
        shown = re.findall(r"`(tests/[\w/]+\.py)`((?: `test_\w+…?`)*)", row.split("|")[3])
        assert shown, row
        for file, names in shown:
            source = (ROOT / file).read_text()
            for name, cut in re.findall(r"`(test_\w+?)(_?…)?`", names):
                wanted = f"def {name}" + ("" if cut else "(")
                assert wanted in source, f"{file} has no {name}"
