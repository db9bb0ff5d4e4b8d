"""What grows with ranks, measured on one machine without that many (python -m tools.at_scale)."""
