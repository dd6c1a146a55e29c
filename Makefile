# Two commands do everything on a fresh machine with Python 3.11-3.14 and a C compiler: `make demo` and `make test`.
# Each builds what it needs in .venv. `make demo` prints only the model's answer on stdout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard metrale/_ext/*.pyx metrale/_ext/*.pxd metrale/backends/cpu/kernels/*.c \
	metrale/backends/cpu/kernels/*.h metrale/backends/cpu/kernels/*.inc)
MODEL ?= smollm2-135m
PROMPT ?= Tell me in three sentences why the sky is blue.

.PHONY: demo test test-slow lint bench clean
.SILENT:
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
MAKEFLAGS += --no-print-directory

# What setting up needs, each with its remedy; runs on any Python 3.
define CHECK
import os, shlex, shutil, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit("metrale needs Python 3.11 or newer, got %s; run make PYTHON=/path/to/python3.11" % sys.version.split()[0])
compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
if shutil.which(shlex.split(compiler)[0]) is None:
    sys.exit("metrale needs a C compiler, got no %r; install gcc or clang, or set CC to one" % compiler)
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    sys.exit("metrale needs the C headers of Python, got no %s; install them (Debian: python3-dev)" % header)
endef
export CHECK

demo: $(VENV)/.installed
	$(BIN)/metrale pull $(MODEL) 1>&2
	$(BIN)/metrale generate $(MODEL) "$(PROMPT)" --chat --max-tokens 128 --temperature 0

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev $(VENV)/.installed-peers
	mkdir -p bench/results
	$(BIN)/python -m pytest --slow -m slow -p no:cacheprovider | tee bench/results/test-slow.txt

lint: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/lint

bench: $(VENV)/.installed-dev $(VENV)/.installed-peers
	$(BIN)/python -m bench --help

$(BIN)/python:
	command -v $(PYTHON) > /dev/null || { echo "metrale needs Python 3.11 or newer, got no $(PYTHON);" \
		"install it or run make PYTHON=/path/to/python3.11" 1>&2; exit 1; }
	$(PYTHON) -c "$$CHECK" 1>&2
	echo "setting up $(VENV)" 1>&2
	$(PYTHON) -m venv $(VENV) 1>&2 || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -c "$$CHECK" 1>&2
	echo "compiling metrale and installing its libraries (a minute or two)" 1>&2
	$(PIP) -e . 1>&2
	touch $@

# metrale itself is built once, by the rule above; these add the libraries of its `dev` and `peers` extras. The peers are
# what slow tests and benchmarks compare with; llama.cpp compiles for a few minutes.
define EXTRA
import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
endef
export EXTRA

$(VENV)/.installed-dev $(VENV)/.installed-peers: $(VENV)/.installed-%: $(VENV)/.installed pyproject.toml
	echo "installing the libraries of the extra $*" 1>&2
	$(BIN)/python -c "$$EXTRA" $* > $(VENV)/$*.txt
	$(PIP) -r $(VENV)/$*.txt 1>&2
	touch $@

clean:
	rm -rf build dist *.egg-info metrale/_ext/*.c metrale/_ext/*.so
