# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. Both call `make install`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept, whatever the environment says: else each process compiles all sources and rewrites all assertions.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

.PHONY: install demo test test-fast test-long gpu lint docs clean help

help:
	@echo "make demo       train a LLaVA on handwritten digits on 4 ranks (one to two minutes after installation)"
	@echo "make test       linter, types, tests"
	@echo "make test-fast  the tests of the inner loop: no slow ones, no processes"
	@echo "make test-long  more models, meshes and random programs of the kinds that make test has"
	@echo "make gpu        all that runs on a GPU, in pieces that can be resumed, and build/gpu/report.md (below 40 minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation as a site, in build/site"

install: $(STAMP)

# torch comes first and alone: where there is no GPU that is the CPU build, and the packages after it find it in place.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

demo: install
	@echo "loading PyTorch, transformers and csc ..."
	$(BIN)/python examples/digits/demo.py --output build/demo

test: install lint
	$(PYTEST) -m "not long"

test-fast: install
	$(PYTEST) -m "not slow and not gloo and not long"

test-long: install
	$(PYTEST) -m long

gpu: install
	$(BIN)/python -m benchmarks.gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
