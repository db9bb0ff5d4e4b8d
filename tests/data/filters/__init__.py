"""Tests of the filters of documents."""
