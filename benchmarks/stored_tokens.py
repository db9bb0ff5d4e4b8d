"""What training waits for data where its token shards lie in an object store, beside files, in one run on one machine.

    python -m benchmarks.stored_tokens --config configs/demo.yaml --to s3://bucket/prefix [name=demo train.steps=40]

The run's stages before train must be done. It is trained once from files, once from the store with an empty cache on
the node ("cold"), once with what that left ("warm"), and once in parts without a cache; each a run of its own, in
`<runs_dir>/<name>-bench-*`. Told are the seconds that the loop waited for data as a share of all steps', of the steps
after the first, and of the median step; and that all end with the same loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.config.loading import load_config
from pipeline.records.metrics import read_metrics


def main() -> int:
    """Measure and print a table; the process's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--to", required=True, metavar="URL")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    run = load_config(options.config, options.overrides).folder
    subprocess.run([sys.executable, "-m", "tools.copy_tokens", "--run", str(run), "--to", options.to], check=True)
    with tempfile.TemporaryDirectory(prefix="drover-bench-") as cache:
        store = [f"train.tokens_from={options.to}", f"train.cache.folder={cache}"]
        cases = {"files": [], "store, cold": [*store, "train.cache.read=shards"],
                 "store, warm": [*store, "train.cache.read=shards"], "store, parts": [*store, "train.cache.read=parts"]}
        found = {case: measured(options, run, case, settings) for case, settings in cases.items()}
    print("| Shards | wait, all steps | wait, after the first | wait, median step | fetched | parts | last loss |")
    print("|---|---|---|---|---|---|---|")
    for case, row in found.items():
        print(f"| {case} | {row['all']:.2%} | {row['later']:.2%} | {row['median']:.2%} | {row['fetched']:.0f} | "
              f"{row['parts']:.0f} | {row['loss']} |")
    return int(len({row["loss"] for row in found.values()}) != 1)


def measured(options: argparse.Namespace, run: Path, case: str, settings: list[str]) -> dict[str, Any]:
    """Train anew; shares of steps that were waited for data, and what was fetched."""
    name = f"{run.name}-bench-{case.replace(', ', '-')}"
    folder = run.with_name(name)
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "pipeline.train", "--config", options.config, *options.overrides,
                    f"name={name}", f"reuse={run}", "train.log_every=1", *settings], check=True,
                   stdout=subprocess.DEVNULL)
    lines = read_metrics(folder / "train/metrics.jsonl")
    waits, steps = [line["data_wait_s"] for line in lines], [line["step_s"] for line in lines]
    events = [json.loads(line) for line in (folder / "train/events.jsonl").read_text().splitlines()]
    took = next((event["store"] for event in reversed(events) if "store" in event), {})
    return {"all": sum(waits) / sum(steps), "later": sum(waits[1:]) / sum(steps[1:]),
            "median": statistics.median(wait / step for wait, step in zip(waits, steps, strict=True)),
            "fetched": took.get("fetched", 0), "parts": took.get("ranges", 0), "loss": lines[-1]["loss"]}


if __name__ == "__main__":
    sys.exit(main())
