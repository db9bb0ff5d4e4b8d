"""Is every byte of a run still what it was when it was made? `python -m drover.tools.verify --run RUN`."""
