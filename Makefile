# The commands that people type. Values reach the shell only through quoted variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
JOB ?= fingerprint_demo
VENV := .venv
T := $(VENV)/bin/trainyard
export JOB DATA RUN RAW OUT GPUS SET NAME WHEELS BUNDLE HW NODES TIME CLUSTER RUNS SWEEP MAX_PARALLEL DRY COVERAGE PYTHON PIECES

# DATA=folder  GPUS=n  NAME=name  SET="option=value option=value": passed on word by word, never evaluated
words = set -f; args=(); [ -z "$${DATA:-}" ] || args+=("data.path=$$DATA"); [ -z "$${GPUS:-}" ] || args+=(--gpus "$$GPUS"); \
	[ -z "$${NAME:-}" ] || args+=(--name "$$NAME"); for word in $${SET:-}; do args+=("$$word"); done

# HW=type  NODES=n  TIME=8h30m  CLUSTER=name  RUNS=folder  DRY=1
request = $(words); for pair in "hw $${HW:-}" "nodes $${NODES:-}" "time $${TIME:-}" "cluster $${CLUSTER:-}" "runs $${RUNS:-}"; do \
	[ -z "$${pair\#* }" ] || args+=("--$${pair%% *}" "$${pair\#* }"); done

.PHONY: help setup run resume submit sweep results status logs why cancel runs cluster-check slurm-lab-up slurm-lab-down \
	slurm-lab-status image test-image run-image sif wheelhouse bundle verify-bundle test test-fast test-long lint pack verify report jobs bench bench-peers gpu-check lock gc clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.done ## .venv from the hash-locked containers/dev.lock; skipped when it is current

$(VENV)/.done: containers/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "Python 3.11 is needed, $$($(PYTHON) --version 2>/dev/null || echo none) found. Type: make setup PYTHON=python3.11"; exit 2; }
	@$(PYTHON) containers/make_venv.py $(VENV) containers/dev.lock --editable .

run: setup ## train: JOB=fingerprint_demo  DATA=folder  GPUS=n  SET="optimizer.lr=1e-4 seed=1"
	@$(words); $(T) run "$$JOB" "$${args[@]}"

resume: setup ## resume a run where it ran: RUN=folder, or RUN=job for its newest  [GPUS=4 HW=a5000]
	@$(request); $(T) resume "$${RUN:-$$JOB}" "$${args[@]}"

submit: setup ## train on a cluster: JOB=fingerprint_1m GPUS=8  [HW=a100 NODES=2 TIME=8h CLUSTER=name DRY=1]
	@$(request); [ -z "$${DRY:-}" ] || args+=(--dry); $(T) submit "$$JOB" "$${args[@]}"

sweep: setup ## one array of runs: JOB=job SWEEP="optimizer.lr=1e-4,3e-4 seed=0,1,2"  [MAX_PARALLEL=4]
	@$(request); $(T) sweep "$$JOB" --sweep "$${SWEEP:?is missing. Type: make sweep JOB=$$JOB SWEEP=\"seed=0,1,2\"}" \
		--max-parallel "$${MAX_PARALLEL:-0}" "$${args[@]}"

results: setup ## the results of a sweep: RUN=sweep
	@$(T) results "$${RUN:?is missing. Type: make results RUN=name-of-the-sweep}"

status: setup ## what runs, waits or has ended lately  [RUN=run, job or sweep]
	@$(T) status $${RUN:+"$$RUN"}

logs: setup ## a run's log, until it ends: RUN=run or job
	@$(T) logs --follow "$${RUN:-$$JOB}"

why: setup ## why a run waits, stopped or failed, and what to do: RUN=run or job
	@$(T) why "$${RUN:-$$JOB}"

cancel: setup ## stop a run, resumably: RUN=run, job or sweep
	@$(T) cancel "$${RUN:?is missing. Type: make cancel RUN=run}"

runs: setup ## list all runs
	@$(T) runs

cluster-check: setup ## check slurm/NAME.yaml against this Slurm: CLUSTER=NAME
	@$(T) cluster-check $${CLUSTER:+"$$CLUSTER"}

slurm-lab-up: ## start a real Slurm on this machine, to learn and test with (slurm/lab)
	@$(PYTHON) slurm/lab/lab.py up

slurm-lab-down: ## stop it, and every job in it
	@$(PYTHON) slurm/lab/lab.py down

slurm-lab-status: ## show its nodes, jobs and daemons
	@$(PYTHON) slurm/lab/lab.py status

.venv-peers/.done: benchmarks/peers.lock
	@exec 9>.venv-peers.lock; flock 9; [ ! $@ -nt $< ] || exit 0; \
		$(VENV)/bin/uv venv .venv-peers --python $(VENV)/bin/python --clear --quiet; \
		$(VENV)/bin/uv pip sync benchmarks/peers.lock --require-hashes --quiet --python .venv-peers/bin/python; \
		touch $@

pack: setup ## write shards: JOB=fingerprint_1m RAW=folder OUT=folder
	@$(words); $(T) pack "$$JOB" "$${RAW:?is missing. Type: make pack JOB=$$JOB RAW=folder-of-raw-files OUT=folder-of-shards}" "$${OUT:?is missing. Type: make pack JOB=$$JOB RAW=folder-of-raw-files OUT=folder-of-shards}" "$${args[@]}"

