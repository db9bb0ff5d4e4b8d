"""Print a script that completes commands, options, stages, settings, runs, files and clusters in your shell.

    eval "$(drover completion bash)"        in ~/.bashrc
    eval "$(drover completion zsh)"         in ~/.zshrc, after compinit
    drover completion fish | source         in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from functools import cache

from drover.__main__ import COMMANDS, program
from drover.model.presets import PRESETS
from drover.pipeline.config.loading import CLUSTERS
from drover.pipeline.config.section import keys_of
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.console import RUNS, Parser, Program

RUN_PLACES = frozenset({"RUN", "MODEL"})
CONFIG_PLACES = frozenset({"FILE.yaml"})
"""Metavars in whose place a run, and a YAML file, may be given."""
BASH = """\
_drover() {{
  local words= runs= files= one word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$COMP_CWORD ${{COMP_WORDS[1]}} $before $word" in
    *=\\ *|*\\ =) ;;  # the value of a setting
{cases}
  esac
  local IFS=$'\\n'  # the shell must not read names of folders as words of its own
  COMPREPLY=()
  for one in $(compgen -W "${{words// /$IFS}}" -- "$word"
               [ -z "$runs" ] || (cd {runs} 2>/dev/null && compgen -d -- "$word")
               [ -z "$files" ] || {{ compgen -d -S / -- "$word"; compgen -f -X '!*.y*ml' -- "$word"; }}); do
    case "$one" in *[=/]) COMPREPLY+=("$one") ;; *) COMPREPLY+=("$one ") ;; esac
  done
  [ "${{#COMPREPLY[@]}}" != 0 ] || compopt +o nospace 2>/dev/null  # zsh has no such command
}}
complete -o default -o nospace -F _drover drover
"""
FISH = """\
complete -c drover -f
{lines}
"""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def work(options: argparse.Namespace) -> None:
    """Print the script."""
    if options.shell == "fish":
        print(FISH.format(lines="\n".join(_fish())), end="")
        return
    opening = "autoload -U +X bashcompinit && bashcompinit\n" * (options.shell == "zsh")
    print(opening + BASH.format(cases="\n".join(_cases()), runs=RUNS), end="")


@cache
def _words(place: str) -> list[str]:
    """What may be typed in the place of a metavar."""
    keys = [*keys_of(Config)]
    sections = {key.rpartition(".")[0] for key in keys}
    known = {"STAGE": STAGES, "STAGES": [*STAGES, "all"], "PRESET": PRESETS, "section.key": keys,
             "PROFILE": [path.stem for path in CLUSTERS.glob("*.yaml")],
             "section.key=value": [f"{key}=" for key in keys if key not in sections]}
    return [*known.get(place, [place] * (place.isalpha() and place.islower()))]


def _offer(actions: list[argparse.Action]) -> tuple[list[str], bool, bool]:
    """Words in the places of arguments, and whether a run or a YAML file may be one."""
    places = [part for action in actions for part in str(action.metavar).split("|")]
    words = [str(word) for action in actions for word in action.choices or []]
    return [*words, *(word for place in places for word in _words(place))], \
        not RUN_PLACES.isdisjoint(places), not CONFIG_PLACES.isdisjoint(places)


def _arguments(command: str) -> tuple[list[str], list[list[argparse.Action]]]:
    """The options of a command, and what takes words: first all positional arguments together, then each option."""
    actions = [action for action in program(command).parser()._actions if action.help != argparse.SUPPRESS]
    return [option for action in actions for option in action.option_strings], [
        [action for action in actions if not action.option_strings],
        *([action] for action in actions if action.option_strings and action.nargs != 0)]


def _cases() -> Iterator[str]:
    """Cases over the word's number, the command, the word before and the word."""
    yield f'    1\\ *) words="{" ".join(COMMANDS)}" ;;'
    for command in COMMANDS:
        options, (positional, *valued) = _arguments(command)
        for [action] in valued:
            yield f"    *\\ {command}\\ {action.option_strings[-1]}\\ *) {_set([action])} ;;"
        yield f'    *\\ {command}\\ *\\ -*) words="{" ".join(options)}" ;;'
        yield f"    *\\ {command}\\ *) {_set(positional)} ;;"


def _set(actions: list[argparse.Action]) -> str:
    words, runs, files = _offer(actions)
    return f'words="{" ".join(words)}" runs={"1" * runs} files={"1" * files}'


def _fish() -> Iterator[str]:
    """Commands for fish."""
    for command, (_, text) in COMMANDS.items():
        yield f"complete -c drover -n __fish_use_subcommand -a {command} -d {shlex.quote(text)}"
        options, taking = _arguments(command)
        after = f"complete -c drover -n '__fish_seen_subcommand_from {command}'"
        for option in options:
            yield f"{after} -l {option.lstrip('-')}"
        for actions in filter(None, taking):
            words, runs, files = _offer(actions)
            listed = " ".join([*words, *[f"(command ls {RUNS} 2>/dev/null)"] * runs,
                               *["(__fish_complete_suffix .yaml)"] * files])
            names = [f"-r -l {option[2:]}" for option in actions[0].option_strings]
            yield " ".join([after, *names, f"-f -a {shlex.quote(listed)}" if listed else "-F"])


main = Program("drover completion", __doc__, add_options, work)
