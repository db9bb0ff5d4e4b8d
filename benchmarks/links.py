"""Measure what joining a link costs in corpora of 4 to 256 million documents: python -m benchmarks.links."""

import resource
import time

import numpy as np

from drover.pipeline.data.planning import near_duplicates as near

rng = np.random.default_rng(0)
for total in (4_000_000, 16_000_000, 64_000_000, 256_000_000):
    parent = np.arange(total, dtype=np.uint32)
    n = 3_000_000
    other = np.sort(rng.integers(1, total, n))
    kept = (other * rng.random(n) ** 3).astype(np.int64)
    t = time.process_time()
    links = 0
    for band in range(7):
        own = rng.random(n) < 0.5
        o, k = other[own], kept[own]
        for s in range(0, len(o), near.AT_ONCE):
            near.join(parent, o[s : s + near.AT_ONCE], k[s : s + near.AT_ONCE])
        links += len(o)
    t1 = time.process_time() - t
    t = time.process_time()
    near.flatten(parent)
    t2 = time.process_time() - t
    print(
        f"{total:,} documents: {t1 / links * 1e9:.0f} ns a link, flatten {t2 / total * 1e9:.1f} ns a document, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB",
        flush=True,
    )
    del parent
