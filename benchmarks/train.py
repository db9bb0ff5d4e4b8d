"""A training step on this machine's CPU: our engines and layouts beside transformers (train.yaml).

The shape is the reference for CPUs (cpu.yaml): vocabulary 8192, width 288, 6 layers, 6 query and 2 kv heads,
feed-forward 768, untied, fp32, batch 8 x 256, AdamW and clipping. Every candidate has processes of its own (two ranks
share the threads) and rests while another runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.apart import Apart
from benchmarks.measuring import Record, Row, Taken, alternated, compared, positive
from benchmarks.suite import cases_of, derived, work
from drover.pipeline.core.errors import UserError

CANDIDATES = {case["name"]: {"recipe": "benchmarks/cpu", "accumulation": 1, "documents": False, "kept": True, **case}
              for case in cases_of("train")}
COLUMNS = {"": "{name}", "tokens/s": "{rate:,.0f}", "of transformers'": "{wall_ratio:.2f} ({wall_least:.2f} - "
           "{wall_most:.2f})", "of transformers', processor": "{cpu_ratio:.2f}", "TFLOP/s": "{tflops_full:.3f}",
           "step ms, min / median / max": "{min_ms:.0f} / {median_ms:.0f} / {max_ms:.0f}",
           "peak memory GB": "{memory_gb:.3f}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked for."""
    parser.add_argument("--steps", type=positive, default=3, help="of each candidate in a round (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="shared by a candidate's ranks (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES), help="candidates")


def run(options: argparse.Namespace, record: Record) -> bool:
    """Alternate rounds of each candidate; whether one failed."""
    import torch

    from drover.model.kernels import chosen

    torch.set_num_threads(options.threads)
    found = dict[str, Candidate]()
    with ExitStack() as stack:
        for name in options.only:
            candidate = stack.enter_context(closing(Candidate(name, options.threads, options.steps)))
            try:
                candidate()  # a first round, which is not counted
                candidate.rows.clear()
                found[name] = candidate
            except RuntimeError as error:
                record.notes.append(f"left out: {name}: {error}")
                print(record.notes[-1], flush=True)
        taken = alternated(found, options.rounds)
    if not found:
        raise UserError("Nothing could be measured; see above.")
    tokens = next(iter(found.values())).rows[0]["tokens"]
    rows = [{**row, **found[row["name"]].figures(row["rate"])}
            for row in compared(taken, tokens, "tokens", "transformers")]
    record.facts |= {"threads": options.threads, "capability": torch.backends.cpu.get_cpu_capability(),
                     "ours takes": chosen()}
    record.add("Training steps", COLUMNS, *rows)
    return any(": missing: " not in note for note in record.notes)


class Candidate:
    """A candidate's processes. Called: some steps; the time of the median one. RuntimeError where it cannot run."""

    def __init__(self, name: str, threads: int, steps: int) -> None:
        self.case = {**CANDIDATES[name], "steps": steps}
        count = self.case.get("ranks", 1)
        each, self.rows = max(1, threads // count), list[Row]()
        self.apart = Apart(work, False, each, ranks=count, log=Path(os.devnull), variables={
            "OMP_NUM_THREADS": str(each), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""})

    def __call__(self) -> Taken:
        self.apart.send(self.case)
        row: Row = {}
        while True:
            kind, content = self.apart.receive()
            if kind == "row":
                row = content
            elif kind == "end" or row.get("status"):
                break
            elif kind != "facts":
                raise RuntimeError(content)
        if row.get("status"):
            raise RuntimeError(f"{row['status']}: {row['note']}")
        self.rows.append(row)
        return Taken(statistics.median(row["step_s"]), row["cpu_s"])

    def figures(self, rate: float) -> Row:
        """What all rounds come to, at so many tokens a second."""
        last = self.rows[-1]
        row = derived({**last, "status": "ok", "step_s": [wall for row in self.rows for wall in row["step_s"]],
                       "gpus": 1}, None, None)
        return {**row, "rate": rate, **{f"tflops_{count}": rate * last[f"flops_{count}"] / 1e12
                                        for count in ("causal", "full")}}

    def close(self) -> None:
        """End the processes."""
        self.apart.end()
