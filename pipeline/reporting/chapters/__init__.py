"""The chapters of the report, one in a file: each reads the facts and yields its blocks."""
