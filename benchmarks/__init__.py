"""Measure Drover: `python -m benchmarks.train`, `.data` and `.gpu`. What was measured, and where, is in RESULTS.md."""
