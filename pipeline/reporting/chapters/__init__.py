"""The chapters of the report, a few in a file: each function reads the facts and yields its blocks."""
