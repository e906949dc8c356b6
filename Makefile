# Needs Python >= 3.11 and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.run
READY := .venv/.ready
COMPILED := .venv/.compiled .venv/.simulated
LIGHT := .venv-light/bin
LIGHT_READY := .venv-light/.ready
OUTSIDE := .venv-outside/bin
OUTSIDE_READY := .venv-outside/.ready
INSTALLED := pyproject.toml recipes/pyproject.toml constraints.txt src/bigbatch/kernels/kernels.c
# modules are compiled when they are first imported: most of those that pip installs never are
PIP := -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
RUNS ?= runs

.DEFAULT_GOAL := help
.PHONY: help setup run study test test-all test-release test-light test-outside check docs bench figure clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: $(READY)  ## create .venv with the recipes, every extra and the tools

# the library and the recipes without BERT: no trainers, no tools
$(RUN): $(INSTALLED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -e . -e ./recipes
	@touch $@

# timm without torchvision, which its optimizers do not need: tests compare LARS and LAMB with it
$(READY): $(RUN)
	$(BIN)/python $(PIP) -e '.[dev]' -e './recipes[bert]'
	$(BIN)/python $(PIP) --no-deps timm
	@touch $@

# DeepSpeed compiles for a minute on first use; without a compiler its tests are skipped
.venv/.compiled: $(READY)
	-$(BIN)/python tests/helpers/deepspeed_operations.py
	@touch $@

# the device that counts operations compiles for 20 seconds; without a compiler its tests are skipped
.venv/.simulated: $(READY) studies/simulated_device.cpp
	-$(BIN)/python -m studies.simulated_device
	@touch $@

# a folder for each time: two batch sizes, two seeds each, then a batch that follows the noise
NOW := $(shell date +%Y%m%d-%H%M%S)
FIRST = $(RUNS)/digits-$(NOW)

# advise ends with 1 where it finds no batch size, which is an answer too
run: $(RUN)  ## advise examples/digits.py, try the advice, follow the noise; report.html
	$(BIN)/bigbatch advise --try --try-in $(FIRST) -o $(FIRST).html examples/digits.py || [ $$? -eq 1 ]
	$(BIN)/python examples/digits_adaptive.py $(FIRST)/adaptive
	$(BIN)/bigbatch report $(FIRST)

study: $(RUN)  ## train the digits study: 18 networks, a table, report.html
	$(BIN)/bigbatch train --runs-dir $(RUNS)

# three test processes on two cores, since ranks and commands also wait
test test-all test-release test-light test-outside: export OMP_NUM_THREADS = 1
TESTS = -m pytest -n 3 --dist worksteal
FOLDER = $(if $(AREA),tests/$(AREA))
# again, with tensors on the simulated device; without long tests of what the host decides
HOST_ONLY = training/test_cadence.py training/test_goodput_training.py optim/test_known_steps.py
ON_DEVICE = --device sim $(addprefix tests/,gradients statistics optim training) $(addprefix --ignore=tests/,$(HOST_ONLY))

test: $(COMPILED)  ## every promise once, in about ten minutes; AREA=optim for one folder of tests
	$(BIN)/python $(TESTS) $(FOLDER) -m "not thorough and not release"

test-all: $(COMPILED)  ## what CI runs: pairs of engine, precision, ranks, rule; kill and resume
	$(BIN)/python $(TESTS) $(FOLDER) -m "not release"
	$(if $(AREA),,$(BIN)/python $(TESTS) $(ON_DEVICE) -m "not thorough and not release")

test-release: $(COMPILED) $(if $(AREA),,test-outside)  ## the rest: full products, studies, elastic runs; test-outside
	$(BIN)/python $(TESTS) $(FOLDER) -m release

$(LIGHT_READY): $(INSTALLED)
	$(PYTHON) -m venv .venv-light
	$(LIGHT)/python $(PIP) -e '.[test]'
	@touch $@

test-light: $(LIGHT_READY)  ## the library's tests with torch and numpy alone; in .venv-light
	$(LIGHT)/python $(TESTS) $(FOLDER) -m "not thorough and not release"

# 3 GB from pip's package index that no other test needs
$(OUTSIDE_READY): $(INSTALLED) tests/outside/requirements.txt
	$(PYTHON) -m venv .venv-outside
	$(OUTSIDE)/python $(PIP) -r tests/outside/requirements.txt -e '.[dev]' -e './recipes[bert]'
	$(OUTSIDE)/python $(PIP) --no-deps timm torchtitan==0.3.0
	-$(OUTSIDE)/python tests/helpers/deepspeed_operations.py
	@touch $@

test-outside: $(OUTSIDE_READY)  ## scripts and optimizers of others, chaos, fuzz; in .venv-outside
	$(OUTSIDE)/python $(TESTS) tests/outside

check: $(READY)  ## style, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_architecture.py

# without a network; MkDocs announces that another generator will follow it
docs: $(READY)  ## the site of the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(READY)  ## what measuring and scaling cost, as ratios of one run
	$(BIN)/python -m studies.measure_cost
	$(BIN)/python -m studies.optimizer_cost

figure: $(RUN)  ## the figure of docs/recipes/digits.md, from a new digits study
	$(BIN)/bigbatch train --runs-dir .figure --quiet
	$(BIN)/bigbatch report .figure/* -o docs/digits.svg
	rm -r .figure

clean:  ## remove all environments and caches; runs/ stays
	rm -rf .venv .venv-light .venv-outside .mutation .mypy_cache .pytest_cache .ruff_cache .hypothesis .figure site
