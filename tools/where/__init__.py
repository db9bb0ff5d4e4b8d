"""Which documents a training step saw, and which steps saw a document: see `python -m drover.tools.where --help`."""
