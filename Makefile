# Everything lives in .venv. `make install` is a no-op when nothing changed; all other targets depend on it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_ARGS ?=
TEST_ARGS ?=
FUZZ_ARGS ?= --fuzz-s 20
BENCH_ARGS ?=
PEERS ?= $(HOME)/.cache/baton/peers
GRPCURL := $(HOME)/.cache/baton/peers/grpcurl/grpcurl
COMPILED := cluster/router cluster/router/policies common decode engine loadtest loadtest/bench loadtest/simulator prefill

.PHONY: install serve demo test test-unit test-gpu check fmt proto lock bench-router bench-engine bench-interference
.PHONY: bench-simulator bench-scale bench-conversations bench-ttft bench-exposed bench-codecs bench-transfer bench-peers bench-gateway
.PHONY: bench-grammars try-clients compiled clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

serve: install
	@exec $(BIN)/baton serve $(SERVE_ARGS)

demo: install
	@exec $(BIN)/baton demo

# For an example of docs/clients.md, whose test is skipped where this cannot be had.
$(GRPCURL): | install
	-command -v grpcurl >/dev/null || tools/grpcurl.sh $(dir $@)

test: install $(GRPCURL)
	$(BIN)/python -m pytest $(TEST_ARGS)

test-unit: install $(GRPCURL)
	$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

# For longer than CI does, from fresh seeds: so many seconds for each of some sixty kinds of calls.
fuzz: install
	$(BIN)/python -m pytest --timeout 0 tests/cluster/gateway/test_fuzz_grpc.py tests/cluster/gateway/test_fuzz_http.py $(FUZZ_ARGS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu tests/kvtransfer tests/engine $(TEST_ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	tools/protoc.sh --check

fmt: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: install
	tools/protoc.sh

lock: install
	$(BIN)/python tools/lock.py

bench-router: install
	-loadtest/bench/peers/radix.sh $(PEERS)/dynamo
	$(BIN)/python -m loadtest.bench.router --peer $(PEERS)/dynamo $(if $(TRACE),--trace $(TRACE)) $(BENCH_ARGS)

bench-conversations: install
	$(BIN)/python -m loadtest.bench.conversations $(BENCH_ARGS)

# Needs a C compiler, and minutes. -P: what is compiled comes before what lies here.
compiled: build/compiled/checked

build/compiled/checked: $(STAMP) tools/compile_simulator.py $(wildcard $(addsuffix /*.py, $(COMPILED)))
	$(BIN)/python tools/compile_simulator.py

bench-scale: compiled
	PYTHONPATH=build/compiled $(BIN)/python -P -m loadtest.bench.scale $(BENCH_ARGS)

bench-simulator: install
	$(BIN)/python -m loadtest.bench.simulator $(BENCH_ARGS)

bench-peers: install
	$(BIN)/python -m tools.peers.install $(BENCH_ARGS)

bench-engine: install
	$(BIN)/python -m loadtest.bench.engine $(BENCH_ARGS)

bench-interference: install
	$(BIN)/python -m loadtest.bench.interference $(BENCH_ARGS)

bench-ttft: install
	$(BIN)/python -m loadtest.bench.ttft $(BENCH_ARGS)

bench-exposed: install
	$(BIN)/python -m loadtest.bench.exposed $(BENCH_ARGS)

bench-codecs: install
	@$(BIN)/baton bench codecs $(BENCH_ARGS)

bench-transfer: install
	@$(BIN)/baton bench transfer $(BENCH_ARGS)

bench-gateway: install
	-loadtest/bench/peers/routers.sh $(PEERS)/routers
	$(BIN)/python -m loadtest.bench.gateway --peers $(PEERS)/routers $(BENCH_ARGS)

bench-grammars: install
	PYTHONPATH=$$(tools/peers/grammars.sh $(PEERS)/xgrammar) $(BIN)/python -m tools.peers.grammars $(BENCH_ARGS)

try-clients: install
	$(BIN)/python -m tools.try_clients --peers $(PEERS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
