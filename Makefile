# Each target is a thin call of `python -m ...`; without make, type the same commands.
# On Windows the environment's Python is .venv\Scripts\python.exe. Where this folder is read-only,
# `make TARGET VENV_DIR=/elsewhere BUILD_DIR=/elsewhere` moves the environment and the built files.

PYTHON ?= python3
HAS_TORCH = $(PYTHON) -c 'import torch, triton, pytest' 2> /dev/null || { echo "$(PYTHON) lacks \
torch, triton or pytest: name a Python that has them, as in make $@ PYTHON=.venv/bin/python" >&2; exit 1; }
VENV_DIR ?= .venv
ifeq ($(OS),Windows_NT)
VENV := "$(VENV_DIR)/Scripts/python.exe"
else
VENV := "$(VENV_DIR)/bin/python"
endif
ENVIRONMENT := $(PYTHON) -m tools.environment
export TORCH_INDEX VENV_DIR

.DEFAULT_GOAL := help
.PHONY: help demo serve setup test test-long test-browser test-clients test-gpu check notebooks lab book docs bench bench-gpu bench-peers clean

help: ## list the targets
	@$(PYTHON) -m tools.targets

demo: ## stream a real model's answers to several prompts at once
	@$(ENVIRONMENT) cpu
	@$(VENV) -m minigen compile int4
	@$(VENV) -m minigen demo

serve: ## serve the default model to any OpenAI client, at http://127.0.0.1:8000/v1
	@$(ENVIRONMENT) cpu server
	@$(VENV) -m minigen compile int4
	@$(VENV) -m minigen serve

setup: ## create .venv with everything: server, notebooks, tests
	@$(ENVIRONMENT) cpu server notebooks test

test: ## run every check, test and notebook, and print one summary (about 20 minutes)
	@$(ENVIRONMENT) cpu server notebooks test
	@$(VENV) -m minigen pull
	@$(VENV) -m tools.test

test-long: ## run the long tests too, in random order (SEED=... repeats one), then other environments
	@$(ENVIRONMENT) cpu server notebooks test docs
	@$(VENV) -m minigen pull
	@failed=0; \
	$(VENV) -m pytest -m "not browser" --random-order $(if $(SEED),--random-order-seed=$(SEED)) || failed=1; \
	$(VENV) -m tools.portability || failed=1; \
	exit $$failed

test-browser: ## run every notebook and an assignment in JupyterLab in a browser
	@$(ENVIRONMENT) cpu server notebooks test
	@$(VENV) -m minigen pull
	@$(VENV) -m pytest -m browser tests/test_browser.py tests/test_browser_course.py

test-clients: ## run other projects' clients, unchanged, against the server (installs them first)
	@$(ENVIRONMENT) cpu server
	@$(VENV) -m minigen pull
	@$(VENV) -m minigen compile int4
	@$(VENV) -m tools.clients

test-gpu: ## check the Triton kernels on this machine's GPUs, one or two; installs nothing, uses $(PYTHON)
	@$(HAS_TORCH)
	@$(PYTHON) -m pytest -q -rs -c tests/gpu/pytest.ini tests/gpu/equal_*.py

check: ## check lint and types, and that chapters, modules, tests and documents agree
	@$(ENVIRONMENT) cpu server notebooks test
	@$(VENV) -m tools.check

notebooks: ## update every notebook from its source, and run it
	@$(ENVIRONMENT) cpu notebooks
	@$(VENV) -m minigen pull
	@$(VENV) -m tools.notebooks

lab: ## open JupyterLab at the map
	@$(ENVIRONMENT) cpu notebooks
	@$(VENV) -m minigen pull
	@$(VENV) -m jupyter lab notebooks/00_map.ipynb

book: ## write all chapters as one static site, with controls that need no kernel
	@$(ENVIRONMENT) cpu notebooks
	@$(VENV) -m tools.book

docs: ## build the documentation as one site that works offline, in build/site
	@$(ENVIRONMENT) docs
	@$(VENV) -m mkdocs build --site-dir "$(or $(BUILD_DIR),build)/site"
docs: export NO_MKDOCS_2_WARNING = 1

bench: ## run every benchmark, and write benchmarks/results/
	@$(ENVIRONMENT) cpu test
	@$(VENV) -m minigen pull
	@$(VENV) -m benchmarks

bench-gpu: ## check and time kernels and engine on this machine's GPU; installs nothing
	@$(HAS_TORCH)
	@$(PYTHON) -m benchmarks.gpu

bench-peers: ## compare minigen with other engines on this machine (installs them first; over an hour)
	@$(ENVIRONMENT) cpu test
	@$(VENV) -m minigen pull
	@$(VENV) -m benchmarks.peers --replace
	@$(VENV) -m tools.results

clean: ## remove .venv, .venv-clients and the caches of tools
	@$(PYTHON) -m tools.clean
