"""Which documents a training step saw, and which steps saw a document: see `drover trace --help`."""
