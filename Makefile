# make demo [DATA=path] [PORT=8000]   the whole service on embedded defaults
# make test | test-fast | lint | bench   what they say; test-fast leaves out what takes long
# make screenshots                    of the dashboard, into docs/dashboard
# make site                           the documentation, into var/site
# make faults                         the long runs that kill, pause and cut off: an hour or more
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENT := clients/python/ncr_client
PORT   ?= 8000
DATA   ?=

.PHONY: demo test test-fast site screenshots lint format bench faults setup setup-dev clean

demo: setup
	@$(BIN)/ncr demo --port $(PORT) $(if $(DATA),--data "$(DATA)")

# The fast ones first. Tests that start processes come last and one by one: they stop, kill and
# time them.
test: setup-dev
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not e2e and not browser"
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not e2e and not browser"
	$(BIN)/python -m pytest -m e2e -rs
	$(BIN)/python -m pytest -m browser -rs tests/browser
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-fast: setup-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not e2e and not browser"

site: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Of a service with made-up data.
screenshots: setup-dev
	NCR_TEST_SCREENSHOTS=docs/dashboard $(BIN)/python -m pytest -m browser tests/browser

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/prose.py

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev
	$(BIN)/python -m benchmarks $(ARGS)

faults: setup-dev
	$(BIN)/python -m benchmarks.faults $(ARGS)

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev $(CLIENT)/client.py

$(VENV)/.installed: pyproject.toml requirements.lock scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh "$(VENV)" ".[service]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml requirements.lock scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh "$(VENV)" ".[dev]"
	@touch $@ $(VENV)/.installed

# The client for threads is made from the one for asyncio.
$(CLIENT)/client.py: $(CLIENT)/async_client.py clients/python/hatch_build.py
	@$(PYTHON) clients/python/hatch_build.py
	@touch $@

clean:
	rm -rf $(VENV)
