# Two commands from an empty machine (python3, make, g++): `make perplexity` and `make test`.
# Each sets up what it needs, once; an interrupted set-up goes on where it stopped.

PYTHON ?= python3
TRANSFORMERS ?= 5.17
VENV ?= .venv
JOBS ?= 2
PPL ?= --attn eager,sdpa,cupy_fa2 --max-tokens 2048 --context 512 --stride 256

CONSTRAINTS := constraints/transformers-$(TRANSFORMERS).txt
# A changed pin or requirement has another hash, hence another stamp: the environment is brought up to date.
HASH := $(shell cat $(CONSTRAINTS) constraints/tested.txt pyproject.toml | sha256sum | cut -c1-12)
EVAL_STAMP := $(VENV)/.ready-eval-$(HASH)
DEV_STAMP := $(VENV)/.ready-dev-$(HASH)
PY := $(VENV)/bin/python
# Kernels and demo files stay in this folder, shared by the evaluation and the tests.
export HF_FLASH_CUPY_CACHE_DIR ?= $(CURDIR)/.cache
# Containers often forbid Python to keep its byte code: then each of the tests' many processes compiles all of torch anew.
export PYTHONDONTWRITEBYTECODE :=

comma := ,
# A GPU machine takes CuPy with NVRTC as well; on a CPU the kernels are built by the C++ compiler.
EVAL_EXTRAS := eval$(if $(wildcard /dev/nvidiactl),$(comma)cuda13)
# NVRTC needs no GPU, so the compile tests take CuPy and NVRTC alone, without the rest of the CUDA toolkit.
DEV_REQUIREMENTS := -e ".[$(EVAL_EXTRAS),plots,dev]" cupy-cuda13x nvidia-cuda-nvrtc
CPP_SOURCES = find cuda_src tests -name '*.cuh' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cpp'
# One OpenMP thread per test process: the processes already share the cores.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal
# One process: a second one on the same device would make figures of time and memory wrong.
GPU_PYTEST = $(PY) -m pytest -m gpu

.PHONY: help perplexity test test-full test-gpu check format wheel clean
.DELETE_ON_ERROR:

help:
	@echo "make perplexity  a real model's perplexity: eager, sdpa and our kernels on the same windows"
	@echo "make test        the fast tests (up to 15 minutes on 2 cores)"
	@echo "make test-full   every test, with both tested Transformers versions"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make check       lint, format and types;  make format  applies the formats"
	@echo "make wheel       dist/hf_flash_cupy-*.whl"
	@echo "make clean       remove environments, caches and builds of this folder"

perplexity: $(EVAL_STAMP)
	@$(PY) -m hf_flash_cupy ppl $(PPL)

test: $(DEV_STAMP)
	$(PYTEST) -m "not full and not gpu"

test-full:
	@$(MAKE) --no-print-directory test-everything TRANSFORMERS=5.17 VENV=.venv
	@$(MAKE) --no-print-directory test-everything TRANSFORMERS=5.24 VENV=.venv-transformers-5.24

.PHONY: test-everything
test-everything: $(DEV_STAMP)
	$(PYTEST) -m "not gpu"
	$(if $(wildcard /dev/nvidiactl),$(GPU_PYTEST))

test-gpu: $(DEV_STAMP)
	$(GPU_PYTEST)

# `make -k check` shows what all four find.
check: check-lint check-format check-types check-cpp

.PHONY: check-lint check-format check-types check-cpp
check-lint: $(DEV_STAMP)
	$(PY) -m ruff check --output-format concise

check-format: $(DEV_STAMP)
	$(PY) -m ruff format --check --quiet

check-types: $(DEV_STAMP)
	$(PY) -m mypy

check-cpp: $(DEV_STAMP)
	@$(CPP_SOURCES) | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

format: $(DEV_STAMP)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	@$(CPP_SOURCES) | xargs -r $(VENV)/bin/clang-format -i

wheel: $(DEV_STAMP)
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf .venv .venv-transformers-* .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11. To mend: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment. To mend: apt-get install python3-venv" >&2; exit 3; }

# --no-compile: byte-compiling thousands of modules takes longer than compiling the few that are imported.
define install
	@echo "Setting up $(VENV) (log: $(VENV)/install.log) …"
	@$(PY) -m pip install --no-compile -c $(CONSTRAINTS) $(1) >$(VENV)/install.log 2>&1 || { \
	  tail -n 20 $(VENV)/install.log >&2; echo "The set-up stopped; the same command goes on from here." >&2; exit 3; }
	@touch $@
endef

$(EVAL_STAMP): $(VENV)/bin/pip
	$(call install,-e ".[$(EVAL_EXTRAS)]")

$(DEV_STAMP): $(VENV)/bin/pip
	$(call install,$(DEV_REQUIREMENTS))
