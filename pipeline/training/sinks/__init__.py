"""Loggers: where the numbers, texts and events of training go."""
