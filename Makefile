# Two commands do everything on a fresh machine with Python 3.11-3.14 and a C compiler: `make demo` and `make test`.
# Each builds what it needs in .venv. `make demo` prints only the model's answer on stdout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard metrale/_ext/*.pyx metrale/_ext/*.pxd metrale/backends/cpu/kernels/*.c \
	metrale/backends/cpu/kernels/*.h metrale/backends/cpu/kernels/*.inc)
MODEL ?= smollm2-135m
PROMPT ?= Tell me in three sentences why the sky is blue.

.PHONY: demo test test-slow lint bench clean
.SILENT:
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

demo: $(VENV)/.installed
	$(BIN)/metrale pull $(MODEL) 1>&2
	$(BIN)/metrale generate $(MODEL) "$(PROMPT)" --chat --max-tokens 128

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --slow -m slow -p no:cacheprovider | tee bench/results/test-slow.txt

lint: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/lint

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench --help

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "metrale needs Python 3.11 or newer, got " + sys.version.split()[0] + "; run make PYTHON=/path/to/python3.11")' 1>&2
	echo "setting up $(VENV)" 1>&2
	$(PYTHON) -m venv $(VENV) 1>&2

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e . 1>&2
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' 1>&2
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist *.egg-info metrale/_ext/*.c metrale/_ext/*.so
