# `make demo` and `make test` set up everything they need in .venv; nothing else has to be installed by hand.

VENV := .venv
BIN := $(VENV)/bin
SYSTEM := $(shell uname -s)
PROMPT ?= Write a Python function that reverses a string.
export PROMPT

# The first Python that is new enough; `make PYTHON=...` names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# MLX's CPU backend on Linux brings a slow BLAS; OpenBLAS is preloaded where it is found. The 64-bit-integer
# builds (libopenblas64) speak another interface and are left alone.
FIND_OPENBLAS = { ls /usr/lib/$$(uname -m)-linux-gnu*/openblas-pthread/libopenblas.so.0; \
	PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p | sed -n 's/^[[:space:]]*libopenblasp\{0,1\}\.so\.0 .*=> //p'; } 2>/dev/null
ifeq ($(SYSTEM),Linux)
OPENBLAS = $(firstword $(shell $(FIND_OPENBLAS)))
PRELOAD = $(if $(OPENBLAS),LD_PRELOAD="$(OPENBLAS)$${LD_PRELOAD:+:$$LD_PRELOAD}")
endif

.PHONY: demo test lint clean blas

demo: $(VENV)/installed blas
	@$(PRELOAD) $(BIN)/dflash-mlx demo --prompt "$$PROMPT"

# Two workers share the cores; BLAS threads of each would only wait for one another.
test: $(VENV)/installed-test blas
	$(PRELOAD) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or newer was found: name one with make PYTHON=/path/to/python3."; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)."; exit 1; }

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

blas:
ifeq ($(SYSTEM),Linux)
	@[ -n "$(OPENBLAS)" ] || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopenblas0-pthread; } \
	  >/dev/null </dev/null || true
	@[ -n "$$($(FIND_OPENBLAS))" ] || \
	  echo "OpenBLAS was not found, so float32 matmuls run many times slower here: install libopenblas0-pthread."
endif
