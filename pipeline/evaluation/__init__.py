"""Held-out bits per byte, the baselines beside it, and the lm-evaluation-harness model."""
