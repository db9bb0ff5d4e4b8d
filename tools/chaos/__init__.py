"""A soak of the whole launcher under faults: `python -m tools.chaos`."""
