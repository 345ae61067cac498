# Everything a developer needs; `make help` lists it. Two environments: the newest supported transformers in
# .venv, the oldest in .venv-5.17. A stamp file in each says that it is complete; it is renewed when
# pyproject.toml or its constraints change.
PYTHON ?= python3
VENV   ?= .venv
OLDEST ?= .venv-5.17
ARGS   ?=
TIERS  ?= not slow
DOCS_OUTPUTS ?= true

# Tests run in two processes, so each gets one thread; nothing is fetched from a hub. The tests of a file share a
# process, so that its fixtures and imports are made once. The first tier is what is not marked `slow`: tests of less
# than about two seconds. What is `exhaustive` is `slow` too. TIERS="not exhaustive" runs two tiers at once, as CI does:
# tests are collected and imported once. Bytecode is kept, whatever the environment says: each process would compile the
# packages and the tests again.
TEST_ENV = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
PYTEST   = -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Python compiles a module when it is first imported. pip would compile all, and nothing imports most of them.
INSTALL  = -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help setup setup-oldest demo docs test test-slow test-exhaustive test-all test-oldest lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Create the environment in .venv (the other targets do it by themselves)

setup-oldest: $(OLDEST)/.ready ## Create that with the oldest supported transformers, in .venv-5.17

demo: $(VENV)/.ready ## Answer the same prompts in full precision and through a packed cache (ARGS="--method int8")
	@$(VENV)/bin/qattn demo $(ARGS)

test: $(VENV)/.ready ## Run the first tier of tests, about six minutes on two cores (ARGS="-k cache" for some)
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m "$(TIERS)" $(ARGS)

test-slow: $(VENV)/.ready ## Run the second tier alone (exit code 5 of pytest: ARGS chose none of these)
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m "slow and not exhaustive" $(ARGS) || [ $$? -eq 5 ]

test-exhaustive: $(VENV)/.ready ## Run the full products of settings and the long histories, before a release
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) -m exhaustive $(ARGS) || [ $$? -eq 5 ]

test-all: ## Run the three tiers, the first one first
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-slow
	@$(MAKE) --no-print-directory test-exhaustive

test-oldest: $(OLDEST)/.ready ## Run what depends on transformers, each behaviour once, with its oldest supported version
	$(TEST_ENV) $(OLDEST)/bin/python $(PYTEST) -m "not slow" tests/conformance/test_model.py tests/test_windows.py \
		tests/test_captured_calls.py tests/kernels/test_oldest_triton.py $(ARGS)

docs: $(VENV)/.ready ## Build the documentation into site/: notebooks run (DOCS_OUTPUTS=false leaves that out), links are checked
	$(TEST_ENV) NO_MKDOCS_2_WARNING=1 DOCS_OUTPUTS=$(DOCS_OUTPUTS) $(VENV)/bin/python -m mkdocs build --strict  # --quiet would hide warnings from --strict too

lint: $(VENV)/.ready ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.ready ## Put the code into the project's style, and clear the notebooks' outputs
	$(VENV)/bin/nbstripout --keep-id examples/*.ipynb
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove what was built or cached, keep the environments
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,dev)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(call install,$(OLDEST),constraints-oldest.txt,test)

# $(1) environment, $(2) constraints, $(3) extra. A new pip takes half as long as the one that comes with Python. Build
# backends are installed first and used as they are, so that they are pinned too: hatchling is ours, setuptools that of
# some of lm-eval's dependencies. A half-made or broken environment is made anew.
define install
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10 or newer is needed: install it, or name it with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Setting up $(1) (some minutes and about 2 GB the first time)"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/python $(INSTALL) -c $(2) pip hatchling setuptools
	$(1)/bin/python $(INSTALL) -c $(2) --no-build-isolation -e '.[$(3)]'
	@touch $@
endef
