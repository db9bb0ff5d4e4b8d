"""The words of a command that name a configuration and change its settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from drover.pipeline.config.explaining import MEANINGS, settings_meant
from drover.pipeline.config.section import keys_of
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import Parser, first

ENDINGS = (".yaml", ".yml")


class ConfigWords(argparse.Action):
    """Takes the configuration's file, by the end of its name, from the words of a command; the others stay in order."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
                 ) -> None:
        others = [word for word in values if "=" not in word and word.endswith((".toml", ".py"))]
        if others:
            parser.error(f"{others[0]} is not read: a configuration is YAML. docs/coming-from.md compares the settings "
                         f"of other projects with Drover's.")
        files = [word for word in values if word.endswith(ENDINGS) and not re.match("[^/=]+=", word)]
        given = [*filter(None, [namespace.config]), *files]
        if len(given) > 1:
            parser.error(f"a command takes one configuration, and these are {len(given)}: {', '.join(given)}. Leave "
                         f"out all but one (`base:` in a file names those that it builds on).")
        namespace.config = given[0] if given else None
        setattr(namespace, self.dest, [word for word in values if word not in files])


def add_settings(parser: Parser, word: str = "", meaning: str = "") -> None:
    """FILE or --config FILE, and settings that override the file's. word: what other words are, which are kept with the
    settings; meaning: what they are for."""
    parser.add_argument("overrides", nargs="*", default=[], action=ConfigWords,
                        metavar="|".join(filter(None, ["FILE.yaml", word, "section.key=value"])),
                        help=f"{meaning}FILE.yaml: the run's configuration; section.key=value: overrides a setting of "
                             f"it")
    parser.add_argument("--config", metavar="FILE", help="a configuration whose name does not end in .yaml")
    parser.instead = as_setting


def as_setting(words: Sequence[str]) -> str:
    """How to write the setting that an unknown option names; "" if there is none. words: the option and what follows.
    """
    option, sign, value = words[0].partition("=")
    if not sign:
        given = [word for word in words[1:2] if not re.search("^--|=", word) and not word.endswith(ENDINGS)]
        value = given[0] if given else "VALUE"
    sections = {key.rpartition(".")[0] for key in keys_of(Config)}
    ours = settings_meant(option.strip("-").replace("-", "_"))
    forms = [f"'{key}=VALUE' ({MEANINGS[key]})"  # it may have another unit
             if key in MEANINGS and not option.endswith(key.rpartition(".")[2]) else f"'{key}={value}'"
             for key in ours if key not in sections] or [f"the section '{key}'" for key in ours]
    return f"settings have no dashes; did you mean {first(forms)}?" if forms else ""
