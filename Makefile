# Needs Python >= 3.11 and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COMPILED := .venv/.compiled
OUTSIDE := .venv-outside/bin
OUTSIDE_READY := .venv-outside/.ready
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNS ?= runs

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-release test-outside check bench picture clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: $(READY)  ## create .venv with every extra

# timm without the torchvision that it wants: two of its files are compared with, and need torch alone
$(READY): pyproject.toml constraints.txt src/bigbatch/kernels/kernels.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -e '.[dev]'
	$(BIN)/python $(PIP) --no-deps timm
	@touch $@

# what DeepSpeed compiles on first use: a minute; where there is no compiler its tests are skipped
$(COMPILED): $(READY)
	-PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tests/helpers/compiled.py
	@touch $@

run: $(READY)  ## train the digits study and write its report
	$(BIN)/bigbatch train --runs-dir $(RUNS)

# two test processes on two cores, each with ranks of its own
test test-all test-release test-outside: export OMP_NUM_THREADS = 1
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal $(if $(AREA),tests/$(AREA))

test: $(COMPILED)  ## every promise once, in four minutes; AREA=optim for one folder of tests
	$(PYTEST) -m "not thorough and not release"

test-all: $(COMPILED)  ## what CI runs: pairs of engine, precision, ranks, rule; kill and resume
	$(PYTEST) -m "not release"

test-release: $(COMPILED) $(if $(AREA),,test-outside)  ## the rest: full products, studies, elastic runs; test-outside
	$(PYTEST) -m release

# an environment of its own, for what nothing else here needs: 3 GB, from pip's package registry
$(OUTSIDE_READY): pyproject.toml constraints.txt tests/outside/requirements.txt src/bigbatch/kernels/kernels.c
	$(PYTHON) -m venv .venv-outside
	$(OUTSIDE)/python $(PIP) -r tests/outside/requirements.txt -e '.[dev]'
	$(OUTSIDE)/python $(PIP) --no-deps timm
	-PATH=$(abspath $(OUTSIDE)):$$PATH $(OUTSIDE)/python tests/helpers/compiled.py
	@touch $@

test-outside: $(OUTSIDE_READY)  ## scripts and optimizers of others, chaos, fuzz; in .venv-outside
	$(OUTSIDE)/python -m pytest -n 2 --dist worksteal tests/outside

check: $(READY)  ## style, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_architecture.py

bench: $(READY)  ## what measuring and scaling cost, as ratios of one run
	$(BIN)/bigbatch bench measure
	$(BIN)/bigbatch bench optim

picture: $(READY)  ## the README's picture, from a fresh digits study
	$(BIN)/bigbatch train --runs-dir .picture --quiet
	$(BIN)/bigbatch report .picture/* -o docs/digits.png
	rm -r .picture

clean:  ## remove both environments and caches; runs/ stays
	rm -rf .venv .venv-outside .mutation .mypy_cache .pytest_cache .ruff_cache .hypothesis .picture
