# `make demo` and `make test` are all that a fresh machine needs: each makes .venv first if it is not there.

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-all test-gpu lint format bench-cpu compile-cuda clean
SHELL := /bin/bash

# Python 3.10, 3.11 or 3.12; name another with `make PYTHON=/path/to/python3.11 ...`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
TEST_JOBS ?= 2
# Every worker is a process, and one that finds no bytecode takes 14 s instead of 6 to import torch and nerfstudio.
unexport PYTHONDONTWRITEBYTECODE

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## .venv with the exact versions of requirements.lock and this package, editable

$(STAMP): requirements.lock pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.10, 3.11 or 3.12 was found. Install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@[ -n "$$CXX" ] || command -v c++ g++ clang++ >/dev/null || { echo "No C++ compiler was found. On Debian or Ubuntu: sudo apt install g++"; exit 1; }
	@echo "==> Making $(VENV) with $$($(PYTHON) --version)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "This Python cannot make virtual environments. On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo "==> Installing the packages of requirements.lock (3 to 10 minutes, about 7 GB; later runs skip this)"
	@# Compiled on all cores: pip would use one. What does not compile (some packages carry templates) is left out.
	@$(BIN)/python -m pip install --disable-pip-version-check --prefer-binary --no-compile -r requirements.lock
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || echo "    (Some files of packages do not compile.)"
	@echo "==> Installing ns_multigpu"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: venv ## a city on two workers: train, evaluate, render a video, print a table (demo-output/)
	@$(BIN)/python -m demo.run --workers $(WORKERS)

# A thread each: processes whose threads wait for each other's cores take a fifth longer. Long files not last.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --durations 40

test: venv ## the tests but for those that take long, in TEST_JOBS processes
	@$(PYTEST) -m "not slow"

test-slow: venv ## the tests that take long
	@$(PYTEST) -m slow

test-all: venv ## both at once: what each loads and starts first, it does once, and neither waits for its last file
	@$(PYTEST)

# Processes that share GPUs: so may ranks. Without a limit each has as many threads as there are cores.
test-gpu: ## the tests that need a GPU, with the python that is active (or PYTHON=...), in GPU_JOBS processes
	@$(if $(GPU_JOBS),NS_MULTIGPU_SHARE_GPUS=1) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu $(if $(GPU_JOBS),-n $(GPU_JOBS) --dist load)

lint: venv ## style, types, the import contract, links, and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_links.py
	@$(BIN)/python tools/check_words.py

format: venv ## rewrites the style that ruff can mend by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench-cpu: venv ## the CPU operators against the pure-torch reference
	@$(BIN)/python -m benchmarks.kernels.cpu_operators

# Compiled and linked, not run: neither a GPU nor a driver is needed. Not in .ci/run, which has 45 minutes.
compile-cuda: venv ## the CUDA operators for every supported GPU, into OUTPUT (build/cuda); needs nvcc, not a GPU
	@TORCH_CUDA_ARCH_LIST="8.0;8.6;8.9;9.0;10.0;12.0" $(BIN)/python -m cuda_ext build --cuda --output $(or $(OUTPUT),build/cuda)

clean: ## removes what the demo made; leaves .venv
	rm -rf demo-output
