# Everything sets itself up: a Python environment in .venv and, on Linux, a fast BLAS where it can be had.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
LINUX := $(filter Linux,$(shell uname -s))
# Which mlx: cpu, cuda12 or cuda13 on Linux; on macOS the plain package has Metal.
EXTRA ?= $(if $(LINUX),cpu)
ARGS ?=

comma := ,
STATE := $(shell cat pyproject.toml Makefile | cksum | cut -d ' ' -f 1)-$(or $(EXTRA),plain)
RUN_STAMP := $(VENV)/.set-up-run-$(STATE)
DEV_STAMP := $(VENV)/.set-up-dev-$(STATE)
LINTED := server engine cache patches bench tests src/chairlift/__init__.py src/chairlift/__main__.py

# mlx for the CPU is linked to the reference BLAS; OpenBLAS in its place is many times faster.
OPENBLAS := libopenblas.so.0
HAS_OPENBLAS := PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null | grep -q $(OPENBLAS)
WITH_OPENBLAS = $(if $(LINUX),$(shell $(HAS_OPENBLAS) && echo env LD_PRELOAD=$(OPENBLAS)))

.PHONY: help run test check static audit bench bench-peers parity clients clean openblas prometheus

help:
	@echo 'make run     serve the embedded model at http://127.0.0.1:8000   (ARGS="--port 9000")'
	@echo 'make test    run all tests                                       (ARGS="-k scheduler")'
	@echo 'make check   lint, format, types and import directions, then all tests'
	@echo 'make static  make check without the tests'
	@echo 'make audit   ask for known faults of what is installed, where the advisories can be reached'
	@echo 'make bench   measure Chairlift and mlx_lm.server in turn, into bench/RESULTS.md'
	@echo 'make bench-peers  the same for every other server that installs here, below build/peers'
	@echo 'make parity  hold every model family in a batch against solo runs, into docs/models.md'
	@echo 'make clients install other projects'"'"' clients into build/clients, and hold exchanges (ARGS="codex llm")'
	@echo 'make clean   remove the environment and everything made from the sources'

run: $(RUN_STAMP) openblas
	@exec $(WITH_OPENBLAS) $(BIN)/chairlift serve $(ARGS)

# One process a core, so one BLAS thread each.
test: $(DEV_STAMP) openblas prometheus
	OPENBLAS_NUM_THREADS=1 $(WITH_OPENBLAS) $(BIN)/pytest -n auto --dist loadgroup $(ARGS)

check: static test

static: $(DEV_STAMP)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(DEV_STAMP)
	$(BIN)/python -m tests.packaging.audit $(ARGS)

bench: $(DEV_STAMP) openblas
	$(WITH_OPENBLAS) $(BIN)/python bench/against.py --peers mlx_lm.server --section compare $(ARGS)

bench-peers: $(DEV_STAMP) openblas
	$(WITH_OPENBLAS) $(BIN)/python bench/against.py $(ARGS)

parity: $(DEV_STAMP) openblas
	$(WITH_OPENBLAS) $(BIN)/python -m tests.mlx.parity_table $(ARGS)

clients: $(DEV_STAMP) openblas
	$(WITH_OPENBLAS) $(BIN)/python -m tests.clients.run $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): $(BIN)/python
	@echo 'Installing Chairlift into $(VENV) ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@rm -f $(VENV)/.set-up-run-*
	@touch $@

$(DEV_STAMP): $(BIN)/python
	@echo 'Installing Chairlift and its development tools into $(VENV) ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(if $(EXTRA),$(EXTRA)$(comma))dev]'
	@rm -f $(VENV)/.set-up-*
	@touch $@ $(RUN_STAMP)

# The first Python of a right version that can make an environment; uv, where there is one, brings its own.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --quiet --seed --python '>=3.11,<3.14' $(VENV); fi; \
	echo 'Chairlift needs Python 3.11, 3.12 or 3.13 with its venv module (Debian: python3-venv), or uv.' >&2; exit 1

openblas:
ifeq ($(LINUX)$(EXTRA),Linuxcpu)
	@if ! $(HAS_OPENBLAS) && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'Installing OpenBLAS ...'; \
	  apt-get -qq update >/dev/null 2>&1; \
	  apt-get -qq install --yes libopenblas0-pthread >/dev/null 2>&1; \
	fi; \
	$(HAS_OPENBLAS) || echo 'Without OpenBLAS (Debian: libopenblas0-pthread) the CPU computes about 15 times slower.' >&2
endif

# Tests let Prometheus itself read what is there for it. Debian's, into build/ and not onto the system; without it
# they skip.
PROMETHEUS := build/prometheus
prometheus:
	@if ! command -v promtool >/dev/null && [ ! -x $(PROMETHEUS)/usr/bin/promtool ] && command -v apt-get dpkg-deb >/dev/null; then \
	  echo 'Fetching Prometheus for the tests ...'; \
	  mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && \
	  { [ "$$(id -u)" != 0 ] || apt-get -qq update >/dev/null 2>&1; \
	    apt-get -qq download prometheus >/dev/null 2>&1 && dpkg-deb -x prometheus_*.deb .; } || true; \
	fi
