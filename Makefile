# Everything runs in .venv, which `setup` makes; nothing outside the repository is touched.
#   make demo    the main road on a small trained language model
#   make test    lint, types, layers and the first tier of the tests
# Another interpreter: make PYTHON=python3.12 setup

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/setup.stamp
LOCKS   := requirements.lock requirements-torch.lock requirements-cuda.lock
CUDA    := 'import importlib.metadata as m, sys; sys.exit("+cpu" in m.version("torch"))'
PIP     := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
SHELL   := /bin/sh

# Tests start hundreds of processes: without bytecode, each compiles all sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lock sbom tools demo demo-minilm test test-fast test-full test-programs test-slow test-gpu coverage matrix lint type layers format \
        fuzz-language mutants grammar pages docs man wheel changelog clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' Makefile | while IFS='	' read -r name what; do \
	  printf '  make %-18s %s\n' "$$name" "$$what"; done
	@printf '  make %-18s %s\n' bench-NAME "run bench/NAME.py and write bench/results/NAME.json"

# --- set-up ---------------------------------------------------------------------------------------

setup: $(STAMP) ## make .venv and install everything; a second run installs nothing

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kcdsl needs Python 3.11 or newer; '$(PYTHON)' is not." >&2; \
	  echo "Name another one: make PYTHON=python3.12 setup" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Every package is one of those whose digests are in the lock files; the build of kcdsl itself, too,
# uses nothing else. A build of torch that lies on this machine comes before that of the index; what
# torch needs for CUDA is left out where it is built for CPUs alone.
$(STAMP): pyproject.toml $(LOCKS) | $(BIN)/python
	@echo "Installing kcdsl and the packages of requirements.lock (minutes, the first time)."
	@rm -f $@
	$(PIP) install --require-hashes --no-deps -r requirements.lock
	@$(PIP) install --require-hashes --no-deps --no-index -r requirements-torch.lock 2> /dev/null || \
	  $(PIP) install --require-hashes --no-deps -r requirements-torch.lock
	@if $(BIN)/python -c $(CUDA); then \
	  $(PIP) install --require-hashes --no-deps -r requirements-cuda.lock; fi
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

lock: ## write the lock files anew; WHEELS=FOLDER: builds of torch that are accepted too
	@PYTHON=$(PYTHON) .ci/lock $(WHEELS)

sbom: setup ## write dist/sbom.cdx.json (CycloneDX) and the licences of all that is installed
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --mc-type application --of JSON -o dist/sbom.cdx.json $(BIN)/python
	$(BIN)/pip-licenses --python $(BIN)/python --from mixed --format plain-vertical \
	  --with-license-file --no-license-path --with-urls --output-file dist/third-party-licences.txt

# --- the main road --------------------------------------------------------------------------------

demo: setup ## compile, verify, evaluate and check examples/tiny_lm
	@sh examples/demo.sh examples/tiny_lm

demo-minilm: setup ## the same road on real weights, all-MiniLM-L6-v2
	@$(BIN)/python examples/minilm/check_weights.py
	@sh examples/demo.sh examples/minilm

# --- tests ----------------------------------------------------------------------------------------

test: setup lint type layers test-fast ## everything that must pass before a change goes in

# Programs that tests run beside the Python packages: second opinions, shells, a compiler, a browser
# and real editors. Installed where they are missing and this may be done, which needs root.
PROGRAMS := openssl:openssl nvim:neovim emacs:emacs-nox node:nodejs npm:npm zsh:zsh fish:fish g++:g++ chromium:chromium docker-registry:docker-registry skopeo:skopeo pg_createcluster:postgresql
tools: ## install the editors and other programs that tests run
	@wanted=; for pair in $(PROGRAMS); do command -v $${pair%%:*} > /dev/null || wanted="$$wanted $${pair#*:}"; done; \
	[ -n "$$(ls -d /usr/share/emacs/site-lisp/elpa*/eglot* 2> /dev/null)" ] || wanted="$$wanted elpa-eglot"; \
	if [ -n "$$wanted" ]; then \
	  echo "Installing$$wanted, which tests run."; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $$wanted > /dev/null; } || { \
	  echo "The tests run these programs; please install:$$wanted" >&2; exit 1; }; fi
	@for folder in tests/editors tests/verifiers grammar/editors/vscode docs/site; do \
	  [ $$folder/node_modules/.package-lock.json -nt $$folder/package-lock.json ] || \
	  npm ci --prefix $$folder --no-audit --no-fund --loglevel=error || exit 1; done
	@[ tests/verifiers/.venv/pyvenv.cfg -nt tests/verifiers/requirements.txt ] || { \
	  $(PYTHON) -m venv --clear tests/verifiers/.venv && \
	  tests/verifiers/.venv/bin/pip install -q --disable-pip-version-check --require-hashes --no-deps \
	    -r tests/verifiers/requirements.txt && touch tests/verifiers/.venv/pyvenv.cfg; }

