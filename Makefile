# `make demo` and `make test` set up everything they need in .venv; nothing else has to be installed by hand.

PYTHON ?= python3
PROMPT ?= Write a Python function that reverses a string.
VENV := .venv
BIN := $(VENV)/bin

# MLX's CPU backend on Linux has a slow BLAS of its own; OpenBLAS, where it is found, is preloaded.
ifeq ($(shell uname -s),Linux)
OPENBLAS = $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblasp.so.0 /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
RUN = $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS)) $(BIN)
else
RUN = $(BIN)
endif

.PHONY: demo test lint clean blas

demo: $(VENV)/installed blas
	$(RUN)/dflash-mlx demo --prompt "$$PROMPT"
export PROMPT

test: $(VENV)/installed-test blas
	$(RUN)/python -m pytest -q -n 2

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflash_mlx needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

blas:
ifeq ($(shell uname -s),Linux)
	@if [ -z "$(OPENBLAS)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq libopenblas0-pthread >/dev/null || true; fi
	@if ! ls /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblas*.so.0 /usr/lib/*/libopenblas.so.0 >/dev/null 2>&1; then \
	  echo "OpenBLAS was not found, so this CPU run is tens of times slower than it could be: install libopenblas0-pthread."; fi
endif
