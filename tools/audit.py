"""Was every training sample used exactly once, over all restarts? Proves it from a run's own records.

    drover audit runs/demo

It reads metrics.jsonl (the sample range of every step, repeated steps included), events.jsonl (starts, damaged token
shards), rollbacks.json (samples left out on purpose), the checkpoints' markers and the manifest. It computes the order
of samples again, and follows each sample to its sequence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.contract.manifest import not_as_used, read_manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.console import Parser, Program, add_json, counted, draw, echo, watch_of
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import problem_of
from drover.pipeline.data.exclusion import Excluded, Range, format_ranges, sample_numbers
from drover.pipeline.records.metrics import OTHER_ORDER, Event, Line, RunFacts, reordered

if TYPE_CHECKING:
    import numpy as np

    from drover.pipeline.data.sampling.loader import TrainingData
    from drover.tools.sample_history import SampleHistory

ROUNDING = 1e-3
"""Allowed relative difference in the loss of a repeated step if the ranks or the engine changed. Sums are then added in
another order, and in bf16 a few such steps drift apart. On the same ranks and a deterministic device the losses must be
equal to the last bit."""
NOT_DETERMINISTIC = 1e-2
"""The same on a device that is not deterministic (GPUs, unless train.deterministic is true). There a step drifts with
every repeated step before it."""
RECORDS = ("metrics.jsonl", "events.jsonl")
CHUNK = 1_000_000
"""Samples that are followed at a time."""
PLACES = ("ranks", "parallel", "device", "micro_batch", "compile", "torch")
"""Fields of a start or resume event: where the steps after it were computed."""


@dataclass
class Audit:
    """The result of an audit. `faults` are sentences; without any, the run is proven.

    largest: largest relative difference between the losses of a repeated step. tolerance, why: the allowed one, and the
        reason for it. replanned: steps that a change of the plan undid.
    damaged: steps whose loss came from a damaged token shard; they were repeated after its repair.
    """

    steps: int = 0
    samples: int = 0
    repeated: int = 0
    damaged: int = 0
    abandoned: int = 0
    replanned: int = 0
    restarts: int = 0
    checkpoints: int = 0
    largest: float = 0.0
    tolerance: float = 0.0
    why: str = ""
    left_out: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The result as lines of text."""
        lines = [f"{counted(self.steps, 'step')}, samples [0, {self.samples:,}), "
                 f"{counted(self.restarts, 'restart')}, {self.repeated} steps done again, "
                 f"{self.abandoned} undone by rollbacks, {self.replanned} undone by changes of the plan, "
                 f"{self.damaged} with another loss before a damaged token shard was repaired, "
                 f"{counted(self.checkpoints, 'checkpoint')}",
                 *(f"left out on purpose: {entry}" for entry in self.left_out)]
        if self.repeated:
            lines.append(f"repeated steps: {self.why}; their losses differ by at most {self.largest:.1e} of the loss "
                         f"({self.tolerance:.0e} is allowed)")
        if self.faults:
            return [*lines, f"{len(self.faults)} faults:", *(f"  {fault}" for fault in self.faults)]
        return [*lines, f"proven: every {'other ' if self.left_out else ''}sample was used exactly once, in order, and "
                        f"repeated steps gave the same loss"]


def audit(folder: Path) -> Audit:
    """Check the train stage of the run in `folder`.

    Raises:
        UserError: there is nothing to check.
    """
    if not RunFacts(folder).logged:
        raise UserError(f"{folder / 'train/metrics.jsonl'} holds no step; there is nothing to audit.")
    from drover.tools.sample_history import SampleHistory

    history = SampleHistory(run_in(folder))
    starts = history.training_starts
    tolerance, why = _tolerance(starts)
    result = Audit(restarts=len(starts) - 1, replanned=len(history.logged) - len(history.lines), tolerance=tolerance,
                   why=why)
    _repeats(history, result)
    gaps = _coverage(history.final, result)
    _left_out(history, result)
    _checkpoints(history, result)
    result.faults += [f"after step {step} {OTHER_ORDER} than before: a sequence may come again, or never"
                      for step in reordered(history.events)]
    if not gaps:  # else their numbers may be anything
        _sequences(history.data, history.excluded().remaining(0, result.samples), result)
    return result


