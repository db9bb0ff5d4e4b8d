"""Tests of the log sinks."""
