# `make up` and `make test` each do all the set-up a fresh machine needs, then their job.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.hortator-setup
# Options of `hortator up`, for example: make up ARGS="--mock --http 127.0.0.1:9000"
ARGS ?=
# Options of pytest, for example: make test-fast PYTEST_ARGS="-k blocks"
PYTEST_ARGS ?=

SECOND_LANE := servers or mesh or model or slow
# Pure tests share the cores; those with servers, meshes and models mostly wait, so two files run side by side.
TOGETHER := $(BIN)/pytest -q -n 2 --dist worksteal
BESIDE := $(BIN)/pytest -q -n 2 --dist loadfile
FAST := $(TOGETHER) -m "not gpu and not ($(SECOND_LANE))"

.PHONY: help setup up test test-fast test-second check lint types clean

help:
	@echo "make setup        create .venv with everything in it"
	@echo "make up           set up, then start a mesh on this machine (ARGS=\"--mock --detach\"); Ctrl-C stops it"
	@echo "make test         set up, then both test lanes"
	@echo "make test-fast    the first lane: no servers, about two minutes on two cores"
	@echo "make test-second  the second lane: real servers, meshes and the model"
	@echo "make check        what a change must pass: lint, types, first lane"
	@echo "make lint types   each alone"
	@echo "make clean        remove .venv and caches (models stay in the node cache)"

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/setup_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Hortator needs Python 3.11 or later; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 ...)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
		rm -rf .venv; echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		rm -rf .venv; echo "the new .venv has no pip: on Debian, apt-get install python3-venv"; exit 1; }
	@$(BIN)/python deploy/setup_torch.py
	@echo "installing hortator[local,dev] into .venv (a few minutes the first time; pip is told to be quiet)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -e '.[local,dev]'
	@echo "compiling the native kernels for this machine (up to a minute); they are kept in:"
	@$(BIN)/python -m services.worker.engine.native
	@touch $(STAMP)

up: setup
	@exec $(BIN)/hortator up $(ARGS)

test: setup
	$(FAST) $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-second

test-fast: setup
	$(FAST) $(PYTEST_ARGS)

test-second: setup
	$(TOGETHER) -m "slow and not (gpu or servers or mesh or model)" $(PYTEST_ARGS)
	$(BESIDE) -m "not gpu and (servers or mesh or model)" --durations=10 $(PYTEST_ARGS)

check: lint types test-fast

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy shared services deploy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