verify: setup ## read shards in full and list every damaged record: OUT=folder
	@$(T) verify "$${OUT:?is missing. Type: make verify OUT=folder-of-shards}"

report: setup ## write a run's HTML report: RUN=folder, or RUN=job for its newest
	@$(T) report "$${RUN:-$$JOB}"

jobs: setup ## list the jobs
	@$(T) jobs

image: ## build the container image for a card: HW=a100 (default: cpu)  [WHEELS=folder BASE_IMAGE=name]
	@$(PYTHON) containers/image.py build "$${HW:-cpu}" $${WHEELS:+--wheelhouse "$$WHEELS"}

test-image: ## run the test suite in the container image, without network: HW=a100
	@$(PYTHON) containers/image.py test "$${HW:-cpu}"

run-image: ## train in the container image: HW=a100 JOB=fingerprint_demo  [GPUS=n DATA=folder NAME=name SET="option=value"]
	@set -f; args=($${SET:-}); [ -z "$${GPUS:-}" ] || args+=(--gpus "$$GPUS"); [ -z "$${DATA:-}" ] || args+=(--data "$$DATA"); \
		[ -z "$${NAME:-}" ] || args+=(--name "$$NAME"); $(PYTHON) containers/image.py run "$${HW:-cpu}" "$$JOB" "$${args[@]}"

sif: ## make an Apptainer image: HW=a100
	@$(PYTHON) containers/image.py sif "$${HW:-cpu}"

wheelhouse: ## download wheels for a machine without network: HW=a100 OUT=wheels  [PYTHON=3.12 PIECES=60]
	@case "$$PYTHON" in [0-9]*) version=$$PYTHON python=python3 ;; *) version= python=$$PYTHON ;; esac; \
		"$$python" containers/image.py wheelhouse "$${HW:-cpu}" "$${OUT:-wheels}" \
		$${version:+--python "$$version"} $${PIECES:+--pieces "$$PIECES"}

bundle: ## write one tar of image, code, data, hashes, bill of materials: HW=a100 OUT=file.tar  [WHEELS=folder]
	@$(PYTHON) containers/image.py bundle "$${HW:-cpu}" "$${OUT:?is missing. Type: make bundle HW=cpu OUT=trainyard.tar}" $${WHEELS:+--wheelhouse "$$WHEELS"}

verify-bundle: ## check every file of a bundle, and train without network: BUNDLE=file.tar
	@$(PYTHON) containers/image.py verify-bundle "$${BUNDLE:?is missing. Type: make verify-bundle BUNDLE=trainyard.tar}"

# COVERAGE=1: measured, processes that tests start included
pytest = $(if $(COVERAGE),COVERAGE_FILE="$$PWD/.coverage" )$(VENV)/bin/$(if $(COVERAGE),coverage run,python) -m pytest -n auto --no-loadscope-reorder

test: setup ## lint, and the tests that decide: CPU, no network  [COVERAGE=1]
	@$(PYTHON) containers/machine.py --memory-gib 8 --purpose "the tests"
	@# mypy keeps one core busy for a minute, so lint runs alongside the first tests and is shown last.
	@linted=$$(mktemp); trap 'rm -f "$$linted"' EXIT; $(MAKE) --no-print-directory lint >"$$linted" 2>&1 & \
		code=0; $(pytest) -m "not long" || code=$$?; \
		wait $$! || code=$$?; cat "$$linted"; exit $$code
	@[ -z "$${COVERAGE:-}" ] || { $(VENV)/bin/coverage combine --quiet; $(VENV)/bin/coverage report --sort=cover | tail -n 15; }

test-fast: setup ## the tests to run all day: no Slurm, no container, no training beyond seconds
	@$(pytest) -m "not long and not slow and not cluster"

test-long: setup ## the tests that take minutes, one after the other; writes tests/long.json, to be committed
	@$(VENV)/bin/python tests/run_long.py

lint: setup ## ruff, codespell and mypy --strict
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/codespell && $(VENV)/bin/mypy

bench: setup ## measure reading, decoding and steps against other loaders, into benchmarks/
	@$(T) bench

gpu-check: setup ## find out what this card does with every job, in ten minutes, into benchmarks/  [SET="--quick --only bitwise"]
	@set -f; $(T) gpu-check $${SET:-}

bench-peers: setup .venv-peers/.done ## the same, adding webdataset, MosaicML Streaming and FFCV (benchmarks/README.md)
	@$(T) bench --peers .venv-peers

lock: setup ## resolve containers/*.in into *.lock again, from PyPI alone
	@cd containers && for target in *.in; do \
		env -u PIP_FIND_LINKS ../$(VENV)/bin/uv pip compile "$$target" --output-file "$${target%.in}.lock" --generate-hashes --quiet \
			--no-header --only-binary :all: --no-binary antlr4-python3-runtime \
			--python-version 3.11 --python-platform x86_64-manylinux_2_28; done

gc: setup ## show what takes disk space and who needs it
	@$(T) gc

clean: ## delete runs/ and data/, after asking; keeps the environment
	@du -sh runs data 2>/dev/null || true; read -r -p "Delete these, runs and checkpoints included? [y/N] " answer || true; \
		if [ "$${answer:-n}" = y ]; then rm -rf runs data; else echo "Nothing was deleted."; fi
