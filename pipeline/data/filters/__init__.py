"""Filters of documents: one module a kind, each of which keeps, drops or changes one document at a time."""
