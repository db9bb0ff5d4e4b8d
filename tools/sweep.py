"""Train variants of a run with several seeds, and say which of them is better than the baseline.

    drover sweep configs/rates.yaml             train the rest, compare
    drover sweep configs/rates.yaml --status    compare what is done

The file names a configuration, what varies, the seeds, and perhaps what each run may use:

    base: demo.yaml                   # relative to this file
    vary: {train.lr: [5.0e-3, 1.0e-2, 2.0e-2]}
    variants: {narrow: {model.dim: 96}}
    seeds: [0, 1, 2]
    baseline: lr-0.01                 # default: base, the configuration itself
    budget: {tokens: 1M}              # or flops, or seconds of training here

`vary` makes a grid of all its lists. Each run is an ordinary run in RUNS/NAME/, where NAME is the file's. Data stages
run once for all variants that share their settings. The same command continues after any end, and trains variants and
seeds that were added. On this machine the GPUs are divided among the runs; CPUs do one after another. On Slurm each run
is a submission of its own, and the command has to be given again when its jobs are done. Exit status: 0 all is done or
submitted, 1 a run failed, 2 refused, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, PositiveFloat

from drover.launch.arguments import CLUSTERS
from drover.launch.local import find_machine
from drover.launch.plan import process_environment
from drover.launch.processes import POLL_S, kill_group, started, stop_requests
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.status import query
from drover.pipeline.config.loading import load_config, read_section, refusal, save_config, shipped
from drover.pipeline.config.section import Section, identity
from drover.pipeline.config.training import read_tokens
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import read_state
from drover.pipeline.core.console import (
    INTERRUPTED,
    Parser,
    Program,
    add_json,
    counted,
    draw,
    duration,
    echo,
    first,
    is_run,
)
from drover.pipeline.core.errors import UserError, all_results, refusals
from drover.pipeline.core.files import sha256_json, write_text
from drover.pipeline.records.metrics import DIVERGED, RunFacts

if TYPE_CHECKING:
    from drover.pipeline.reporting.experiment import Experiment

DATA = [name for name, stage in STAGES.items() if stage.reusable]
OWN = ("name", "runs_dir", "reuse", "seed")
"""Settings that the sweep decides."""
BASE = "base"
TRIAL = ("train.steps=20", "train.warmup_steps=0", "train.schedule=cosine", "train.decay_steps=null",
         "train.validation_every=null", "train.sample_every=null", "evaluate.every=null", "convert.average=[]")
"""Settings of a trial. The second half of its steps is timed."""
MASK = "CUDA_VISIBLE_DEVICES"
PAGE = "sweep.html"


class SweepFile(Section):
    """A file of a sweep. budget: what each run may use, by one measure; it decides `train.steps`."""

    base: str
    vary: dict[str, list[JsonValue]] = {}
    variants: dict[str, dict[str, JsonValue]] = {}
    seeds: list[int] = Field(min_length=1)
    baseline: str = BASE
    budget: dict[Literal["tokens", "flops", "seconds"], Annotated[PositiveFloat, BeforeValidator(read_tokens)]] = Field(
        {}, max_length=1)


@dataclass(frozen=True)
class SweepRun:
    """An ordinary run, or stages of one."""

    config: Config
    stages: tuple[str, ...]
    variant: str = ""
    seed: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all its stages are up to date."""
        run = Run(self.config)
        with suppress(UserError):  # the run itself reports it
            return all(run.state(stage).kind == "done" for stage in self.stages)
        return False

    @property
    def diverged(self) -> str:
        """Why the guards have stopped it with these settings; "" if they have not."""
        run = Run(self.config)
        state = read_state(run.own_folder("train"))
        if state is None or state.status != "failed" or not state.reason.startswith(DIVERGED):
            return ""
        return "" if run.state("train").differences else state.reason

    @property
    def is_queued(self) -> bool:
        """Whether Slurm has jobs of it."""
        status, = query([self.config.folder], Scheduler())
        return any(row.state in ("running", "waiting", "ending") for row in status.rows)


