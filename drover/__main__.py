"""The command `drover`: its subcommands, each of which is imported when it is chosen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from drover.pipeline.core.console import Program, complain
from drover.pipeline.core.errors import UserError, meant

COMMANDS = {
    "init": ("tools.init:main", "write a configuration for a folder of your text"),
    "run": ("launch.submit:run", "run the stages, on this machine or through Slurm"),
    "plan": ("launch.submit:show_plan", "show what `run` would do, and start nothing"),
    "status": ("launch.status:main", "show the progress of all runs, or of one"),
    "logs": ("launch.commands:logs", "show the output of a stage"),
    "stop": ("launch.commands:stop", "let training save a checkpoint and end"),
    "cancel": ("launch.commands:cancel", "remove a run's jobs from Slurm"),
    "why": ("launch.commands:why", "show why a stage is up to date or out of date"),
    "explain": ("launch.commands:explain", "show what a setting means, its type, default and value"),
    "chat": ("tools.chat:main", "generate text with a model: continue prompts, or chat"),
    "evaluate": ("pipeline.watch:main", "score a run's checkpoints while it trains, or afterwards"),
    "sweep": ("tools.sweep:main", "train variants with several seeds, and say which is better"),
    "ladder": ("tools.ladder:main", "train small models, and predict a larger one"),
    "mixture": ("tools.mixture:main", "search the best mixture of the sources"),
    "compare": ("tools.compare:main", "compare models on the same items"),
    "tasks": ("tools.tasks:main", "download the data of the harness's own tasks, and list it"),
    "weights": ("tools.weights:main", "convert weights between Drover's and Hugging Face's form"),
    "classifier": ("tools.classifier:main", "train a model that scores documents"),
    "trace": ("tools.trace.__main__:main", "find the documents of a training step, or the steps that saw a document"),
    "verify": ("tools.verify:main", "check every file of a run against its recorded hash"),
    "audit": ("tools.audit:main", "check that every training sample was used exactly once"),
    "export-tokens": ("tools.export_tokens:main", "write tokens for Megatron"),
    "copy-tokens": ("tools.copy_tokens:main", "copy a run's tokens to an object store"),
    "rehearse": ("tools.rehearse:main", "compute the memory and traffic of a training step, without GPUs"),
    "presets": ("tools.presets:main", "list model shapes: parameters, memory, cost of training"),
    "doctor": ("launch.doctor:main", "ask a Slurm site what Drover needs to know, and write a profile"),
    "completion": ("tools.completion:main", "print a script that completes words in bash, zsh or fish"),
}
"""Command: `module:program`, and what it does."""
ELSEWHERE = {"resume": "run", "train": "run", "convert": "run", "export": "run", "report": "run", "sample": "chat",
             "generate": "chat", "eval": "evaluate"}
"""The command for what other programs call so."""
HELP = """\
usage: drover COMMAND ...

Raw text to a pretrained, evaluated Llama 3 decoder, in one restartable chain.

  drover init notes/                     write notes.yaml for your own text
  drover run notes.yaml                  train and evaluate; the same command continues
  drover status                          show the progress

commands:
{}

drover COMMAND --help shows its options. RUN is the name or folder of a run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP.format("\n".join(f"  {command:<14} {text}" for command, (_, text) in COMMANDS.items())), end="")
        return 0
    if name in COMMANDS:
        return program(name)(rest, f"drover {name}")
    known = f"did you mean '{ELSEWHERE[name]}'?" if name in ELSEWHERE else meant(
        name, COMMANDS, "drover --help shows all.")
    complain(f"there is no command {name}; {known}")
    return UserError.exit_status


def program(command: str) -> Program:
    """The program of a subcommand."""
    module, _, name = COMMANDS[command][0].partition(":")
    result: Program = getattr(import_module(f"drover.{module}"), name)
    return result


if __name__ == "__main__":
    sys.exit(main())
