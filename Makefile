# The commands that people type. A target takes the variables that its line of help names, and PYTHON. Neither make nor
# a shell evaluates their values: make keeps them as typed, and recipes read them from the environment, in quotes.
# What was typed after `make`; not what bash adds to complete a line. DRY=1 counts from the environment too.
override typed := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
override typed := $(filter-out __BASH_MAKE_COMPLETION__,$(typed))
MAKEOVERRIDES :=

.DEFAULT_GOAL := help
override SHELL := /bin/bash
override .SHELLFLAGS := -eu -o pipefail -c
override VENV := .venv
override T := $(VENV)/bin/trainyard
PYTHON ?= python3
JOB ?= fingerprint_demo
export PYTHON JOB

ifneq ($(typed)$(value DRY),)
unexport $(typed)
override hash := \#
override takes := $(shell awk '/^[a-z-]+:.*$(hash)$(hash)/ { target = $$1; print target; \
	while (match($$0, /[A-Z][A-Z_]*=/)) { print target substr($$0, RSTART, RLENGTH - 1); $$0 = substr($$0, RSTART + RLENGTH) } }' \
	Makefile)
override commands := $(patsubst %:,%,$(filter %:,$(takes)))
override goals := $(filter $(commands),$(or $(MAKECMDGOALS),help))
override allowed := $(strip $(foreach goal,$(or $(goals),$(commands)),$(patsubst $(goal):%,%,$(filter $(goal):%,$(takes)))))
override refused := $(firstword $(filter-out $(allowed) PYTHON,$(typed)) \
	$(if $(value DRY),$(foreach goal,$(goals),$(if $(filter $(takes),$(goal):DRY),,DRY))))
ifneq ($(refused),)
override nearest := $(shell python3 -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1))' \
	'$(subst ','\'',$(refused))' $(allowed))
$(error $(strip make $(goals)) does not take $(refused).$(if $(nearest), Nearest: $(nearest).) It takes $(or $(allowed),no variables))
endif
$(foreach v,$(typed),$(eval override export $v := $$(value $v)))
endif

# SET="option=value option=value" word by word, DRY=1, and the flags that the call names: gpus reads GPUS
arguments = set -f; args=($${SET:-}); [ -z "$${DRY:-}" ] || args+=(--dry); \
	for flag in $1; do name=$${flag^^}; name=$${name//-/_}; [ -z "$${!name:-}" ] || args+=("--$$flag=$${!name}"); done
# DATA=folder, or SYNTHETIC=1 for generated samples; a number of them is SET="data.synthetic=N"
data = [ -z "$${DATA:-}" ] || args+=("data.path=$$DATA"); case "$${SYNTHETIC:-0}" in 0) ;; 1) args+=(--synthetic) ;; \
	*) echo "SYNTHETIC=$$SYNTHETIC: expected 1. For a number of samples: SET=\"data.synthetic=$$SYNTHETIC\"" >&2; exit 2 ;; esac
# PLAN=0 goes without a prediction of memory
memory = case "$${PLAN:-1}" in 1) ;; 0) args+=(--no-plan) ;; \
	*) echo "PLAN=$$PLAN: expected 0, to go without comparing predicted memory with the GPU's" >&2; exit 2 ;; esac
request = gpus hw nodes time cluster runs account qos partition constraint reservation exclude mem comment

.PHONY: help setup run resume submit plan sweep status logs why cancel cluster-check slurm-lab-up slurm-lab-down \
	image run-image sif bundle test test-fast test-long test-image test-coverage test-pythons lint gpu-check lock

help: ## this list; what else there is: .venv/bin/trainyard --help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile

