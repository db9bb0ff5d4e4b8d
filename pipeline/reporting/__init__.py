"""Plots and templates of the report."""
