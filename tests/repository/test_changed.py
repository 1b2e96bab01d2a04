"""Which tests `make check` runs."""

from tests.helpers.changed import mirror_of, module_name, select_tests
from tests.helpers.paths import HELPERS, ROOT


def test_a_module_has_the_name_that_tests_import():
    assert module_name(ROOT / "mujica_jax" / "trajectories" / "select.py") == (
        "mujica_jax.trajectories.select"
    )
    assert module_name(ROOT / "mujica_jax" / "rewards" / "__init__.py") == "mujica_jax.rewards"
    assert module_name(HELPERS / "patience.py") == "tests.helpers.patience"


def test_a_module_of_the_package_has_its_test_at_the_same_place(tmp_path):
    module = ROOT / "mujica_jax" / "trajectories" / "select.py"
    test = ROOT / "tests" / "trajectories" / "test_select.py"
    assert mirror_of(module) == test
    assert mirror_of(ROOT / "mujica_jax" / "train.py") == ROOT / "tests" / "test_train.py"
    another = tmp_path / "test_select.py"
    another.write_text("assert True\n")
    assert select_tests([module], [test, another]) == [test]


def test_tests_that_import_what_changed_are_chosen(tmp_path):
    sources = {
        "test_by_name.py": "from mujica_jax.trajectories.select import select\n",
        "test_by_module.py": "from mujica_jax.trajectories import packing, select\n",
        "test_of_another.py": "from mujica_jax.trajectories.select_more import x\n",
        "test_itself.py": "assert True\n",
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    tests = sorted(tmp_path.glob("test_*.py"))
    changed = [ROOT / "mujica_jax" / "trajectories" / "select.py"]
    assert [test.name for test in select_tests(changed, tests)] == [
        "test_by_module.py",
        "test_by_name.py",
    ]


def test_a_changed_test_runs_itself():
    test = ROOT / "tests" / "repository" / "test_changed.py"
    others = [ROOT / "tests" / "trajectories" / "test_select.py"]
    assert select_tests([test], [test, *others]) == [test]
