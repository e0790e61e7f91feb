# Each target does its own set-up in .venv; nothing needs to be installed by hand but Python >= 3.11, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 4
PYTEST ?= $(BIN)/pytest
GPU_RUNTIME ?= cuda
RUN = $(BIN)/mpiexec -n $(RANKS) $(BIN)/python -m mpi4py
SOURCES := $(shell find device proxy channels src -name '*.py' -o -name '*.c' -o -name '*.cpp' -o -name '*.h') setup.py pyproject.toml

.PHONY: demo test test-gpu coverage bench lint clean

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed lint
	$(BIN)/pytest tests

coverage: $(VENV)/.installed
	$(BIN)/pytest tests --ignore tests/test_sanitizer.py --cov --cov-report=term

# On a machine with GPUs. Where its own Python has the packages: make test-gpu PYTEST="python3 -m pytest"
test-gpu: $(if $(filter $(BIN)/%,$(PYTEST)),$(VENV)/.installed)
	PROXYCCL_RUNTIME=$(GPU_RUNTIME) $(PYTEST) tests

bench: $(VENV)/.installed
	$(BIN)/proxyccl bench ring
	$(RUN) $(BIN)/proxyccl bench all_reduce

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy -p proxyccl

$(VENV)/.locked: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

$(VENV)/.installed: $(VENV)/.locked $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable . --config-settings editable_mode=strict
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
