"""Modules from outside of Drover that a configuration needs: which files those of training are, and whether they and
the packages of extras are there at all. Nothing is imported for that, but for the table that names an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drover.pipeline.config.kinds import source_of
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError, absent

OURS = "drover."


def training_code(config: Config) -> dict[str, Path]:
    """The source files of the attention, the optimizer and the hooks that come from outside, by module, as far as
    found."""
    named = [config.train.attention, config.train.optimizer, *(hook.kind for hook in config.train.hooks)]
    with suppress(UserError):
        named.append(optimizer_kind(config.train.optimizer).make)
    modules = {name.partition(":")[0] for name in named if ":" in name and not name.startswith(OURS)}
    return {module: path for module in sorted(modules) if (path := source_of(module)) is not None}


def absent_attention(config: Config) -> Iterator[str]:
    """That the module which `train.attention` names is not there, as a sentence: the launcher does not import it."""
    module, colon, _ = config.train.attention.partition(":")
    if colon and source_of(module) is None:
        yield (f"train.attention names {config.train.attention}, but there is no module {module}. Name its file in "
               f"`plugins`, put it beside one that is named there, or install it.")


def needed_modules(config: Config, stage: str) -> Iterator[tuple[str, str, str]]:
    """What of a configuration needs a module that not every run needs, which one, and what would do without it.

    Raises:
        UserError: filters, sinks or hooks cannot be had, or have wrong settings.
    """
    shard, train = config.shard, config.train
    if stage == "shard":
        for source in shard.sources:
            if source.kind == "hf":
                yield f"the source {source.name} (kind hf)", "datasets", "take its files by kind files"
        if shard.near_duplicates is not None:
            yield "shard.near_duplicates", "rensa", "set shard.near_duplicates to null"
    if stage == "train" and config.parallel.engine == "deepspeed":
        yield "parallel.engine deepspeed", "deepspeed", "take parallel.engine=fsdp2"
    if stage == "train" and train.precision == "fp8":
        yield "train.precision fp8", "torchao", "take train.precision=bf16"
    if stage == "evaluate" and config.evaluate.tasks:
        yield "evaluate.tasks", "lm_eval", "set evaluate.tasks=[]"
    for kinds, of, items in ((FILTERS, "shard", shard.filters), (SINKS, "train", train.log_to),
                             (HOOKS, "train", train.hooks)):
        for item in kinds.made(items) if stage == of else ():
            if item.needs:
                yield f"{kinds.setting} {item.kind}", item.needs, f"take {item.kind} out of {kinds.setting}"


def absent_packages(config: Config, stage: str) -> list[str]:
    """The packages that a stage needs and that are not installed, and kinds that cannot be had, as sentences."""
    try:
        return [problem for needed in needed_modules(config, stage) for problem in absent(*needed)]
    except UserError as error:
        return [str(error)]
