"""Measure the passes between reading and writing over an index and bands that are made up, without texts.

    python -m benchmarks.scale --documents 16000000 --folder /tmp/scale

There are the index of documents of 3.9 KB and the bands of the preset fineweb. A tenth are copies, another tenth
near-duplicates, each band of which equals that of its original with a probability of 0.5.
"""

import argparse
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np

from drover.pipeline.data.planning import near_duplicates as near
from drover.pipeline.data.planning import passes, runs


def stage(folder, documents, per_unit, seed=0):
    rng = np.random.default_rng(seed)
    names, originals, of_units = [], [], []
    exact = found = 0

    def key(n):
        return rng.integers(1, 2**64, n, np.uint64)

    for number, first in enumerate(range(0, documents, per_unit)):
        size = min(per_unit, documents - first)
        rows = np.zeros(size, runs.INDEX)
        bands = key((size, 14)) if size else None
        rows["high"], rows["low"] = key(size), key(size)
        rows["length"] = rows["text_bytes"] = rows["characters"] = 3862
        rows["offset"] = np.arange(size) * 3862
        if number:
            kind = rng.random(size)
            e, n = np.flatnonzero(kind < 0.1), np.flatnonzero((kind >= 0.1) & (kind < 0.2))

            def pick(count):
                unit = (len(of_units) * rng.random(count) ** 3).astype(int)
                return [of_units[u][int(rng.integers(len(of_units[u])))] for u in unit.tolist()]

            picked = pick(len(e))
            for at, (row, band) in zip(e, picked):
                rows["high"][at], rows["low"][at] = row["high"], row["low"]
                bands[at] = band
            equal = rng.random((len(n), 14)) < 0.5
            source = np.array([band for _, band in pick(len(n))])
            bands[n] = np.where(equal, source, bands[n])
            exact += len(e)
            found += int(equal.any(1).sum())
        # originals kept: 200 of each unit
        keep = rng.choice(size, 200, replace=False) if number == 0 else np.flatnonzero(kind >= 0.2)[:200]
        of_units.append([(rows[k].copy(), bands[k].copy()) for k in keep])
        name = f"web-{number:05d}"
        names.append(name)
        runs.write_array(runs.staged(folder, name, ".npy"), rows)
        runs.write_array(runs.staged(folder, name, ".bands"), bands)
    return names, exact, found


def child(function):
    began = time.time()
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, time.time() - began


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--documents", type=int)
    p.add_argument("--folder", type=Path)
    p.add_argument("--unit", type=int, default=33000)
    o = p.parse_args()
    folder = o.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    t = time.process_time()
    names, exact, found = stage(folder, o.documents, o.unit)
    counts = [min(o.unit, o.documents - i) for i in range(0, o.documents, o.unit)]
    plan = runs.layout(names, [0] * len(names), counts, bands=14)
    plan.write(folder)
    gb = o.documents * 3.9e-6
    print(
        f"{o.documents:,} documents, {gb:.1f} GB of text, {len(names)} units, {len(plan.groups) - 1} groups, {plan.partitions} partitions; staged in {time.process_time() - t:.0f} s",
        flush=True,
    )

    def tasks(items, function):
        return lambda: [function(folder, task.payload) for task in items]

    decided = folder / "staging/decided.json"

    def decide():
        counts = Counter()
        for task in passes._groups(plan, drop=True, name_kept=False, ranked=[], low={}, validation=runs.NONE + 2**57):
            for d in passes.decide_group(folder, task.payload)["dropped"]:
                counts["duplicate"] += d[0]
                counts["near"] += d[1]
        decided.write_text(json.dumps(counts))

    steps = {
        "sort": tasks(passes._groups(plan), runs.sort_group),
        "match": tasks(passes._partitions(plan, range(15)), runs.match_partition),
        "components": lambda: near.join_components(folder, None),
        "resolve": tasks(
            passes._partitions(plan, near.near_columns(plan)[:1], verify=None, words="runs"), near.resolve_partition
        ),
        "decide": decide,
    }
    for name, step in steps.items():
        cpu, rss, wall = child(step)
        size = Counter()
        for f in folder.rglob("*"):
            if f.is_file():
                size[
                    f.relative_to(folder).parts[1]
                    if f.relative_to(folder).parts[1] in ("runs", "links")
                    else f.suffix or f.name
                ] += f.stat().st_size
                size["files"] += 1
        print(
            f"{name}: {cpu:.1f} core s, {gb * 1000 / max(cpu, 0.01):,.0f} MB/s, {cpu / o.documents * 1e6:.2f} us a document, {rss:.2f} GB, {wall:.0f} s; disk bytes a document",
            {k: round(v / o.documents, 1) if k != "files" else v for k, v in size.items()},
            flush=True,
        )
    print("planted", exact, found, "found", decided.read_text())
    shutil.rmtree(folder)


main()
