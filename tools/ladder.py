"""Train a ladder of small models, fit laws to their losses, and predict a larger training, which is then done.

    drover ladder configs/experiments/ladder.yaml --plan
    drover ladder configs/experiments/ladder.yaml
    drover ladder configs/experiments/ladder.yaml --json

The file names a configuration (`base`), sizes, tokens, learning rates, seeds, and the larger training (`predict`). Each
combination is an ordinary run, and all share the text and tokens of one. The loss is that of validation text after
export. The same command continues, and trains what was added to the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat

from drover.launch.local import find_machine
from drover.model.config import ModelConfig
from drover.model.presets import step_near
from drover.pipeline.config.checks import vocabulary_size
from drover.pipeline.config.loading import load_config, read_section, refusal, shipped
from drover.pipeline.config.section import LocalPath, Section, local_path
from drover.pipeline.config.training import TokenCount, read_tokens, tokens_text
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import Parser, Program, add_json, counted, draw, duration, echo, first, table
from drover.pipeline.core.files import Record, read_record, write_text
from drover.pipeline.reporting.document import value
from drover.tools.init import START_S, step_flops, training_rate
from drover.tools.sweep import Sweep, SweepFile, profile_of, train

if TYPE_CHECKING:
    from drover.pipeline.reporting.document import ReportDocument
    from drover.pipeline.reporting.ladder import TrainedRung

LEAST_STEPS = 20
"""A training of fewer says little about one of many."""
AROUND_S = 25.0
"""Seconds that a run takes besides the steps of its training: starts of three stages, the export and validation."""
SHAPE = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "ffn_dim_multiplier", "multiple_of",
         "tied_embeddings")
"""What a size decides of the model."""
PAGE = "ladder.html"
ParameterCount = Annotated[int, BeforeValidator(read_tokens), Field(gt=0)]


class Aim(Section):
    """The larger training."""

    parameters: ParameterCount
    """About so many parameters, such as 6M."""
    tokens: TokenCount
    """Tokens to train on."""


class LadderFile(Section):
    """A ladder: sizes, numbers of tokens, learning rates and seeds, every combination of which is trained."""

    base: LocalPath
    """The configuration of all runs, relative to this file. Of its model, the shape is replaced."""
    parameters: list[ParameterCount] = Field(min_length=1)
    """Sizes, such as [500k, 2M]. Each takes the shape whose parameters are next to it (`model/presets.py`)."""
    tokens: list[TokenCount] = []
    """Numbers of training tokens for every size. Warmup and decay are shares of the training, as in the base."""
    tokens_per_parameter: list[PositiveFloat] = []
    """In place of tokens: multiples of each size."""
    lr: list[PositiveFloat] = Field(min_length=1)
    """Learning rates. With three or more, the best is between two of them."""
    seeds: list[int] = Field([0], min_length=1)
    """The loss is the mean over seeds."""
    predict: Aim
    """The larger training."""

    def tokens_of(self, shape: ModelConfig) -> list[float]:
        """The numbers of tokens on which a shape is trained, in order."""
        return sorted([*self.tokens, *(share * shape.parameter_count for share in self.tokens_per_parameter)])


@dataclass(frozen=True)
class Rung:
    """A model and a training, to be done with each seed."""

    shape: ModelConfig
    steps: int
    lr: float
    base: Config

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.steps * self.base.train.batch_tokens

    @property
    def parameters(self) -> int:
        """Parameters, a tied matrix counted once."""
        return self.shape.parameter_count

    @property
    def name(self) -> str:
        """A name for its runs."""
        return f"{tokens_text(self.parameters)}-{tokens_text(self.tokens)}-lr{self.lr:g}"

    @property
    def flops(self) -> float:
        """Floating-point operations of the training."""
        train = self.base.train
        return self.steps * step_flops(self.shape, train.batch_tokens, train.sequence_length,
                                       muon=train.optimizer == "muon")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in which it differs from the base."""
        shape, train = self.shape, self.base.train
        share = self.steps / train.steps
        return {
            **{f"model.{name}": getattr(shape, name) for name in SHAPE},
            "train.steps": self.steps, "train.lr": self.lr, "train.warmup_steps": round(share * train.warmup_steps),
            **({} if train.decay_steps is None else {"train.decay_steps": max(1, round(share * train.decay_steps))})}


