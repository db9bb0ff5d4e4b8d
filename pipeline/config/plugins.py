"""Plugins: modules outside of the package that register filters, optimizers and more when they are imported.

`plugins: [filters/ours.py, our_package.optimizers]` in a configuration names them. Every process that gets the
configuration on its command line imports them: launcher, stages, ranks, workers. A process that opens the folder of a
run (a tool, `reuse`) imports none that the folder names: a folder is data. There the user names them with `--plugin`.
docs/extending.md says what can be added.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from drover.pipeline.config.section import local_path, shortened
from drover.pipeline.core.command_line import add_run
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError, printable

_LOADED: dict[str, Path] = {}


def loaded_plugins() -> dict[str, Path]:
    """The files of the plugins that this process has imported, by module name."""
    return dict(_LOADED)


def plugin_folders() -> list[str]:
    """Folders from which other processes can import the same plugins."""
    return sorted({str(_root(name, path)) for name, path in _LOADED.items()})


def plugin_files() -> list[Path]:
    """The files of the imported plugins, and of modules in the same folders that they imported."""
    folders = {path.parent for path in _LOADED.values()}
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return sorted({*_LOADED.values(), *(path for file in files if file and Path(file).is_absolute()  # not torch.classes
                                        and (path := Path(file).resolve()).parent in folders)})


def load_plugins(names: Any, folder: Path, place: str) -> list[str]:
    """Import the plugins of a configuration, in order.

    Args:
        names: names of modules, or of files that end in .py, relative to `folder` or the working directory.
        place: the line that names them, for errors.

    Returns:
        The names in a form that any process can use: files with their whole path.

    Raises:
        UserError: one does not exist, cannot be imported, or has the name of another module.
    """
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{place}: `plugins` is a list of modules and files, not {shortened(repr(names))}.")
    usable = []
    for name in map(local_path, names):
        path = _file(name, folder, place) if name.endswith(".py") else None
        _import(_module(name), path, place)
        usable.append(str(path or name))
    return usable


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    """--plugin, for programs that open the folder of a run. It may be given several times. Reading the argument imports
    the plugin; UserError if that fails."""
    parser.add_argument("--plugin", type=lambda name: load_plugins([name], Path(), "--plugin")[0], metavar="FILE",
                        help="import this plugin, a file or module (may be given several times); those that a run's "
                             "config.yaml names are not imported")


def add_run_and_plugins(parser: argparse.ArgumentParser) -> None:
    """RUN and --plugin, for programs that work on one run."""
    add_run(parser)
    add_plugin_option(parser)


def imported(names: list[str]) -> list[str]:
    """Those of a run's plugins that this process has imported, in a form that any process can use."""
    return [str(_LOADED[_module(name)]) if name.endswith(".py") else name for name in names if _module(name) in _LOADED]


def left_out(names: Any, run: Path) -> str:
    """A note on a run's plugins that this process has not imported; "" if there are none."""
    absent = [str(name) for name in names if _module(str(name)) not in _LOADED] if isinstance(names, list) else []
    return printable(
        f"The run {run} names plugins that were not imported: {', '.join(absent)}. Opening a run's folder imports no "
        f"code. If you trust them, name them: give a tool --plugin {' --plugin '.join(absent)}, give launch/submit.py "
        f"or a stage plugins=[{','.join(absent)}].") if absent else ""


@cache
def warn(text: str) -> None:
    """Print a warning to stderr, once in this process."""
    echo(text, file=sys.stderr)


def _module(name: str) -> str:
    """The module name of a plugin."""
    return Path(name).stem if name.endswith(".py") else name


def _file(name: str, folder: Path, place: str) -> Path:
    # The last is for a run that was moved with its plugins: its configuration has their former whole paths.
    moved = [folder / Path(name).name] if Path(name).is_absolute() else []
    for path in (folder / name, Path(name), *moved):
        if path.is_file():
            return path.resolve()
    looked = " and ".join(dict.fromkeys([str(folder.absolute()), str(Path.cwd())]))
    raise UserError(f"{place}: there is no plugin {name} (looked in {looked}). Put it back or next to the "
                    f"configuration, or correct its path.")


def _import(name: str, path: Path | None, place: str) -> None:
    if path is not None and (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
        # Workers and other processes that this one starts find it in the same way.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{place}: the plugin {shortened(str(path or name))} cannot be imported: "
                        f"{type(error).__name__}: {shortened(str(error), 2000)}") from error
    origin = Path(str(module.__file__)).resolve()
    if path is not None and origin != path:
        raise UserError(f"{place}: the plugin {path} has the name of another module, {origin}. Rename it.")
    _LOADED[name] = origin


def _root(name: str, path: Path) -> Path:
    """The folder from which `import name` finds the file."""
    package = path.name == "__init__.py"
    return path.parents[name.count(".") + package]
