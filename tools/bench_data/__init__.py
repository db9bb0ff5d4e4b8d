"""How fast is text made into tokens? Drover beside datatrove: `python -m tools.bench_data`."""
