"""Compare models on the same items: a table of scores, each with its difference from the first model's.

    drover compare --models runs/demo runs/trial/convert/hf --tasks python_line
    drover compare --models runs/demo/train/checkpoints/step-* --tasks python_line --validation runs/demo

A model is a run (its export or, before that is made, its newest checkpoint), a training checkpoint inside a run, or a
Llama in Hugging Face form. A difference is taken on each item, which is sharper than two scores with their errors; the
interval holds it in 95 of 100 comparisons, from about 30 items on. torchrun shares the work over several ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from drover.pipeline.config.evaluation import EvaluateConfig
from drover.pipeline.config.plugins import add_plugin_option
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import REPOSITORY
from drover.pipeline.core.command_line import Parser, Program, add_json, find_model, find_run, refuse_low
from drover.pipeline.core.console import aligned, echo
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.core.files import Record
from drover.pipeline.evaluation.comparing import measured, rows
from drover.pipeline.evaluation.open_model import deliverable
from drover.pipeline.evaluation.tasks import go_offline, tasks_named

FORMAT = 2
COLUMNS = {"task": "{}", "metric": "{}", "n": "{:,}", "chance": "{:.4f}", "model": "{}", "value": "{:.4f}",
           "stderr": "{:.4f}", "difference": "{:+.4f}", "low": "{:+.4f}", "high": "{:+.4f}"}
HEADING = ("task", "metric", "n", "chance", "model", "score", "std. error", "difference", "from", "to (95%)")


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--models", nargs="+", type=find_model, metavar="PATH", required=True,
                        help="two or more runs, checkpoints, Hugging Face folders")
    add_plugin_option(parser)
    parser.add_argument("--tasks", nargs="*", default=[], metavar="TASK", help="names of tasks")
    parser.add_argument("--task-folders", nargs="+", type=Path, default=[REPOSITORY / "configs/tasks"],
                        metavar="FOLDER", help="where they are looked for (default: configs/tasks)")
    parser.add_argument("--validation", type=find_run, metavar="RUN",
                        help="also bits per byte of this run's validation text")
    parser.add_argument("--limit", type=int, metavar="N",
                        help="only the first N items of each task, and documents of each source (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--batch", type=int, default=16, help="sequences per forward pass (default 16)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="tokens of a window (default: the context)")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Measure, compare and print."""
    go_offline()  # before anything imports the libraries that look for it
    refuse_low(options, "limit", "batch", "length")
    if not options.tasks and options.validation is None:
        raise UserError("There is nothing to measure: give --tasks, --validation or both.")
    tasks = tasks_named(options.tasks, options.task_folders, "--tasks")
    validation = None if options.validation is None else run_in(options.validation)
    settings = EvaluateConfig(task_limit=options.limit, dtype=options.dtype, batch=options.batch,
                              sequence_length=options.length)
    models = _models(options.models)
    require("a comparison", "lm_eval")
    from drover.pipeline.evaluation.results import doubts, rounded
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks

    ranks = start_ranks()
    try:
        parts = dict[str, dict[str, Record]]()
        for name, path in models.items():
            if ranks.is_rank_zero:
                echo(f"measuring {name}", file=sys.stderr)
            parts[name] = measured(path, tasks, validation, settings, ranks)
        results = {"format": FORMAT, "models": {name: str(path) for name, path in models.items()},
                   "dtype": settings.dtype, "window": settings.sequence_length, "limit": settings.task_limit,
                   "rows": [rounded(row) for row in rows(parts)],
                   "notes": [f"{name}: {doubt}" for name, part in parts.items() for doubt in doubts(part)]}
        if ranks.is_rank_zero:
            print(json.dumps(results, ensure_ascii=False)) if options.json else _print(results)
        ranks.barrier()
    finally:
        stop_ranks()


def _models(named: list[Path]) -> dict[str, Path]:
    """What is measured of each model, by its name; all are looked at before one is measured."""
    if len(named) < 2 or len(set(named)) < len(named):
        raise UserError(f"--models takes two or more models, each once; these are {', '.join(map(str, named))}.")
    from drover.pipeline.formats.weights import open_weights

    models = {str(path): deliverable(path) for path in named}
    for path in models.values():
        with open_weights(path):
            pass
    return models


def _print(results: Record) -> None:
    cells = [["" if row.get(name) is None else form.format(row[name]) for name, form in COLUMNS.items()]
             for row in results["rows"]]
    echo(*aligned([HEADING, *cells]), "", *results["notes"])


main = Program("python -m drover.tools.compare", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
