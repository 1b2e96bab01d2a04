"""Which tests `make check` runs."""

from changed import ROOT, module_name, select_tests


def test_a_module_has_the_name_that_tests_import():
    assert module_name(ROOT / "mujica_jax" / "trajectories" / "select.py") == (
        "mujica_jax.trajectories.select"
    )
    assert (
        module_name(ROOT / "mujica_jax" / "rewards" / "__init__.py") == "mujica_jax.rewards.reward"
    )
    assert module_name(ROOT / "tests" / "patience.py") == "patience"


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
    test = ROOT / "tests" / "test_changed.py"
    others = [ROOT / "tests" / "test_select.py"]
    assert select_tests([test], [test, *others]) == [test]
