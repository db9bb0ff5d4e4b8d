"""Numbers whose bits are spread over all of them: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: its step, and an odd factor of hashes."""


def mixed(values: np.ndarray) -> np.ndarray:
    """Each 64-bit number mixed, one to one; arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
