"""Which documents a training step saw, and which steps saw a document: see `python -m tools.where --help`."""