test-fast: setup ## the first tier of the tests alone: minutes
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not full and not slow and not gpu and not programs"

test-full: setup ## both tiers of the tests
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not gpu and not programs"

test-programs: setup tools ## the tests that run editors, a browser, shells, openssl and a C++ compiler
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "programs and not slow and not gpu"

test-slow: setup tools ## the tests that take minutes
	$(BIN)/python -m pytest -q -m "slow and not gpu"

# Statements and branches of this process and its workers; what tests run as a process of its own
# does not count.
coverage: setup ## statements and branches that the first tier runs, and refusals that it does not
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not full and not slow and not gpu and not programs" \
	  --cov --cov-branch --cov-report=term --cov-report=html:build/coverage
	$(BIN)/python -m bench.unreached

# Each version in an environment of its own, .venv-3.12 and the like. A build of torch for CPUs that
# `pip` finds beside the index is used where it fits the version.
PYTHONS ?= 3.11 3.12 3.13
matrix: ## `make test` with each Python of PYTHONS; one that is not installed is an error
	@failed=; for version in $(PYTHONS); do \
	  echo "Python $$version:"; \
	  $(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "Failed with Python$$failed." >&2; exit 1; }

test-gpu: setup ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

lint: setup ## ruff: rules and format
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

type: setup ## mypy --strict, and pyright on code as users write it
	$(BIN)/mypy
	$(BIN)/mypy tests bench examples docs/site
	$(BIN)/basedpyright --warnings

layers: setup ## import-linter: which package may import which
	$(BIN)/lint-imports --no-logo

format: setup ## rewrite the sources in the house format
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

grammar: setup ## write the parse table of the expression grammar
	$(BIN)/python -m tests.support.expression_tables

pages: setup ## write docs/reference/codes.md, the index of diagnostic codes
	$(BIN)/python -c "from tests.unit.diagnostics.test_code_texts import INDEX, index; open(INDEX, 'w', encoding='utf-8').write(index())"

# Node's packages hold KaTeX, which sets the formulas; what is built needs no network.
docs: setup ## build the manual into build/site; a link that leads nowhere is an error
	@[ docs/site/node_modules/.package-lock.json -nt docs/site/package-lock.json ] || \
	  npm ci --prefix docs/site --no-audit --no-fund --loglevel=error
	$(BIN)/python -m docs.site.assemble
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

man: setup ## write docs/man/kcdsl.1, the manual page, from the declarations of the commands
	$(BIN)/python -m docs.site.man

# --- benchmarks -----------------------------------------------------------------------------------

bench-%: setup
	$(BIN)/python -m bench.$(subst -,_,$*)

COUNT ?= 20000
SEED  ?= 1
fuzz-language: setup ## COUNT damaged documents of campaign SEED: no crash, no hang, no other meaning
	$(BIN)/python -m bench.fuzz_language --count $(COUNT) --seed $(SEED) --workers $(WORKERS)

mutants: setup ## every change of every field of a proof, and defects planted in the checker
	$(BIN)/python -m pytest -q -m slow tests/unit/certs/test_proof_fields.py
	$(BIN)/python -m bench.mutants

# --- releases -------------------------------------------------------------------------------------

# The wheel is tried as a release gate has it: with the packages of requirements-gate.lock alone.
wheel: setup ## build sdist and wheel, check what is in them, try the wheel in a clean environment
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m hatchling build
	$(BIN)/python -m pytest -q tests/packaging/test_wheel.py tests/packaging/test_release_gate.py
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check --no-input -qq install \
	  --require-hashes --no-deps -r requirements-gate.lock
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check --no-input -qq install --no-deps dist/*.whl
	$(VENV)-wheel/bin/kcdsl --help > /dev/null
	$(VENV)-wheel/bin/kcdsl lint examples/tiny_lm/contract.yaml
	$(VENV)-wheel/bin/python -m kcdsl_certs --help > /dev/null
	$(VENV)-wheel/bin/kcdsl doctor > /dev/null; test $$? -eq 2

changelog: setup ## show the changelog entry that the fragments make
	$(BIN)/towncrier build --draft --version next

# --- tidying --------------------------------------------------------------------------------------

clean: ## remove what builds, tests and demos leave behind
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
	  examples/tiny_lm/out examples/minilm/out $(VENV)-wheel
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
