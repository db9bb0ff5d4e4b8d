"""Engines: a model spread over ranks, with its optimizer, behind one interface."""
