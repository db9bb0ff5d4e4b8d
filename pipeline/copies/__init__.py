"""Copies of what a run made, in an object store: whole objects, each checked by hash, what says so put last."""
