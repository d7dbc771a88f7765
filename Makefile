# Every install step of the project is here or in pyproject.toml; versions are in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST_ARGS ?=
# Most tests wait more than they compute. The files keep their order: by their number of tests,
# as is the default, the longest test of all would begin last.
PARALLEL ?= --numprocesses 3 --dist loadfile --no-loadscope-reorder
# A second try, for tests that missed a bound of time: what is wrong otherwise has none.
SECOND_TRY := --reruns 1 --only-rerun '^TimeoutError' --only-rerun 'assert [0-9]+\.[0-9]+ <'
# Tests of whole meshes wait as much as they compute: those that share one run beside the others.
OWN_MESH_TESTS := tests/chaos $(addprefix tests/e2e/, \
	test_parity.py test_keys.py test_identity_local.py test_schemathesis.py)

.PHONY: setup setup-dev trace-ui nginx browser promtool mooncake node-client fuzz run test test-shared-mesh test-own-meshes chaos bit-equality check protos docs bench clean

setup: $(VENV)/.run  ## make .venv with what `pdmesh` needs

setup-dev: $(VENV)/.dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[test,dev]'
	touch $@ $(VENV)/.run

run: setup  ## serve the default model on http://127.0.0.1:8000
	$(BIN)/pdmesh up $(ARGS)

trace-ui: setup  ## a mesh and a tracing UI beside it, on http://127.0.0.1:6006
	tools/trace_ui.sh $(ARGS)

nginx:  ## nginx with its Lua module, which tests need
	-tools/install_nginx.sh

browser:  ## headless Chromium, which tests of the dashboard need
	-tools/install_browser.sh

promtool:  ## checks the alert rules
	-tools/install_promtool.sh

node-client:  ## Node.js and the npm client, which a test drives
	-tools/install_node_client.sh

mooncake: setup-dev  ## Mooncake's Transfer Engine, which a test needs
	-tools/install_libibverbs.sh && $(PIP) --editable '.[mooncake]'

test: setup-dev nginx browser promtool mooncake node-client  ## the whole suite
ifeq ($(PYTEST_ARGS),)
	$(BIN)/python -m pytest $(SECOND_TRY) -raR $(PARALLEL) --ignore tests/e2e --ignore tests/chaos
	$(MAKE) --jobs 2 --output-sync=target test-shared-mesh test-own-meshes
else
	$(BIN)/python -m pytest $(SECOND_TRY) -raR $(PYTEST_ARGS)
endif

test-shared-mesh: setup-dev
	$(BIN)/python -m pytest --reruns 1 -raR tests/e2e $(addprefix --ignore ,$(OWN_MESH_TESTS))

test-own-meshes: setup-dev
	$(BIN)/python -m pytest --reruns 1 -raR $(OWN_MESH_TESTS)

bit-equality: setup-dev  ## every format, twenty prompts, computed in every way: half an hour
	$(BIN)/python -m pytest -m exhaustive $(PYTEST_ARGS)

chaos: setup-dev  ## kill, freeze and restart everything, in every stage of a request
	$(BIN)/python -m pytest -s tests/chaos $(PYTEST_ARGS)

check: setup-dev promtool  ## lint, types, import contracts, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python tools/protos.py --check
	$(BIN)/python tools/docs.py --check
	cd deploy/prometheus && promtool check config prometheus.yml && promtool test rules rules_test.yml

docs: setup-dev  ## regenerate the tables in docs/ that come from the code
	$(BIN)/python tools/docs.py

protos: setup-dev  ## regenerate mesh/v1 from protos/
	$(BIN)/python tools/protos.py

fuzz: setup-dev  ## look for bodies and streams that break the edge
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

bench: setup-dev
	$(PIP) --editable '.[bench]'
	$(BIN)/python -m benchmarks compare $(ARGS)

clean:
	rm -rf $(VENV) .venv-trace-ui build *.egg-info .mypy_cache .ruff_cache .pytest_cache
