"""Measure Drover: `python -m benchmarks NAME`. What was measured, on which machine, is in RESULTS.md."""
