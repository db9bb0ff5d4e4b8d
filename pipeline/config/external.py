"""Modules outside of Drover that a configuration needs: the source files of those that training uses, and which of
them, or of the packages of extras, are missing. Only the table that names an optimizer is imported for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drover.pipeline.config.kinds import external_sources, source_of
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError, absent

OURS = "drover."


def training_code(config: Config) -> dict[str, Path]:
    """The source files of attention, optimizer and hooks that are not built in, by module, as far as they are found."""
    named = [config.train.attention, config.train.optimizer, *(hook.kind for hook in config.train.hooks)]
    with suppress(UserError):
        named.append(optimizer_kind(config.train.optimizer).make)
    return external_sources(name for name in named if not name.startswith(OURS))


def absent_attention(config: Config) -> Iterator[str]:
    """A sentence if the module that `train.attention` names is missing: the launcher does not import it."""
    module, colon, _ = config.train.attention.partition(":")
    if colon and source_of(module) is None:
        yield (f"train.attention names {config.train.attention}, but there is no module {module}. Name its file in "
               f"`plugins`, put it next to one that is named there, or install it.")


def needed_modules(config: Config, stage: str) -> Iterator[tuple[str, str, str]]:
    """Parts of a configuration that need an optional module: the part, the module, and how to do without.

    Raises:
        UserError: filters, loggers or hooks cannot be imported, or have wrong settings.
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
    """Packages that a stage needs and that are missing, and kinds that cannot be imported, as sentences."""
    try:
        return [problem for needed in needed_modules(config, stage) for problem in absent(*needed)]
    except UserError as error:
        return [str(error)]
