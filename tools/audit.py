"""Was every training sample used exactly once, over all restarts? Proves it from a run's own records.

    python -m tools.audit --run runs/demo

Read are metrics.jsonl (the sample range of every step, repeated steps included), the markers of the checkpoints and the
manifest. The order itself is computed again, and each sample is followed to the sequence that it stands for.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.loading import load_config
from pipeline.data.order import SampleOrder
from pipeline.errors import UserError
from pipeline.manifest import read_manifest
from pipeline.run import Run
from pipeline.training.checkpoint import read_marker
from pipeline.training.metrics import read_lines
from pipeline.training.session import open_training_data
from pipeline.work import Work

ROUNDING = 1e-3
"""Relative difference allowed in the loss of a repeated step where the number of ranks changed: sums are then added in
another order, and in bf16 a few such steps drift apart. On equal ranks the losses must be equal to the last bit."""


@dataclass
class Audit:
    """What was found. `faults` are sentences; empty means proven."""

    steps: int = 0
    samples: int = 0
    repeated: int = 0
    restarts: int = 0
    checkpoints: int = 0
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The finding for a person."""
        head = (f"{self.steps:,} steps, samples [0, {self.samples:,}), {self.restarts} restarts, {self.repeated} steps "
                f"done again, {self.checkpoints} checkpoints")
        if not self.faults:
            return [head, "proven: every sample was used exactly once, in order, and repeated steps gave the same loss"]
        return [head, f"{len(self.faults)} faults:", *(f"  {fault}" for fault in self.faults)]


def audit(folder: Path) -> Audit:
    """Check the train stage of the run in `folder`.

    Raises:
        UserError: there is nothing to check.
    """
    lines = list(read_lines(folder / "train/metrics.jsonl"))
    if not lines:
        raise UserError(f"{folder / 'train/metrics.jsonl'} holds no step; there is nothing to audit.")
    starts = [event for event in read_lines(folder / "train/events.jsonl") if event["event"] in ("start", "resume")]
    found = Audit(restarts=len(starts) - 1)
    final = _repeats(lines, found, ROUNDING if len({event["ranks"] for event in starts}) > 1 else 0.0)
    _coverage(final, found)
    _checkpoints(folder, final, found)
    _sequences(_order(folder), found)
    return found


def _repeats(lines: list[dict[str, Any]], found: Audit, tolerance: float) -> dict[int, dict[str, Any]]:
    """The last line of each step; a step done again after a kill must have been the same step.

    tolerance: relative difference of its losses that is allowed.
    """
    final: dict[int, dict[str, Any]] = {}
    for line in lines:
        earlier = final.get(line["step"])
        if earlier is not None:
            found.repeated += 1
            if earlier["samples"] != line["samples"]:
                found.faults.append(f"step {line['step']} was done twice with different samples: {earlier['samples']} "
                                    f"and {line['samples']}")
            if abs(earlier["loss"] - line["loss"]) > tolerance * abs(line["loss"]):
                found.faults.append(f"step {line['step']} was done twice with different loss: {earlier['loss']} "
                                    f"and {line['loss']}")
        final[line["step"]] = line
    return final


def _coverage(final: dict[int, dict[str, Any]], found: Audit) -> None:
    end = 0
    for step in range(1, max(final) + 1):
        if step not in final:
            found.faults.append(f"step {step} has no line in metrics.jsonl (train.log_every above 1?), so its samples "
                                f"cannot be told")
            continue
        first, stop = final[step]["samples"]
        if first > end:
            found.faults.append(f"samples [{end}, {first}) were lost before step {step}")
        elif first < end:
            found.faults.append(f"samples [{first}, {min(end, stop)}) were used again in step {step}")
        end = stop
    found.steps, found.samples = max(final), end


def _checkpoints(folder: Path, final: dict[int, dict[str, Any]], found: Audit) -> None:
    for path in sorted((folder / "train/checkpoints").glob("step-????????")):
        progress = read_marker(path)["progress"]
        found.checkpoints += 1
        line = final.get(progress["step"])
        if line is not None and line["samples"][1] != progress["samples"]:
            found.faults.append(f"checkpoint {path.name} counts {progress['samples']} samples, the log "
                                f"{line['samples'][1]}")
    manifest = read_manifest(folder / "train")
    if manifest is not None and manifest.counts["samples"] != found.samples:
        found.faults.append(f"the manifest counts {manifest.counts['samples']} samples, the log {found.samples}")


def _order(folder: Path) -> SampleOrder:
    config = load_config(folder / "config.yaml", [f"runs_dir={folder.parent}", f"name={folder.name}"])
    run = Run(config)
    return open_training_data(Work(run, "train", run.fingerprint("train"))).order


def _sequences(order: SampleOrder, found: Audit, chunk: int = 1_000_000) -> None:
    """Follow every sample to its sequence: within an epoch of a pool no sequence may come twice."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    for start in range(0, found.samples, chunk):
        pools, epochs, sequences = order.locate(np.arange(start, min(start + chunk, found.samples)))
        for pool, epoch in {(int(pool), int(epoch)) for pool, epoch in zip(pools, epochs, strict=True)}:
            used = seen.setdefault((pool, epoch), np.zeros(order.counts[pool], dtype=np.int64))
            here = sequences[(pools == pool) & (epochs == epoch)]
            np.add.at(used, here, 1)
    for (pool, epoch), used in sorted(seen.items()):
        for sequence in np.flatnonzero(used > 1):
            found.faults.append(f"sequence {sequence} of {order.pools[pool].name} came {used[sequence]} times in epoch "
                                f"{epoch}")


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 if all is proven, 1 if there are faults, 2 if there is nothing to check."""
    parser = argparse.ArgumentParser(prog="python -m tools.audit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, e.g. runs/demo")
    try:
        found = audit(parser.parse_args(arguments).run)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print("\n".join(found.lines()))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
