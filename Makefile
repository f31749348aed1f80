# The commands people type. Values reach the shell only through quoted variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
JOB ?= fingerprint_demo
VENV := .venv
T := $(VENV)/bin/trainyard
export JOB DATA RUN RAW OUT GPUS SET NAME

# DATA=folder  GPUS=n  NAME=name  SET="option=value option=value", handed on word by word and never evaluated
words = set -f; args=(); [ -z "$${DATA:-}" ] || args+=("data.path=$$DATA"); [ -z "$${GPUS:-}" ] || args+=(--gpus "$$GPUS"); \
	[ -z "$${NAME:-}" ] || args+=(--name "$$NAME"); for word in $${SET:-}; do args+=("$$word"); done

.PHONY: help setup run resume test lint pack verify report jobs bench bench-peers lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.done ## .venv from the hash-locked containers/dev.lock; skipped when it is current

$(VENV)/.done: containers/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "Python 3.11 is needed, $$($(PYTHON) --version) found. Type: make setup PYTHON=python3.11"; exit 2; }
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --progress-bar on --require-hashes -r containers/dev.lock
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

run: setup ## train: JOB=fingerprint_demo  DATA=folder  GPUS=n  SET="optimizer.lr=1e-4 seed=1"
	@$(words); $(T) run "$$JOB" "$${args[@]}"

resume: setup ## go on with a run: RUN=folder, or RUN=job for its newest
	@$(words); $(T) resume "$${RUN:-$$JOB}" "$${args[@]}"

.venv-peers/.done: benchmarks/peers.lock
	$(VENV)/bin/uv venv .venv-peers --python $(VENV)/bin/python --clear --quiet
	$(VENV)/bin/uv pip sync benchmarks/peers.lock --require-hashes --quiet --python .venv-peers/bin/python
	@touch $@

pack: setup ## write shards: JOB=fingerprint_1m RAW=folder OUT=folder
	@$(words); $(T) pack "$$JOB" "$${RAW:?is missing. Type: make pack JOB=$$JOB RAW=folder-of-raw-files OUT=folder-of-shards}" "$${OUT:?is missing. Type: make pack JOB=$$JOB RAW=folder-of-raw-files OUT=folder-of-shards}" "$${args[@]}"

verify: setup ## read shards in full and name every damaged record: OUT=folder
	@$(T) verify "$${OUT:?is missing. Type: make verify OUT=folder-of-shards}"

report: setup ## write a run's report: RUN=folder, or RUN=job for its newest
	@$(T) report "$${RUN:-$$JOB}"

jobs: setup ## list the jobs
	@$(T) jobs

test: setup ## lint, then all tests: CPU, no network
	@$(MAKE) --no-print-directory lint
	@$(VENV)/bin/python -m pytest

lint: setup ## ruff and mypy --strict
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/mypy

bench: setup ## read, decode and step rates against the peers in the same environment, into benchmarks/
	@$(T) bench

bench-peers: setup .venv-peers/.done ## the same, with webdataset, MosaicML Streaming and FFCV (benchmarks/README.md)
	@$(T) bench --peers .venv-peers

lock: setup ## resolve containers/*.in anew into *.lock, from PyPI alone
	@cd containers && for target in *.in; do \
		env -u PIP_FIND_LINKS ../$(VENV)/bin/uv pip compile "$$target" --output-file "$${target%.in}.lock" --generate-hashes --quiet \
			--no-header --only-binary :all: --no-binary antlr4-python3-runtime \
			--python-version 3.11 --python-platform x86_64-manylinux_2_28; done

clean: ## delete runs/ and data/; keeps the environment
	rm -rf runs data
