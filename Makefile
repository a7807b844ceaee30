# Each target is a thin call of `python -m ...`; those without make can type the same.
# On Windows the environment's Python is .venv\Scripts\python.exe.

PYTHON ?= python3
ifeq ($(OS),Windows_NT)
VENV := .venv/Scripts/python.exe
else
VENV := .venv/bin/python
endif
ENVIRONMENT := $(PYTHON) -m tools.environment
export TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help demo setup test test-long check notebooks lab bench clean

help: ## list the targets
	@$(PYTHON) -m tools.targets

demo: ## stream a real model's answers to several prompts at once
	@$(ENVIRONMENT)
	@$(VENV) -m minigen demo

setup: ## create .venv with everything: server, notebooks, tests
	@$(ENVIRONMENT) server notebooks test

test: ## run every check and test that takes minutes at most
	@$(ENVIRONMENT) test
	@$(VENV) -m minigen pull
	@$(VENV) -m tools.check
	@$(VENV) -m pytest

test-long: ## run the long tests too: large fuzz runs, repeated runs
	@$(ENVIRONMENT) test
	@$(VENV) -m minigen pull
	@$(VENV) -m pytest -m "long or not long"

check: ## lint, types, and that chapters, modules, tests and documents agree
	@$(ENVIRONMENT) test
	@$(VENV) -m tools.check

notebooks: ## update every notebook from its source and run it
	@$(ENVIRONMENT) notebooks
	@$(VENV) -m minigen pull
	@$(VENV) -m tools.notebooks

lab: ## open JupyterLab at the notebooks
	@$(ENVIRONMENT) notebooks
	@$(VENV) -m jupyter lab notebooks

bench: ## measure everything that has a benchmark, and write benchmarks/results/
	@$(ENVIRONMENT) test
	@$(VENV) -m minigen pull
	@$(VENV) -m benchmarks

clean: ## remove .venv and what tools left behind
	@$(PYTHON) -m tools.clean
