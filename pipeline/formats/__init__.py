"""Weights in other shapes: the Hugging Face folder."""
