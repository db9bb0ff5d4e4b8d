"""Search the best mixture of a configuration's sources: train on random ones, fit laws, train on the best.

    drover mixture configs/experiments/mixture.yaml
    drover mixture configs/experiments/mixture.yaml --json

The file names a configuration, how many random mixtures to train on, seeds, and what each source's validation text
counts:

    base: mixture_base.yaml         # relative to this file
    mixtures: 16
    seeds: [0]                      # the default
    weights: {code: 2, notes: 1}    # default: all the same

Each training is an ordinary run, and all share the tokens of one. The same command continues, and trains
what was added to the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat, PositiveInt

from drover.pipeline.config.loading import load_config, read_section, refusal, shipped
from drover.pipeline.config.section import LocalPath, Section, local_path
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import Parser, Program, add_json, echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_record
from drover.pipeline.reporting.document import value
from drover.tools.ladder import all_ended, show
from drover.tools.sweep import BASE, Sweep, SweepFile, profile_of, train

if TYPE_CHECKING:
    from drover.pipeline.reporting.mixture import TrainedMixture

PAGE = "mixture.html"


class MixtureFile(Section):
    """A search for the best mixture."""

    base: LocalPath
    """The configuration of all runs, relative to this file. Its own mixture is trained, too."""
    mixtures: PositiveInt
    """How many random mixtures. A larger number keeps those that were trained."""
    seeds: list[int] = Field([0], min_length=1)
    """The losses are means over seeds."""
    weights: dict[str, PositiveFloat] = {}
    """What a source's validation text counts; all the same by default."""


def read_mixture(path: Path, cluster: str = "local") -> tuple[MixtureFile, Config]:
    """The file and its base; UserError for all problems. cluster: as of drover run."""
    from drover.pipeline.evaluation.mixtures import least_mixtures

    file = read_section(path, MixtureFile, "Give the file of a search; `drover mixture --help` shows one.")
    base = load_config(shipped(Path(local_path(file.base)), path.parent), profile_of(cluster))
    sources = base.source_names
    problems = [f"weights: {name} is no source of the base, which has {', '.join(sources)}."
                for name in file.weights if name not in sources]
    if len(sources) < 2:
        problems.append(f"The base has one source, {sources[0]}: there is nothing to mix.")
    elif file.mixtures < (least := least_mixtures(len(sources))):
        problems.append(f"{file.mixtures} mixtures are too few for {len(sources)} sources: give {least} or more.")
    if base.train.phases:
        problems.append("The base has train.phases. Leave them out: the mixture here holds for the whole training.")
    if problems:
        raise refusal(problems, path)
    return file, base


def drawn(file: MixtureFile, sources: list[str]) -> dict[str, dict[str, float]]:
    """Random mixtures by name, uniform among all; shares of two digits with the sum 1."""
    import numpy as np

    result = {}
    for number, shares in enumerate(np.random.default_rng(0).dirichlet(np.ones(len(sources)), file.mixtures), start=1):
        ends = np.round(np.cumsum(shares), 2)
        result[f"mixture-{number:02}"] = {name: round(float(share), 2) for name, share in zip(
            sources, np.diff(ends, prepend=0), strict=True)}
    return result


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the search")
    parser.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE", help="where, as of drover run")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Train on random mixtures, fit, train on the best, write the page."""
    from drover.pipeline.evaluation.mixtures import least_mixtures
    from drover.pipeline.reporting.mixture import MixtureSearch

    file, base = read_mixture(options.file, options.cluster)
    mixtures = drawn(file, base.source_names)
    tried = sweep_of(options.file, file, base, mixtures)
    if (status := train(tried, options.cluster)) or not all_ended(tried):
        return status
    own, *random = trained(tried, {BASE: {}, **mixtures})
    if own is None:
        raise UserError(f"Training on the base's own mixture diverged. Lower train.lr in {file.base}.")
    weights = file.weights or dict.fromkeys(own.losses, 1.0)
    if missing := [name for name in weights if name not in own.losses]:
        raise UserError(f"{options.file}: weights names {', '.join(missing)}, of which there is no validation text. "
                        f"Give the source more of it in {file.base}, or leave it out of weights.")
    ended = [one for one in random if one is not None]
    if len(ended) < least_mixtures(len(base.source_names)):
        raise UserError(f"Only {len(ended)} of the trainings did not diverge. Lower train.lr in {file.base}.")
    search = MixtureSearch(ended, weights, own, [name for name, one in zip(mixtures, random, strict=True) if not one])
    echo(search.sentence, file=sys.stderr)
    name = "best-" + "-".join(f"{share:.2f}" for share in search.best_shares.values())
    best = sweep_of(options.file, file, base, {name: search.best_shares})
    if (status := train(best, options.cluster)) or not all_ended(best):
        return status
    outcome = trained(best, {name: search.best_shares})[0]
    search = replace(search, outcome=outcome, has_diverged=outcome is None)
    show(search.page(f"Mixture {options.file.stem}"), search.as_json(), tried.folder / PAGE, json_only=options.json)
    return 0


def sweep_of(path: Path, file: MixtureFile, base: Config, mixtures: Mapping[str, Mapping[str, float]]) -> Sweep:
    """The runs on these mixtures and on the base's, as a sweep without a comparison."""
    source = str(shipped(Path(local_path(file.base)), path.parent))
    variants = {name: (f"train.mixture={json.dumps(shares)}",) for name, shares in mixtures.items()}
    given = SweepFile(base=file.base, seeds=[*dict.fromkeys(file.seeds)])
    return Sweep(path, given, source, base, {BASE: (), **variants})


def trained(sweep: Sweep, mixtures: Mapping[str, Mapping[str, float]]
            ) -> list[TrainedMixture | None]:
    """What the runs on these mixtures ended with; None where one diverged."""
    from drover.pipeline.reporting.mixture import TrainedMixture

    losses = dict[str, list[dict[str, float]]]()
    diverged = set[str]()
    for run in sweep.runs():
        if run.diverged:
            diverged.add(run.variant)
            continue
        path = Run(run.config).stage_folder("evaluate") / "results.json"
        measured = value("validation[sources]", read_record(path, Record, "Evaluate the run again."))
        losses.setdefault(run.variant, []).append({name: one["bits_per_byte"] for name, one in measured.items()})
    return [None if name in diverged else TrainedMixture(
        name, shares, {source: fmean(one[source] for one in losses[name]) for source in losses[name][0]})
        for name, shares in mixtures.items()]


main = Program("drover mixture", __doc__, add_options, work, interrupted="stopped; the same command continues")