def read_ladder(path: Path, cluster: str = "local") -> tuple[LadderFile, Config]:
    """The file and its base; UserError for all problems. cluster: as of drover run."""
    made = read_section(path, LadderFile, "Give the file of a ladder; `drover ladder --help` shows one.")
    return made, load_config(shipped(Path(local_path(made.base)), path.parent), profile_of(cluster))


def rungs_of(file: LadderFile, base: Config, path: Path) -> list[Rung]:
    """Every combination of size, tokens and learning rate; UserError if they determine no law."""
    from drover.pipeline.evaluation.scaling import design_problems

    vocabulary = vocabulary_size(base)
    if vocabulary is None:
        raise refusal(["The base takes a tokenizer that exists, so the parameters are not known. Set "
                       "model.vocab_size in the base."], path)
    if bool(file.tokens) == bool(file.tokens_per_parameter):
        raise refusal(["Give tokens or tokens_per_parameter, one of them."], path)
    problems = list[str]()
    shapes = dict[int, ModelConfig]()
    for size in sorted(file.parameters):
        shape = _shaped(base, size, vocabulary)
        shapes[shape.parameter_count] = shape
    batch = base.train.batch_tokens
    rungs = [Rung(shape, round(tokens / batch), lr, base) for shape in shapes.values()
             for tokens in file.tokens_of(shape)
             for lr in sorted(file.lr)]
    rungs = [*{rung.name: rung for rung in rungs}.values()]
    if (least := min(file.predict.tokens, *(rung.tokens for rung in rungs))) < LEAST_STEPS * batch:
        problems.append(f"{tokens_text(least)} tokens are fewer than {LEAST_STEPS} steps of {batch:,}. Give more "
                        f"tokens, or lower train.batch_tokens in the base.")
    if base.train.phases:
        problems.append("The base has train.phases, whose lengths would not fit other numbers of steps. Leave them "
                        "out.")
    problems += design_problems([*dict.fromkeys((rung.parameters, rung.tokens) for rung in rungs)])
    if problems:
        raise refusal(problems, path)
    return rungs


def target_of(file: LadderFile, base: Config, rungs: Sequence[Rung]) -> Rung:
    """The larger training, at a learning rate that is not known yet."""
    shape = _shaped(base, file.predict.parameters, rungs[0].shape.vocab_size or 0)
    return Rung(shape, round(file.predict.tokens / base.train.batch_tokens), file.lr[0], base)


