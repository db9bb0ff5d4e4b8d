"""Compare models on the same items: a table of scores, paired differences with their significance, and plots.

    drover compare --models runs/demo runs/trial/convert/hf --tasks python_line --to compared
    drover compare --checkpoints runs/demo --tasks python_line --validation runs/demo --to over_time

A model is a run (its export or, before that is made, its newest checkpoint), a training checkpoint inside a run, or a
Llama in Hugging Face form. --to receives comparison.json, comparison.md, the result of every item and, with
--checkpoints, an SVG for each score. An interrupted command continues, and a further task is measured alone. --models
compares every pair, --checkpoints each checkpoint with the one before it. torchrun shares the work over several ranks.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.config.evaluation import EvaluateConfig
from drover.pipeline.config.plugins import add_plugin_option
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import REPOSITORY
from drover.pipeline.core.command_line import Parser, Program, find_model, find_run, refuse_low
from drover.pipeline.core.console import aligned, echo, markdown
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.core.files import Record, sha256_file, write_json, write_text
from drover.pipeline.evaluation.comparing import Candidate, Conditions, differences, measured, rows
from drover.pipeline.evaluation.open_model import deliverable
from drover.pipeline.evaluation.tasks import go_offline, tasks_named
from drover.pipeline.records.checkpoints import complete_checkpoints, read_marker
from drover.pipeline.reporting.document import NONE, filled

FORMAT = 1
SCORES = {"model": "{model}", "tokens": "{tokens:,}", "task": "{task}", "version": "{version}", "metric": "{metric}",
          "n": "{n:,}", "few-shot": "{few_shot}", "score": "{value:.4f}", "std. error": "{stderr:.4f}",
          "chance": "{chance:.4f}"}
PAIRED = {"first": "{first}", "second": "{second}", "task": "{task}", "metric": "{metric}", "n": "{items:,}",
          "second - first": "{difference:+.4f}", "std. error": "{stderr:.4f}", "higher": "{higher:,}",
          "lower": "{lower:,}", "p (sign test)": "{p_sign:.3g}", "p (normal)": "{p_normal:.3g}"}
"""The columns of the two tables, each with its template."""
NOTES = (
    "Scores: std. error of the mean over the items, of bits per byte that of a ratio; chance: right choices / choices, "
    "averaged over the items.",
    "Differences: paired, on each item; higher and lower: items on which the second model has the larger value; the "
    "sign test is exact (of right and wrong answers it is McNemar's; so it is of f1, where higher and lower are items "
    "that the second model alone classifies rightly, or wrongly), the normal one is of difference / std. error. Fewer "
    "bits per byte and lower perplexities are better. No p-value is corrected for the number of comparisons.")


def work(options: argparse.Namespace) -> None:
    """Measure, compare and print."""
    go_offline()  # before anything imports the libraries that look for it
    candidates, conditions = _candidates(options), _conditions(options)
    require("a comparison", "lm_eval")
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks

    ranks = start_ranks()
    try:
        results = compare(candidates, conditions, options, ranks)
        if ranks.leads:
            _write(options.to, results)
        ranks.barrier()
    finally:
        stop_ranks()


def add_options(parser: Parser) -> None:
    """The options."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--models", nargs="+", type=find_model, metavar="PATH",
                       help="runs, checkpoints, Hugging Face folders")
    which.add_argument("--checkpoints", type=find_run, metavar="RUN", help="all complete checkpoints of a run")
    add_plugin_option(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--tasks", nargs="*", default=[], metavar="TASK", help="names of tasks")
    parser.add_argument("--task-folders", nargs="+", type=Path, default=[REPOSITORY / "configs/tasks"],
                        metavar="FOLDER", help="where they are looked for (default: configs/tasks)")
    parser.add_argument("--validation", type=find_run, metavar="RUN",
                        help="also bits per byte of this run's validation text")
    parser.add_argument("--validation-documents", type=int, metavar="N",
                        help="only the first N documents of each source (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--batch", type=int, default=16, help="sequences per forward pass (default 16)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="tokens of a window (default: the context)")
    parser.add_argument("--bootstrap-iters", type=int, default=100_000, metavar="N",
                        help="draws for standard errors that have no formula (default 100000)")


def _candidates(options: argparse.Namespace) -> list[Candidate]:
    if options.checkpoints is None:
        twice = [path for path in options.models if options.models.count(path) > 1]
        if twice:
            raise UserError(f"--models names {twice[0]} twice. Give each model once.")
        return [Candidate(str(path), deliverable(path)) for path in options.models]
    run = run_in(options.checkpoints)
    found = complete_checkpoints(run.stage_folder("train"))
    if not found:
        raise UserError(f"The run {options.checkpoints} has no complete checkpoint to compare.")
    return [Candidate(path.name, path, read_marker(path)["progress"].get("tokens")) for path in found]


def _conditions(options: argparse.Namespace) -> Conditions:
    refuse_low(options, "limit", "batch", "length", "validation_documents")
    if not options.tasks and options.validation is None:
        raise UserError("There is nothing to measure: give --tasks, --validation or both.")
    tasks = tasks_named(options.tasks, options.task_folders, "--tasks")
    validation = None if options.validation is None else run_in(options.validation)
    settings = EvaluateConfig(task_limit=options.limit, dtype=options.dtype, batch=options.batch,
                              sequence_length=options.length, bootstrap_iters=options.bootstrap_iters)
    return Conditions(tasks, settings, validation, options.validation_documents)


def compare(candidates: Sequence[Candidate], conditions: Conditions, options: argparse.Namespace,
            ranks: Any) -> Record:
    """Every model's rows and the pairs' differences, ready for JSON; all ranks call it together."""
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.evaluation.results import doubts

    options.to.mkdir(parents=True, exist_ok=True)
    code = [*sorted((REPOSITORY / "pipeline/evaluation").glob("*.py")), *sorted((REPOSITORY / "model").rglob("*.py"))]
    made_by = [[path.relative_to(REPOSITORY).as_posix(), sha256_file(path)] for path in code]
    kept = Kept(options.to / "items", made_by, ranks, lambda text: echo(text, file=sys.stderr))
    found = {candidate.name: measured(candidate, conditions, kept, ranks, options.to / "lm_eval.log")
             for candidate in candidates}
    pairs = itertools.pairwise(candidates) if options.checkpoints else itertools.combinations(candidates, 2)
    return {"format": FORMAT, "models": {candidate.name: str(candidate.path) for candidate in candidates},
            "dtype": options.dtype, "window": options.length, "limit": options.limit,
            "scores": [row for candidate in candidates for row in rows(candidate, found[candidate.name])],
            "differences": differences(pairs, found),
            "notes": [*NOTES, *(f"{name}: {doubt}." for name, parts in found.items() for doubt in doubts(parts))]}


def _write(folder: Path, results: Record) -> None:
    scores, paired = _table(SCORES, results["scores"]), _table(PAIRED, results["differences"])
    write_json(folder / "comparison.json", results)
    text = ["# Comparison", "", *markdown(scores), ""]
    text += ["## Paired differences", "", *markdown(paired), ""] if paired[1:] else []
    write_text(folder / "comparison.md", "\n".join([*text, *results["notes"], ""]))
    echo("\n".join([*aligned(scores), *(["", *aligned(paired)] if paired[1:] else []), "",
                    *results["notes"][len(NOTES):], str(folder / "comparison.md")]))


def _table(columns: dict[str, str], rows: list[Record]) -> list[list[str]]:
    """Heading and cells, sorted by task and metric. What is missing is left empty."""
    return [[*columns], *(["" if (text := filled(cell, row)) == NONE else text for cell in columns.values()]
                          for row in sorted(rows, key=lambda row: (row["task"], row["metric"])))]


main = Program("python -m drover.tools.compare", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
