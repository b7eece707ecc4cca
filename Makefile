# make demo | test | serve work from a bare checkout: they make the environment and the demo model first.
# Override: VENV=path, PYTHON=python3.12, MODEL=path (any model instead of the demo model), PORT=30000, ARGS="more flags"

VENV ?= .venv
PYTHON ?=
PORT ?= 30000
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv model demo test lint serve clean distclean

help:
	@echo "make demo       the same long documents on dense SGLang and on OasisKV, side by side"
	@echo "make test       run the tests (ARGS=\"-k name\" selects)"
	@echo "make lint       ruff and mypy"
	@echo "make serve      serve the demo model on port $(PORT) (MODEL=path, ARGS=\"flags\")"
	@echo "make model      build or verify the demo model, and print its folder"
	@echo "make venv       make $(VENV) and install everything into it"
	@echo "make clean      remove caches and build output; make distclean: $(VENV) too"

venv:
	@PYTHON="$(PYTHON)" bash scripts/make_venv.sh "$(VENV)"

model: venv
	@"$(BIN)/python" -m oasis_sglang.cli model

demo: model
	@"$(BIN)/python" -m oasis_sglang.demo $(ARGS)

# Servers need the machine for themselves; all other tests run two at a time. 5: ARGS selected none of that part.
test: model
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest tests --ignore tests/server -n 2 --dist loadfile $(ARGS) || [ $$? -eq 5 ]
	"$(BIN)/python" -m pytest tests/server $(ARGS) || [ $$? -eq 5 ]

lint: venv
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m mypy

serve: venv
	@model="$(MODEL)"; [ -n "$$model" ] || model=$$("$(BIN)/python" -m oasis_sglang.cli model) || exit 1; \
	exec "$(BIN)/python" -m sglang.launch_server --kv-backend oasis --model-path "$$model" --port $(PORT) $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.git/*' -prune -exec rm -rf {} +

# Only an environment that `make venv` made itself is removed.
distclean: clean
	@if [ -e "$(VENV)/.oasis-owned" ]; then echo "rm -rf $(VENV)"; rm -rf "$(VENV)"; fi
