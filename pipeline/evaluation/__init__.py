"""Validation bits per byte, the baselines next to it, and the lm-evaluation-harness model."""