def _tolerance(starts: Sequence[Event]) -> tuple[float, str]:
    """The allowed relative difference between the losses of a repeated step, and the reason. 0: equal to the last bit.

    starts: the start and resume events. Each records whether its device was deterministic.
    """
    if loose := sorted({str(event.get("device")) for event in starts if not event.get("deterministic", True)}):
        return NOT_DETERMINISTIC, (f"not deterministic on this device ({', '.join(loose)}; train.deterministic=true "
                                   f"makes it so)")
    if len({str([event.get(key) for key in PLACES]) for event in starts}) > 1:
        return ROUNDING, "computed on other ranks, or otherwise, than before"
    return 0.0, "computed as before"


def _repeats(history: SampleHistory, result: Audit) -> None:
    """A step that is repeated after a kill must be the same step.

    After a rollback, the steps before the left-out samples are repeated, and later ones see other samples. A step that
    may have read a damaged token shard may have another loss, once per damaged shard.
    """
    from drover.pipeline.training.data import DAMAGED

    damages = [event.get("step", 0) for event in history.events if event["event"] == DAMAGED]
    last: dict[int, Line] = {}
    other = Counter[int]()
    for line in history.lines:
        step, done = line["step"], line.get("rollbacks", 0)
        earlier, last[step] = last.get(step), line
        if done > len(history.rollbacks):
            result.faults.append(f"step {step} was done after {done} rollbacks, rollbacks.json has "
                                 f"{len(history.rollbacks)}")
        if earlier is None:
            continue
        if history.is_abandoned(earlier, done):
            result.abandoned += 1
            continue
        result.repeated += 1
        difference = _difference(earlier, line)
        damaged = difference > result.tolerance and other[step] < sum(newest < step for newest in damages)
        other[step] += damaged
        result.damaged += damaged
        if not damaged and math.isfinite(difference):
            result.largest = max(result.largest, difference)
        compared = ["samples", "left_out", *([] if damaged else ["skipped"])]
        differing = [key for key in compared if earlier.get(key) != line.get(key)]
        if difference > result.tolerance and not damaged:
            differing.append("loss")
        result.faults += [f"step {step} was done twice with different {key}: {earlier.get(key)} and {line.get(key)}"
                          for key in differing]
    result.abandoned += len(last) - len(history.final)  # and not done again so far


def _difference(earlier: Line, line: Line) -> float:
    """Difference of two losses as a share of the later one; infinite if only one of them is a finite number."""
    before, now = float(earlier["loss"]), float(line["loss"])
    if before == now or (math.isnan(before) and math.isnan(now)):
        return 0.0
    difference = abs(before - now) / abs(now) if now else math.inf
    return math.inf if math.isnan(difference) else difference


def _coverage(final: dict[int, Line], result: Audit) -> bool:
    """Each step must begin where the one before it ended. Returns whether samples are missing between two."""
    end, gaps = 0, False
    for before, step in pairwise([0, *final]):
        if step > before + 1:
            result.faults.append(f"metrics.jsonl has no line for the steps {before + 1} to {step - 1} (train.log_every "
                                 f"above 1?), so their samples are unknown")
        first, stop = final[step]["samples"]
        if first > end:
            gaps = True
            result.faults.append(f"samples [{end}, {first}) were lost before step {step}")
        elif first < end:
            result.faults.append(f"samples [{first}, {min(end, stop)}) were used again in step {step}")
        end = stop
    result.steps, result.samples = max(final, default=0), end
    return gaps


def _left_out(history: SampleHistory, result: Audit) -> None:
    """What the steps passed over must be what the rollbacks excluded, and only numbers may have been trained on."""
    for rollback in history.rollbacks:
        if parts := [part for a, b in rollback.samples if a < result.samples
                     for part in history.excluded().within(a, min(b, result.samples))]:
            result.left_out.append(f"samples {format_ranges(parts)}, by the rollback from step {rollback.step} to step "
                                   f"{rollback.back_to} ({rollback.why})")
    for step, line in history.final.items():
        wanted = history.excluded(line.get("rollbacks", 0))
        logged, should = Excluded(line.get("left_out", ())), Excluded(wanted.within(*line["samples"]))
        if lost := [part for a, b in logged.ranges for part in should.remaining(a, b)]:
            result.faults.append(f"step {step} passed over samples {format_ranges(lost)}, which no rollback excludes: "
                                 f"lost")
        if kept := [part for a, b in should.ranges for part in logged.remaining(a, b)]:
            result.faults.append(f"step {step} used samples {format_ranges(kept)}, which a rollback excludes")
        loss, norm = line["loss"], line["grad_norm"]
        if "skipped" in line:
            result.left_out.append(f"samples {format_ranges(logged.remaining(*line['samples']))}, whose update was "
                                   f"skipped in step {step} ({line['skipped']}: loss {loss}, gradient norm {norm})")
        elif not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
            result.faults.append(f"step {step} counts as an update, with loss {loss} and gradient norm {norm}")