# Sets $python to PYTHON, or, if nobody named it, to the first that is supported; says what each of them is if none is.
pythons = $(if $(filter file,$(origin PYTHON)),python3 python3.13 python3.12 python3.11,"$$PYTHON")
choose_python = python= tried=; for one in $(pythons); do \
	if "$$one" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then python=$$one; break; fi; \
	found=$$("$$one" --version 2>&1) || found="does not start$${found:+: $$found}"; \
	tried="$$tried$${tried:+; }$$one $${found:-says no version}"; done; tried=$${tried//$$'\n'/ }; \
	[ -n "$$python" ] || { echo "Python 3.11 to 3.13 is needed, and is not here. $$tried." \
		"Install one, and name it if it is not on PATH: make setup PYTHON=/path/to/python3.12"; exit 2; }

setup: $(VENV)/.done ## .venv from the hash-locked containers/dev.lock, with any Python 3.11 to 3.13 on PATH; skipped when current  [PYTHON=python3.13]
	@# An environment keeps its Python: to name another one must not be ignored in silence.
	@[ -z "$(filter PYTHON,$(typed))" ] || { $(choose_python); }; which='import sys; print(sys.version_info[:2])'; \
		[ -z "$(filter PYTHON,$(typed))" ] || \
		[ "$$("$$PYTHON" -c "$$which")" = "$$($(VENV)/bin/python -c "$$which")" ] || { \
		echo "$(VENV) has $$($(VENV)/bin/python --version), and $$PYTHON is $$("$$PYTHON" --version)." \
			"Type: rm -r $(VENV); make setup PYTHON=$$PYTHON"; exit 2; }

$(VENV)/.done: containers/dev.lock pyproject.toml
	@$(choose_python); "$$python" containers/make_venv.py $(VENV) containers/dev.lock --editable .

run: setup ## train: JOB=fingerprint_demo  DATA=folder or SYNTHETIC=1  GPUS=n  SET="optimizer.lr=1e-4 seed=1"  [NAME=name DRY=1]
	@$(call arguments,gpus name); $(data); $(T) run "$$JOB" "$${args[@]}"

resume: setup ## resume a run where it ran: RUN=run, or JOB=job for its newest  [GPUS=4 HW=a5000 NODES=n TIME=8h CLUSTER=name RUNS=folder PLAN=0 SET="option=value" DRY=1; to sbatch: ACCOUNT= QOS= PARTITION= CONSTRAINT= RESERVATION= EXCLUDE= MEM= COMMENT=]
	@$(call arguments,$(request)); $(memory); $(T) resume "$${RUN:-$$JOB}" "$${args[@]}"

submit: setup ## train on a cluster: JOB=fingerprint_1m GPUS=8  [DATA=folder SYNTHETIC=1 HW=a100 NODES=2 TIME=8h CLUSTER=name RUNS=folder NAME=name AFTER=run THEN=job PLAN=0 SET="option=value" DRY=1; to sbatch: ACCOUNT= QOS= PARTITION= CONSTRAINT= RESERVATION= EXCLUDE= MEM= COMMENT=]
	@$(call arguments,$(request) name after then); $(data); $(memory); $(T) submit "$$JOB" "$${args[@]}"

plan: setup ## how a job's global batch fits on each card, before it is queued: JOB=fingerprint_1m  [DATA=folder SYNTHETIC=1 HW=a5000,h200 GPUS=8 CLUSTER=name SET="option=value"]
	@$(call arguments,gpus hw cluster); $(data); $(T) plan "$$JOB" "$${args[@]}"

sweep: setup ## one array of runs: JOB=job SWEEP="optimizer.lr=1e-4,3e-4 seed=0,1,2"  [MAX_PARALLEL=4, and as for submit: DATA= SYNTHETIC= GPUS= HW= NODES= TIME= CLUSTER= RUNS= NAME= PLAN=0 SET= DRY=1; to sbatch: ACCOUNT= QOS= PARTITION= CONSTRAINT= RESERVATION= EXCLUDE= MEM= COMMENT=]
	@$(call arguments,$(request) name max-parallel); $(data); $(memory); \
		$(T) sweep "$$JOB" --sweep="$${SWEEP:?is missing. Type: make sweep JOB=$$JOB SWEEP=\"seed=0,1,2\"}" "$${args[@]}"

status: setup ## what runs, waits or has ended lately  [RUN=run, job or sweep]
	@$(T) status $${RUN:+"$$RUN"}

logs: setup ## a run's log, until it ends: RUN=run, or JOB=job for its newest
	@$(T) logs --follow "$${RUN:-$$JOB}"

why: setup ## why a run waits, stopped or failed, and the next command: RUN=run, or JOB=job for its newest
	@$(T) why "$${RUN:-$$JOB}"

cancel: setup ## stop a run, resumably: RUN=run, job or sweep
	@$(T) cancel "$${RUN:?is missing. Type: make cancel RUN=run}"

cluster-check: setup ## check slurm/NAME.yaml against this Slurm: CLUSTER=NAME
	@$(T) cluster-check $${CLUSTER:+"$$CLUSTER"}

slurm-lab-up: ## start a real Slurm on this machine, to learn and test with (slurm/lab)
	@"$$PYTHON" slurm/lab/lab.py up

slurm-lab-down: ## stop it, and every job in it
	@"$$PYTHON" slurm/lab/lab.py down

image: ## build the container image for a card: HW=a100 (default: cpu)  [WHEELS=folder BASE_IMAGE=name]
	@"$$PYTHON" containers/image.py build "$${HW:-cpu}" $${WHEELS:+--wheelhouse="$$WHEELS"}

test-image: ## run the test suite in the container image, without network: HW=a100  [QUICK=1]
	@"$$PYTHON" containers/image.py test "$${HW:-cpu}" $${QUICK:+--quick}

run-image: ## train in the container image: HW=a100 JOB=fingerprint_demo  [GPUS=n DATA=folder NAME=name SET="option=value" DRY=1]
	@$(call arguments,gpus data name); "$$PYTHON" containers/image.py run "$${HW:-cpu}" "$$JOB" "$${args[@]}"

sif: ## make an Apptainer image: HW=a100
	@"$$PYTHON" containers/image.py sif "$${HW:-cpu}"

bundle: ## write one tar of image, code, data, hashes, bill of materials: HW=a100 OUT=file.tar  [WHEELS=folder]
	@"$$PYTHON" containers/image.py bundle "$${HW:-cpu}" "$${OUT:?is missing. Type: make bundle HW=cpu OUT=trainyard.tar}" $${WHEELS:+--wheelhouse="$$WHEELS"}

pytest = $(VENV)/bin/python -m pytest -n auto --no-loadscope-reorder
linters = $(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/codespell && $(VENV)/bin/mypy

test: setup ## lint, and the tests that decide: CPU, no network
	@"$$PYTHON" containers/machine.py --memory-gib 8 --purpose "the tests"
	@# mypy keeps one core busy for a minute, so lint runs alongside the first tests and is shown last.
	@linted=$$(mktemp); trap 'rm -f "$$linted"' EXIT; { $(linters); } >"$$linted" 2>&1 & \
		code=0; $(pytest) -m "not long" || code=$$?; \
		wait $$! || code=$$?; cat "$$linted"; exit $$code

test-fast: setup ## the tests to run all day: no Slurm, no container, no training beyond seconds
	@$(pytest) -m "not long and not slow and not cluster"

test-long: setup ## the tests that take minutes, one after the other; writes tests/long.json, to be committed
	@$(VENV)/bin/python tests/record_results.py long

test-coverage: setup ## the branches that make test takes, child processes included; writes tests/coverage.json, to be committed
	@$(VENV)/bin/python tests/record_results.py coverage

test-pythons: setup ## set up and run the quick tests with each supported Python that is here  [NEWEST=1: newest allowed releases]
	@$(VENV)/bin/python tests/pythons.py $${NEWEST:+--newest}

lint: setup ## ruff, codespell and mypy --strict
	@$(linters)

gpu-check: setup ## prove this card with tests/gpu, in eight minutes, into benchmarks/; CPU=1: what runs without one  [CPU=1 SET="-k bitwise" or "--quick", which plants faults]
	@$(arguments); case "$${CPU:-0}" in 0) ;; 1) args=(--cpu "$${args[@]}") ;; \
		*) echo "CPU=$$CPU: expected 1, to run what can run without a GPU" >&2; exit 2 ;; esac; \
		$(VENV)/bin/python -m pytest tests/gpu -vv --results benchmarks "$${args[@]}"

lock: setup ## resolve containers/*.in into *.lock again, from PyPI alone
	@# dev.lock is installed on each supported Python, hence with markers; a container image has the oldest.
	@cd containers && for target in *.in; do \
		case $$target in dev.in) machine=--universal ;; *) machine=--python-platform=x86_64-manylinux_2_28 ;; esac; \
		env -u PIP_FIND_LINKS ../$(VENV)/bin/uv pip compile "$$target" --output-file "$${target%.in}.lock" --generate-hashes --quiet \
			--no-header --only-binary :all: --no-binary antlr4-python3-runtime \
			--python-version 3.11 $$machine; done
