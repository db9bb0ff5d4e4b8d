#!/bin/sh
# Everything worth knowing on one GPU, in nine minutes: see tools/bench_gpu.py. Needs python with torch >= 2.11, numpy,
# pyarrow, pydantic and PyYAML. PYTHON chooses the interpreter, OUT the folder of the results.
set -eu
cd "$(dirname "$0")/.."
for python in ${PYTHON:-.venv/bin/python python3 python}; do
    if "$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ("torch", "pydantic", "yaml"))))' \
        2>/dev/null; then
        export OUT="${OUT:-benchmarks/gpu-$(date +%F)}" PYTHONUNBUFFERED=1
        exec "$python" -m tools.bench_gpu "$@"
    fi
done
echo "No python here has torch, pydantic and yaml (PyYAML). Set PYTHON to one that has." >&2
exit 2
