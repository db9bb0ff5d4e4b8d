# make setup | setup-dev | demo | test | test-all | soak | matrix | picture | docs | lint.
# PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt --editable
ARGS ?=

PYTEST := $(PY) -m pytest --workers 5 --durations 10

.PHONY: setup setup-dev demo test test-all soak lint matrix picture docs clean

setup: .venv/installed
setup-dev: .venv/installed-dev

# What runs need: the extras that the README's commands use. All versions are those that the tests were run with.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Drover needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	@echo "Installing some 100 packages into .venv (2 GB). This takes a minute or a few, without further output."
	$(INSTALL) '.[eval,hub,slurm,tensorboard,web]'
	@touch $@

# Test tools and the other extras, beside that.
.venv/installed-dev: .venv/installed
	$(INSTALL) '.[dev]'
	@touch $@

# The whole pipeline on real text: Python's own standard library. ARGS="name=trial train.steps=50" overrides settings.
demo: setup
	$(PY) launch/submit.py --stage all configs/demo.yaml --cluster local $(ARGS)

# Five workers also on two cores: the three that test a cluster mostly wait for it.
test: setup-dev
	$(PYTEST) $(ARGS)

# What `make test` leaves out: the rest of the crossings, stores, faults and documents.
test-all: setup-dev
	$(PYTEST) -m 'slow and not soak' $(ARGS)

# What takes hours: many kills, other seeds.
soak: setup-dev
	$(PYTEST) -m soak --timeout 0 $(ARGS)

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m mypy

# Every engine and layout against one process, and all options crossed (minutes); writes docs/matrix.md.
matrix: setup-dev
	$(PY) -m tests.parallel.matrix_table

# docs/report.png and its record, of the report of the finished demo: `make demo picture`, where the demo or the templates
# of the report have changed. Needs Chromium.
picture: setup
	$(PY) -m tests.reporting.picture

# The documentation as a site, in site/index.html. Warnings, such as a link to nowhere, are errors.
docs: setup-dev
	$(PY) -m sphinx -q -W docs site

clean:
	rm -rf .venv build *.egg-info
