"""Modules from outside of Drover that a configuration needs for training: which files they are, and whether they are
there at all. Nothing is imported for that, but for the table that names an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from drover.pipeline.config.kinds import source_of
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.tree import Config
from drover.pipeline.errors import UserError

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


def absent_torchao(config: Config) -> Iterator[str]:
    """That the package which `train.precision` fp8 needs is not there, as a sentence."""
    if config.train.precision == "fp8" and find_spec("torchao") is None:
        yield ("train.precision is fp8, but the package torchao is not installed here: `pip install --editable "
               "'.[fp8]'` in the checkout installs it. Or take train.precision=bf16.")
