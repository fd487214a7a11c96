# One command for each thing a contributor does. `make help` lists them.
#
# Everything runs in .venv, made by the plain venv module and filled by plain pip under
# constraints.txt. The stamp inside it is older than pyproject.toml or constraints.txt exactly when
# the environment has to be filled again.

PYTHON ?= python3
PLANS  ?= 1000
PROGRAMS ?= 1000
EACH   ?= 1
JOBS   ?= $(shell nproc)

FRESH := $(or $(SEED),$(shell date +%s))

BIN   := .venv/bin
STAMP := .venv/.filled
PARTS := $(addprefix bench/,common.py length_cases.py models.py peers.py race.py rivals.py)
TORCH := $(shell grep '^torch==' constraints.txt)
VISION := $(shell grep '^torchvision==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench pictures attack fuzz fuzz-models prove sweep

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv and install laminar with everything the tests need

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --no-deps --upgrade --target .venv/vision '$(VISION)' # beside: see tests/suites/vision.py
	touch $@

demo: setup ## train a small GPT on two ranks and in plain PyTorch, and show that the weights agree
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo.py # threads that wait should not spin: cores may be shared

lint: setup ## ruff (lint and format), mypy --strict, who-may-import-whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint, then every test that needs neither a GPU nor minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu and not slow'

prove: setup ## tests that take minutes: training in every layout, optimizer and precision; 100,000 plans against searches; parts of a sweep
	@echo "random examples of seed $(FRESH); again with SEED=$(FRESH)"
	LAMINAR_SEED=$(FRESH) $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow and not sweep and not gpu and not attack' --ignore=tests/fuzz --timeout 1800 --hypothesis-seed=$(FRESH)
	LAMINAR_SEED=$(FRESH) $(BIN)/python -m pytest -n 2 --dist worksteal -m attack --timeout 1800 tests/attack/test_attack.py

sweep: setup ## all of torch's operators and modules, transformers' and torchvision's models, in every way; hours, on JOBS cores
	LAMINAR_SEED=$(FRESH) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m sweep

attack: setup ## plans that may contradict a search, as in make prove and for larger models; EACH=1 times as many, on JOBS cores
	OMP_NUM_THREADS=1 PYTHONPATH=.:examples $(BIN)/python -m tests.attack.run --jobs $(JOBS) --times $(EACH) $(if $(SEED),--seed $(SEED))

fuzz: setup ## random plans and edited files; PLANS=1000 says how many, SEED=... which
	@echo "random examples of seed $(FRESH); again with SEED=$(FRESH)"
	LAMINAR_SEED=$(FRESH) LAMINAR_FUZZ_PLANS=$(PLANS) $(BIN)/python -m pytest -m slow tests/fuzz tests/test_edited_files.py --hypothesis-seed=$(FRESH)

fuzz-models: setup ## random models against plain PyTorch; PROGRAMS=1000 says how many, SEED=... which
	$(BIN)/python -m tests.fuzz.models --programs $(PROGRAMS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

pictures: setup ## draw the pictures of the README from bench/results
	$(BIN)/python docs/pictures/make.py

bench: setup ## run every benchmark, one JSON line per result
	@set -e; for file in $(filter-out $(PARTS),$(sort $(wildcard bench/*.py))); do echo "# $$file" >&2; $(BIN)/python $$file; done
