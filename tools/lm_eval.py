"""lm-evaluation-harness's own command line, which also knows `--model drover`.

    python -m drover.tools.lm_eval --model drover --model_args run=runs/demo --tasks python_line \\
        --include_path configs/tasks
    python -m drover.tools.lm_eval --model drover --model_args run=runs/demo,checkpoint=100,dtype=bfloat16 --tasks ...
    torchrun --standalone --nproc-per-node 2 -m drover.tools.lm_eval --model drover --model_args ... --tasks ...

All arguments are lm_eval's (docs/evaluation.md names those of the model), but for `--plugin FILE`, which imports a
plugin. Data files of a task under --include_path are relative to its YAML file, not to the working directory. With
`--use_cache FILE` an interrupted command continues. With several ranks use the stage evaluate, which caches every task.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from drover.pipeline.config.plugins import add_plugin_option
from drover.pipeline.core.command_line import complain
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.evaluation.tasks import find_tasks, write_absolute, write_groups

INCLUDE = "--include_path"
CACHE = "--use_cache"


def main(arguments: list[str] | None = None) -> int:
    """Run lm_eval with `arguments`, by default those of this process."""
    parser = argparse.ArgumentParser(prog="python -m drover.tools.lm_eval", add_help=False, allow_abbrev=False)
    add_plugin_option(parser)
    parser.add_argument(INCLUDE, type=Path)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    before = sys.argv
    try:
        options, given = parser.parse_known_args(arguments)
        if several and any(one.split("=")[0] in (CACHE, "-c") for one in given):
            raise UserError(f"{CACHE} would give ranks different requests after an interruption. Leave it out, use "
                            f"one process, or use the stage evaluate, which caches every task on any number of ranks.")
        leads = int(os.environ.get("RANK", "0")) == 0  # the others have the same results to print
        with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder, \
                open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(sys.stdout if leads else nothing):
            if options.include_path is not None:  # the same tasks, with the whole paths of their data files
                write_absolute(find_tasks([options.include_path]).values(), Path(folder))
                write_groups(options.include_path, Path(folder))
                given += [INCLUDE, folder]
            # lm_eval reads the arguments of the process; without a word before the options it means `run`.
            sys.argv = ["lm_eval", *given]
            _hand_over()
    except UserError as error:
        complain(str(error))
        return error.exit_status
    finally:
        sys.argv = before
        if several:
            from drover.pipeline.parallel.ranks import stop_ranks
            stop_ranks()
    return 0


def _hand_over() -> None:
    require("this command", "lm_eval")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "drover" not in model_registry:  # by its name: it is imported, with torch, when a command asks for it
        model_registry.register("drover", target="drover.pipeline.evaluation.lm_eval_model:DroverModel")
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
