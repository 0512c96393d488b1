# What a person calls; .ci/run calls the same.
PYTHON ?= python3
# Not given: what forebay.toml, the environment or the defaults say.
PORT   ?=
MODEL  ?=
ARGS   ?=

BIN   := .venv/bin
STAMP := .venv/.installed
TRIED := .venv/.tried

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install serve test try lint bench bench-versus bench-conversations bench-canaries bench-steps bench-overload bench-batching bench-front clean

install: $(STAMP)

# Running venv again over a half made .venv repairs it; the stamp is written only when all went well.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard forebay/engine/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# exec: signals sent to make reach the server itself.
serve: $(STAMP)
	@exec $(BIN)/forebay serve $(if $(MODEL),"$(MODEL)") $(if $(PORT),--port $(PORT)) $(ARGS)

# ARGS='-k radix -x', for example.
test: $(STAMP)
	@exec $(BIN)/python -m pytest $(ARGS)

# The clients of docs/try that are too heavy for everybody (LangChain, LiteLLM): fetched here, then run.
try: $(TRIED)
	@exec $(BIN)/python -m pytest tests/server/test_try.py -k 'langchain or litellm' $(ARGS)

$(TRIED): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,try]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Suites over HTTP, with the peers that PEERS has; ARGS="'forebay:int4=--quantize int4' openvino --rounds 5", for example.
bench: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.suites $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# Against one request at a time through transformers; ARGS='--repeats 1', for example.
bench-versus: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.versus $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# What of conversations' KV outlives a crowd or a restart; ARGS='crowd', ARGS='restart --rounds 3'.
bench-conversations: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.conversations $(ARGS)

# Secret codes in many conversations while all goes wrong that can; ARGS='--faults', for example.
bench-canaries: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.canaries $(ARGS)

# Steps of the engine against the limits of the machine.
bench-steps: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.steps $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# More than the server can do, in an open loop; ARGS='curve --gate-off --picture FILE', ARGS='burst fair', for example.
bench-overload: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.overload $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# Serial, window and continuous batching under the same load; ARGS='--rounds 1', for example.
bench-batching: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.batching $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# What a refusal and a streamed token cost the front; takes wrk where it is installed. ARGS='refusals', for example.
bench-front: $(STAMP)
	@exec $(BIN)/python -m forebay.bench.front $(if $(MODEL),--model "$(MODEL)") $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find forebay tests -name __pycache__ -type d -prune -exec rm -rf {} +
