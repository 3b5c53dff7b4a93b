# make demo [DATA=path] [PORT=8000]   the whole service on embedded defaults
# make test | lint | bench            what they say
# make faults                         the long runs that kill, pause and cut off: an hour or more
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
DATA   ?=

.PHONY: demo test lint format bench faults setup setup-dev clean

demo: setup
	@$(BIN)/ncr demo --port $(PORT) $(if $(DATA),--data "$(DATA)")

# Tests that start processes come last and one by one: they stop, kill and time them.
test: setup-dev
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not e2e"
	$(BIN)/python -m pytest -m e2e
else
	$(BIN)/python -m pytest $(ARGS)
endif

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev
	$(BIN)/python -m benchmarks $(ARGS)

faults: setup-dev
	$(BIN)/python -m benchmarks.faults $(ARGS)

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml requirements.lock scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh "$(VENV)" .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml requirements.lock scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh "$(VENV)" ".[dev]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
