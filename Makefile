# Two commands do everything on a fresh machine: `make bench` and `make test`.
PYTHON ?= python3
VENV ?= .venv
EXPERIMENT ?= experiments/quickstart.yaml
LAUNCHER ?= local
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: bench test test-all check format lint speed leaderboard clean help

help:            ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

$(READY): pyproject.toml
	@echo "Setting up $(VENV) once (a few minutes, mostly the download of PyTorch) ..."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ssl_bench needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,slurm]'
	@touch $(READY)

bench: $(READY)  ## run a study (EXPERIMENT=...) and end in its leaderboard
	@$(BIN)/ssl-bench run $(EXPERIMENT) --launcher $(LAUNCHER)

leaderboard: $(READY)  ## rebuild the tables of a study from its folder
	@$(BIN)/ssl-bench leaderboard $(EXPERIMENT)

test: $(READY)   ## the quick tests (a few minutes)
	@$(BIN)/python -m pytest -m "not slow and not gpu and not download and not slurm" -n 2 -q

test-all: $(READY)  ## every test this machine can run
	@$(BIN)/python -m pytest -m "not download" -n 2 -q

check: $(READY)  ## prove every registered method (add ARGS=--fast to leave out the training runs)
	@$(BIN)/ssl-bench check --all $(ARGS)

lint: $(READY)   ## format check, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

speed: $(READY)  ## measure this machine against the bare floor
	@$(BIN)/ssl-bench speed

clean:           ## remove the environment and generated results
	@rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@echo "results/ is kept; remove its folders by hand if you mean it."