def _checkpoints(history: SampleHistory, result: Audit) -> None:
    """Checkpoints and the manifest must count what the log does, and the log must be the one that was committed."""
    skipped = [step for step, line in history.final.items() if "skipped" in line]
    counted = list[tuple[str, str, int | None, int]]()
    for name, progress in history.checkpoints.items():
        result.checkpoints += 1
        if (line := history.final.get(progress.step)) is not None:
            counted.append((f"checkpoint {name}", "samples", progress.samples, line["samples"][1]))
        counted.append((f"checkpoint {name}", "skipped updates", progress.guards.get("skipped_total"),
                        sum(step <= progress.step for step in skipped)))
    manifests = {stage: made for stage in STAGES if (made := history.run.manifest(stage)) is not None}
    result.faults += [f"the stage {stage}: {what}" for stage, what in not_as_used(manifests).items()]
    if (manifest := read_manifest(history.train)) is not None:
        result.faults += [problem for record in manifest.outputs if record["path"] in RECORDS
                         if (problem := problem_of(history.train / record["path"], record))]
        counted += [("the manifest", "samples", manifest.counts.get("samples"), result.samples),
                    ("the manifest", "skipped updates", manifest.counts.get("skipped"), len(skipped)),
                    ("the manifest", "rollbacks", manifest.counts.get("rollbacks"), len(history.rollbacks))]
    result.faults += [f"{who} counts {count} {what}, the log {logged}" for who, what, count, logged in counted
                      if count not in (None, logged)]


def _sequences(data: TrainingData, used_ranges: Sequence[Range], result: Audit) -> None:
    """Follow every used sample to its sequence: within an epoch of a pool no sequence may come twice, nor a token in
    sequences of several lengths or packings."""
    import numpy as np

    from drover.pipeline.data.sampling.order import PHASE_EPOCHS

    seen: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    chunks = [(start, min(start + CHUNK, end)) for first, end in used_ranges for start in range(first, end, CHUNK)]
    for part in watch_of("audit", "samples", sys.stderr)(chunks):
        located = data.order.locate(sample_numbers([part]))
        for pool, epoch, space in np.unique(np.stack(located[:3]), axis=1).T.tolist():
            used = seen.setdefault((pool, epoch), {}).setdefault(
                space, np.zeros(data.spaces[space][pool].count, dtype=np.int64))
            chosen = (located.pool == pool) & (located.epoch == epoch) & (located.space == space)
            np.add.at(used, located.sequence[chosen], 1)
    for (pool, number), spaces in sorted(seen.items()):
        epoch = f"{number % PHASE_EPOCHS}" + (f" of phase {number // PHASE_EPOCHS}" if number >= PHASE_EPOCHS else "")
        for space, used in spaces.items():
            name, length = data.order.pools[pool].name, data.spaces[space][pool].length
            result.faults += [f"sequence {sequence} of {name}, of {length} tokens, came {used[sequence]} times in "
                              f"epoch {epoch}" for sequence in np.flatnonzero(used > 1)]
        for index, shard in enumerate(data.shards[pool] if len(spaces) > 1 else ()):
            parts = [data.spaces[space][pool].parts(index) for space in spaces]
            mine = [used[part.sequences] > 0 for part, used in zip(parts, spaces.values(), strict=True)]
            starts, stops = (np.concatenate([part[side][own] for part, own in zip(parts, mine, strict=True)])
                             for side in (1, 2))
            ascending = np.argsort(starts)
            again = np.flatnonzero(starts[ascending][1:] < stops[ascending][:-1])
            result.faults += [f"tokens of {shard.path} from {starts[ascending][place + 1]} on came twice in epoch "
                              f"{epoch}" for place in again]


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Audit and print; 1 if there are faults."""
    result = audit(options.run)
    if options.json:
        echo(json.dumps(asdict(result), indent=1))
    else:
        draw(*result.lines())
    return bool(result.faults)


main = Program("python -m drover.tools.audit", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
