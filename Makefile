# make setup | demo | test | lint | matrix.  PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

.PHONY: setup demo test lint matrix clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Drover needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The whole pipeline on real text: Python's own standard library. ARGS="name=trial train.steps=50" overrides settings.
demo: setup
	$(PY) launch/submit.py --stage all --config configs/demo.yaml --cluster local $(ARGS)

test: setup
	$(PY) -m pytest --numprocesses 2 --dist loadfile $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

# Every engine and layout against one process; writes docs/matrix.md.
matrix: setup
	$(PY) -m tests.parallel.matrix

clean:
	rm -rf .venv build *.egg-info
