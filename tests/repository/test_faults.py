"""The tables of faults name tests that there are."""

import re

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "concepts" / "faults.md").read_text()
HEAD = "| fault | what happens | test |\n|---|---|---|\n"
TABLES = [part.partition("\n\n")[0] for part in PAGE.split(HEAD)[1:]]
ROWS = [row for table in TABLES for row in table.splitlines()]


def test_every_fault_has_a_test_that_exists():
    assert len(ROWS) > 40
    for row in ROWS:
        shown = re.findall(r"`(tests/[\w/]+\.py)`((?: `test_\w+…?`)*)", row.split("|")[3])
        assert shown, row
        for file, names in shown:
            source = (ROOT / file).read_text()
            for name, cut in re.findall(r"`(test_\w+?)(_?…)?`", names):
                wanted = f"def {name}" + ("" if cut else "(")
                assert wanted in source, f"{file} has no {name}"