def _shaped(base: Config, size: int, vocabulary: int) -> ModelConfig:
    """The base's network in the shape of a size."""
    step = step_near(size, vocabulary)
    return base.model.model_copy(update={"vocab_size": vocabulary, **{name: getattr(step, name) for name in SHAPE}})


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the ladder")
    parser.add_argument("--plan", action="store_true", help="only print what would be trained, and the time")
    parser.add_argument("--cluster", default="auto", metavar="auto|slurm|local|PROFILE", help="where, as of drover run")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Plan, train the grid, fit, train the larger one, write the page."""
    file, base = read_ladder(options.file, options.cluster)
    from drover.pipeline.reporting.ladder import Ladder

    rungs = rungs_of(file, base, options.file)
    target = target_of(file, base, rungs)
    if options.plan or not options.json:
        print_plan(rungs, target, len({*file.seeds}))
    if options.plan:
        return 0
    grid = sweep_of(options.file, file, base, rungs)
    if (status := train(grid, options.cluster)) or not all_ended(grid):
        return status
    ladder = Ladder(trained(grid, rungs), (target.parameters, target.tokens))
    echo(ladder.sentence, file=sys.stderr)
    target = replace(target, lr=ladder.target_rate)
    larger = sweep_of(options.file, file, base, [target])
    if (status := train(larger, options.cluster)) or not all_ended(larger):
        return status
    ladder = replace(ladder, outcome=trained(larger, [target])[0])
    show(ladder.page(f"Ladder {options.file.stem}"), ladder.as_json(), grid.folder / PAGE, json_only=options.json)
    return 0


def show(document: ReportDocument, record: dict[str, Any], page: Path, *, json_only: bool) -> None:
    """Write a page, and print what it says, or the record for programs."""
    from drover.pipeline.reporting.document import console_lines
    from drover.pipeline.reporting.render import html

    write_text(page, html(document))
    if json_only:
        print(json.dumps(record, ensure_ascii=False, allow_nan=False))
    else:
        draw(*console_lines(document), f"page      {page}")


def sweep_of(path: Path, file: LadderFile, base: Config, rungs: Sequence[Rung]) -> Sweep:
    """The runs of these rungs, as a sweep without a comparison."""
    source = str(shipped(Path(local_path(file.base)), path.parent))
    variants = {rung.name: tuple(f"{key}={json.dumps(setting)}" for key, setting in rung.settings.items())
                for rung in rungs}
    given = SweepFile(base=file.base, seeds=[*dict.fromkeys(file.seeds)], baseline=rungs[0].name)
    return Sweep(path, given, source, base, variants)


def all_ended(sweep: Sweep) -> bool:
    """Whether all its runs are done or have diverged. If not, what to do is printed."""
    if not all(run.is_done for run in sweep.data.values()):
        return False
    waiting = [run.config.name for run in sweep.runs() if not run.is_done and not run.diverged]
    if waiting:
        echo(f"Not done yet: {first(waiting)}. Give the same command again when these runs are done.",
             file=sys.stderr)
    return not waiting


def trained(sweep: Sweep, rungs: Sequence[Rung]) -> list[TrainedRung]:
    """What the runs of these rungs ended with."""
    from drover.pipeline.reporting.ladder import TrainedRung

    losses = dict[str, dict[int, float | None]]()
    for run in sweep.runs():
        path = Run(run.config).stage_folder("evaluate") / "results.json"
        results = None if run.diverged else read_record(path, Record, "Evaluate the run again.")
        losses.setdefault(run.variant, {})[run.seed] = value("validation[overall][bits_per_byte]", results)
    return [TrainedRung(rung.parameters, rung.tokens, rung.lr, losses[rung.name]) for rung in rungs]


def print_plan(rungs: Sequence[Rung], target: Rung, seeds: int) -> None:
    """What is trained, its cost, and how long it takes here."""
    rate = training_rate(find_machine(rungs[0].base.launch.device))

    def seconds(runs: Sequence[Rung]) -> float:
        return seeds * sum(START_S + AROUND_S + run.flops / rate for run in runs)

    every = [*rungs, target]
    rows = [["parameters", "blocks", "width", "tokens", "runs", "FLOPs", "time here"]]
    for shape in {rung.parameters: rung.shape for rung in every}.values():
        own = [rung for rung in every if rung.shape == shape]
        rows.append([tokens_text(shape.parameter_count), str(shape.layers), str(shape.dim),
                     ", ".join(dict.fromkeys(tokens_text(rung.tokens) for rung in own)), str(seeds * len(own)),
                     f"{seeds * sum(rung.flops for rung in own):.2e}", duration(seconds(own))])
    draw(table(rows, rows[0][:3] + rows[0][4:]), "",
         f"{counted(seeds * len(every), 'run')}, the larger training included: "
         f"{seeds * sum(rung.flops for rung in every):.2e} FLOP, about {duration(seconds(every))} here at "
         f"{rate / 1e9:,.0f} GFLOP/s, estimated from small matrix products, if nothing else runs")


main = Program("drover ladder", __doc__, add_options, work, interrupted="stopped; the same command continues")