@dataclass(frozen=True)
class Sweep:
    """A sweep's file with what it amounts to.

    Attributes:
        base: the base's file. config: its settings, with the profile of a cluster if one is given. The file is not
            read again: it may be edited meanwhile.
        variants: overrides by name; the baseline comes first.
    """

    path: Path
    given: SweepFile
    base: str
    config: Config
    variants: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> Path:
        """Of its runs."""
        return Path(self.config.runs_dir) / self.path.stem

    def run(self, name: str, overrides: Sequence[str], stages: Sequence[str], variant: str = "", seed: int = 0
            ) -> SweepRun:
        """A run in its folder. UserError for settings that cannot work."""
        every = (*overrides, f"name={json.dumps(name)}", f"runs_dir={json.dumps(str(self.folder))}")
        return SweepRun(load_config(self.base, every, base=self.config), tuple(stages), variant, seed)

    @cached_property
    def data(self) -> dict[str, SweepRun]:
        """The run whose data stages a variant uses, by variant. It is the base's own, unless the variant has other
        settings of data; variants with equal ones share a run."""
        of_settings = {_data_key(self.config): SweepRun(self.config, (*DATA,))}
        result = dict[str, SweepRun]()
        for name, overrides in self.variants.items():
            key = _data_key(load_config(self.base, overrides, base=self.config))
            if key not in of_settings:
                of_settings[key] = self.run(f"data-{key[:8]}", (*overrides, "reuse=null"), DATA)
            result[name] = of_settings[key]
        return result

    def trials(self) -> list[SweepRun]:
        """A short training of each variant, if the budget is time."""
        return [self.run(f"trial-{name}", (*overrides, *TRIAL, self._reuse(name)), ["train"], name)
                for name, overrides in self.variants.items() if "seconds" in self.given.budget]

    def runs(self, waiting: Container[str] = ()) -> list[SweepRun]:
        """Every run, seed by seed, with the variants of a seed one after another. UserError names all settings that
        cannot work. waiting: variants without runs, since their data stages or trials are not done."""
        settings = {name: (*overrides, *self._steps(name), self._reuse(name))
                    for name, overrides in self.variants.items() if name not in waiting}
        return all_results(*(
            partial(self.run, f"{name}-seed{seed}", (*own, f"seed={seed}"), [*STAGES], name, seed)
            for seed in self.given.seeds for name, own in settings.items()))

    def _reuse(self, variant: str) -> str:
        made = Run(self.data[variant].config).stage_folder(DATA[-1])  # which the base may itself reuse
        return f"reuse={json.dumps(str(made.parent))}"

    def _steps(self, variant: str) -> list[str]:
        """The override with the steps that a variant's budget allows."""
        config = load_config(self.base, self.variants[variant], base=self.config)
        for measure, amount in self.given.budget.items():
            of_step = float(config.train.batch_tokens)
            if measure == "flops":
                made = Run(self.data[variant].config).finished("tokenizer")
                shape = config.model.with_vocabulary(made.counts["vocab_size"])
                of_step *= shape.flops_per_token(config.train.sequence_length, causal=False)
            elif measure == "seconds":
                lines = RunFacts(self.folder / f"trial-{variant}").steps
                of_step = median(line["step_s"] for line in lines[len(lines) // 2:])
            return [f"train.steps={max(1, int(amount / of_step))}"]
        return []


def _data_key(config: Config) -> str:
    return sha256_json([identity(config.part(part)) for name in DATA for part in STAGES[name].reads])


def profile_of(cluster: str) -> tuple[str, ...]:
    """The override that names the profile, if `--cluster` gives one."""
    return () if cluster in CLUSTERS else (f"launch.cluster={json.dumps(cluster)}",)


def read_sweep(path: Path, cluster: str = "local") -> Sweep:
    """The sweep of a file. UserError names all that is wrong in it. cluster: as of drover run."""
    given = read_section(path, SweepFile, "Give the file of a sweep; `drover sweep --help` shows one.")
    grid = [dict(zip(given.vary, values, strict=True)) for values in product(*given.vary.values()) if values]
    names = [*given.variants, *map(_name, grid)]
    settings = [*given.variants.values(), *grid]
    if given.baseline == BASE and BASE not in names:
        names, settings = [BASE, *names], [{}, *settings]
    base = str(shipped(Path(given.base), path.parent))
    wrong = list(_problems(given, names, settings))
    if wrong:
        raise refusal(wrong, path)
    config = load_config(base, profile_of(cluster))
    overrides = {name: tuple(f"{key}={json.dumps(value)}" for key, value in own.items())
                 for name, own in zip(names, settings, strict=True)}
    first = {given.baseline: overrides.pop(given.baseline)}
    sweep = Sweep(path, given, base, config, first | overrides)
    if is_run(sweep.folder) or sweep.folder == config.folder:
        raise UserError(f"{sweep.folder} is a run, and the runs of this sweep would be in it. Rename {path}.")
    if given.budget and config.train.phases:
        raise UserError(f"{path}: the base {base} has train.phases, which decide the steps. Leave out `budget`.")
    if wrong := refusals(*(partial(load_config, base, own, base=config) for own in sweep.variants.values())):
        raise UserError("\n".join(dict.fromkeys(wrong)))
    return sweep


def _name(settings: Mapping[str, JsonValue]) -> str:
    """The name of a point of the grid: lr-0.001_dim-64."""
    parts = (f"{key.rpartition('.')[2]}-{value}" for key, value in settings.items())
    return "_".join(re.sub("[^A-Za-z0-9._]+", "-", part).strip("-") for part in parts)


def _problems(given: SweepFile, names: Sequence[str], settings: Sequence[Mapping[str, JsonValue]]) -> Iterator[str]:
    """What is wrong with a sweep, a sentence each."""
    if given.baseline not in names:
        yield f"The baseline {given.baseline} is no variant. The variants are {', '.join(names)}."
    for what, values in (("variant", names), ("seed", given.seeds)):
        if twice := sorted({str(one) for one in values if [*values].count(one) > 1}):
            yield f"There are several of the {what} {', '.join(twice)}. Name each once (`variants` takes any names)."
    if taken := sorted({key for own in settings for key in own if key in OWN}):
        yield f"The sweep itself decides {', '.join(taken)}. Vary other settings; `seeds` has the seeds."
    if wrong := [name for name in names if not re.fullmatch(r"(?!data-|trial-)[A-Za-z0-9][A-Za-z0-9._-]*", name)]:
        yield (f"{', '.join(wrong)} cannot be the name of a variant: use letters, digits, '.', - and _, and begin "
               f"neither with data- nor with trial-.")


def places(config: Config) -> list[dict[str, str]]:
    """Variables of each of the runs that this machine does at once: its GPUs are divided among them."""
    gpus = find_machine(config.launch.device).gpus
    each = config.launch.processes or 1
    names = os.environ.get(MASK, ",".join(map(str, range(gpus)))).split(",")
    return [{MASK: ",".join(names[first:first + each])} for first in range(0, gpus - each + 1, each)] or [{}]


@dataclass
class Started:
    """A command that runs in a place. log_start: where its output begins in the run's log, in bytes."""

    run: SweepRun
    process: subprocess.Popen[bytes]
    place: dict[str, str]
    since: float
    log_start: int


def carry_out(sweep: Sweep, runs: Sequence[SweepRun], cluster: str) -> int:
    """Do these runs, each by the command of a person; with Slurm, submit them. What is done or has diverged is left
    alone. 0, INTERRUPTED, or 1 if one failed."""
    local = cluster == "local"
    due = [run for run in runs if not run.is_done and not run.diverged and (local or not run.is_queued)]
    free = places(sweep.config) if local else [{}]
    running = list[Started]()
    failed = handled = 0
    with stop_requests() as requests:
        while running or (due and not requests):
            while due and free and not requests:
                running.append(_start(sweep, due.pop(0), cluster, free.pop(0)))
            time.sleep(POLL_S)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.place)
                failed += not _ended(sweep, one, len(due) + len(running), local=local, stopping=bool(requests))
            if len(requests) > handled:
                handled = len(requests)
                echo("the runs save and end (once more to kill them)" if handled == 1 else "killing the runs")
                for one in running:
                    one.process.terminate() if handled == 1 else kill_group(one.process.pid)
        if requests:
            echo("stopped; the same command continues")
    return INTERRUPTED if requests else int(failed > 0)


def _log(sweep: Sweep, run: SweepRun) -> Path:
    return sweep.folder / "logs" / f"{run.config.name}.log"


def _start(sweep: Sweep, run: SweepRun, cluster: str, place: dict[str, str]) -> Started:
    stages = [] if len(run.stages) == len(STAGES) else ["--stage", ",".join(run.stages)]
    path = _log(sweep, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = path.with_suffix(".yaml")
    save_config(run.config, settings)
    with open(path, "ab", buffering=0) as log:
        before = log.tell()
        process = started([sys.executable, "-m", "drover", "run", "--config", str(settings), "--cluster", cluster,
                           *stages], {**process_environment(), **place}, log, log)
    return Started(run, process, place, time.monotonic(), before)


def _ended(sweep: Sweep, one: Started, left: int, *, local: bool, stopping: bool) -> bool:
    """Print how a command ended; whether well."""
    run = one.run
    took = duration(time.monotonic() - one.since)
    if one.process.returncode == 0:
        echo(f"{run.config.name}: {'done' if local else 'submitted'} in {took}, {counted(left, 'run')} left")
    elif reason := run.diverged:
        echo(f"{run.config.name}: diverged. {reason.partition('. ')[0]}.")
    elif not stopping:
        log = _log(sweep, run)
        printed = log.read_bytes()[one.log_start:].decode(errors="replace")
        _, word, error = f"\n{printed}".rpartition("\nerror:")
        why = " ".join(f"{word}{error}".split()) if word else f"It ended with status {one.process.returncode}."
        echo(f"{run.config.name}: failed after {took}. {why} Its output is in {log}.")
        return False
    return True


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="what to vary, and with which seeds")
    parser.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE", help="where, as of drover run")
    parser.add_argument("--status", action="store_true", help="start nothing, and compare what is done")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Train what is missing, and compare."""
    sweep = read_sweep(options.file, options.cluster)
    status = 0 if options.status else train(sweep, options.cluster)
    return status if status == INTERRUPTED else max(status, show(sweep, json_only=options.json))


def train(sweep: Sweep, cluster: str) -> int:
    """Do what is missing of a sweep; the exit status. UserError if another command works on it."""
    cluster = "local" if cluster == "local" or (cluster == "auto" and not shutil.which("sbatch")) else "slurm"
    try:
        held = lock(sweep.folder, "sweep", "The sweep")
    except UserError as error:
        raise UserError(f"{str(error).partition(';')[0]}.") from None
    with held, redirect_stdout(sys.stderr):  # --json prints the result to stdout
        echo(f"{counted(len(sweep.variants) * len(sweep.given.seeds), 'run')} in {sweep.folder}: `drover status "
             f"{sweep.folder}` shows their progress")
        for needed in (lambda: {run.config.folder: run for run in sweep.data.values()}.values(), sweep.trials):
            due = [*needed()]
            refuse_changed(sweep, due)
            if status := carry_out(sweep, due, cluster):
                return status
            missing = [run for run in due if not run.is_done]
            for run in missing:
                if run.diverged:
                    raise UserError(f"The trial {run.config.folder} of a variant diverged, so its speed is not known: "
                                    f"{run.diverged} Leave the variant out, or set `budget` to tokens or flops.")
            if missing:
                echo(f"All runs need what {missing[0].config.folder} makes. Give the same command again when its jobs "
                     f"are done.")
                return 0
        runs = sweep.runs()
        refuse_changed(sweep, runs)
        return carry_out(sweep, runs, cluster)


def refuse_changed(sweep: Sweep, runs: Sequence[SweepRun]) -> None:
    """UserError if some of the runs were trained with other settings."""
    names = [run.config.name for run in runs
             if "train" in run.stages and Run(run.config).state("train").kind == "changed"]
    if names:
        raise UserError(f"{sweep.base} or {sweep.path} was changed after these runs had trained: {first(names)}. Undo "
                        f"the change, rename {sweep.path} for a new sweep, or remove these runs from {sweep.folder}.")


def show(sweep: Sweep, *, json_only: bool) -> int:
    """Write the page, and print the comparison."""
    from drover.pipeline.reporting.document import console_lines
    from drover.pipeline.reporting.render import html

    waiting = [name for name, run in sweep.data.items() if not run.is_done]
    trials = [trial for trial in sweep.trials() if trial.variant not in waiting]
    runs = sweep.runs([*waiting, *(trial.variant for trial in trials if not trial.is_done)])
    experiment = experiment_of(sweep, runs)
    document, page = experiment.document(), sweep.folder / PAGE
    if experiment.baseline.runs:
        write_text(page, html(document))
    if json_only:
        print(json.dumps(experiment.record(), ensure_ascii=False, allow_nan=False))
    else:
        for problem in refusals(partial(refuse_changed, sweep, [*trials, *runs])):
            echo(problem)
        draw(*console_lines(document, 1), *([f"page      {page}"] if experiment.baseline.runs else []))
    return 0


def experiment_of(sweep: Sweep, runs: Sequence[SweepRun]) -> Experiment:
    """What is done of a sweep. Only runs whose results are up to date count."""
    from drover.pipeline.reporting.experiment import Experiment, SweepVariant

    variants = [SweepVariant(
        name, overrides, {run.seed: run.config.folder for run in runs if run.variant == name and run.is_done},
        {run.seed: reason for run in runs if run.variant == name and (reason := run.diverged)}, len(sweep.given.seeds))
        for name, overrides in sweep.variants.items()]
    return Experiment(sweep.path.stem, sweep.folder, variants[0], variants[1:])


main = Program("drover sweep", __doc__, add_options, work, interrupted="stopped; the same command continues")
