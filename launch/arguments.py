"""The part of a command line that names a configuration and where it is to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from drover.pipeline.config.checks import problems
from drover.pipeline.config.command_line import add_settings
from drover.pipeline.config.loading import load_config, refusal, shipped
from drover.pipeline.config.section import blocked
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import Parser, echo

USUAL = Path("configs") / "demo.yaml"
CLUSTERS = ("auto", "slurm", "local")
"""Values of --cluster that are no profiles."""


def add_config(parser: Parser, word: str = "", meaning: str = "") -> None:
    """Its options. word, meaning: as of `add_settings`."""
    add_settings(parser, word, meaning)
    where = parser.add_argument_group("where")
    where.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE",
                       help="auto (default): Slurm if sbatch is on PATH, else this machine; PROFILE: Slurm with the "
                            "settings of configs/clusters/PROFILE.yaml, or of a file")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes for train (launch.train.nodes)")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node (launch.gpus_per_node)")


def configuration(options: argparse.Namespace) -> Config:
    """The configuration with its overrides, whose problems are not looked for yet."""
    given = options.config
    options.config = str(shipped(Path(given or USUAL)))
    if given is None or Path(given) != Path(options.config):
        echo(f"config    {options.config}{'' if given else ', since no file is given'}")
    return load_config(options.config, overrides(options), check=False)


def refuse_unusable_places(config: Config, path: str) -> None:
    """Refuse a run folder that cannot exist, before anything is looked up there. The error names all other problems of
    the configuration too."""
    if (obstacle := blocked(config.folder)) is not None:
        raise refusal([obstacle, *problems(config)], path)


def overrides(options: argparse.Namespace) -> list[str]:
    """All overrides, those of options for single settings included."""
    profile = None if options.cluster in CLUSTERS else options.cluster
    given = {"launch.cluster": profile, "launch.train.nodes": options.nodes,
             "launch.gpus_per_node": options.gpus_per_node}
    return [*options.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
